//! Raw bindings: everything of `llama-cpp-sys-2` (llama.cpp, ggml, gguf), and a small C++ shim for what it lacks.
//!
//! The shim's functions are named `shoal_*`. None of them lets a C++ exception out: they return a
//! [`shoal_status`] and, on failure, write a message into the caller's [`shoal_error`]. This crate binds and does
//! nothing else; checks, ownership and safe types are in `llama`.

pub use llama_cpp_sys_2::*;
pub use shim::*;

/// Version of the package that carries llama.cpp, or the folder that the build was pointed to instead.
pub const PACKAGE_VERSION: &str = env!("SHOAL_LLAMA_PACKAGE_VERSION");

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unused_imports,
    unused_qualifications,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod shim {
    include!(concat!(env!("OUT_DIR"), "/shim.rs"));
}
