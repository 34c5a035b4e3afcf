//! Finds the llama.cpp sources that `llama-cpp-sys-2` compiles, binds the C++ shim's headers and compiles the shim.
//!
//! llama.cpp itself is built by `llama-cpp-sys-2`; this script only adds the shim. The phases run in the order of
//! `run`. Environment variables go above features and above what is found:
//!
//! - `SHOAL_LLAMA_SRC`: the llama.cpp folder whose headers the shim is compiled against. It must be the version
//!   that `llama-cpp-sys-2` builds, since the shim uses C++ classes of it.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};

use cargo_metadata::{CargoOpt, MetadataCommand};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The package that carries llama.cpp, as Cargo.toml names it.
const SOURCE_PACKAGE: &str = "llama-cpp-sys-2";

/// Folders of llama.cpp that the shim includes from; `common` and `src` are not installed by llama.cpp's CMake.
const INCLUDE_FOLDERS: [&str; 5] = ["include", "ggml/include", "common", "src", "vendor"];

fn main() {
    if let Err(error) = run() {
        println!("cargo::error=llama-sys: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<()> {
    check_native_feature()?;
    let shim = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("shim");
    let includes = find_includes()?;
    declare_inputs(&shim)?;
    bind_headers(&shim, &includes)?;
    compile_shim(&shim, &includes)
}

/// Phase 1: `native` is a promise about the compiler flags, which only the user can set.
///
/// `llama-cpp-sys-2` turns `GGML_NATIVE` on exactly when `-C target-cpu=native` is among the flags. Without it ggml
/// compiles for AVX2, FMA and F16C on x86-64 and for armv8-a on arm64 Linux.
fn check_native_feature() -> Result<()> {
    println!("cargo::rerun-if-env-changed=CARGO_ENCODED_RUSTFLAGS");
    if env::var_os("CARGO_FEATURE_NATIVE").is_none() {
        return Ok(());
    }
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    if flags.split('\x1f').any(|flag| flag.ends_with("target-cpu=native")) {
        return Ok(());
    }
    Err("feature `native` needs RUSTFLAGS to hold `-C target-cpu=native`: the llama.cpp build takes its CPU flags \
         from there; set it, or build without the feature"
        .into())
}

/// Phase 2: the include folders of the llama.cpp that is linked.
fn find_includes() -> Result<Vec<PathBuf>> {
    println!("cargo::rerun-if-env-changed=SHOAL_LLAMA_SRC");
    let source = match env::var_os("SHOAL_LLAMA_SRC") {
        Some(folder) => {
            println!("cargo::rustc-env=SHOAL_LLAMA_PACKAGE_VERSION=from {}", folder.to_string_lossy());
            PathBuf::from(folder)
        }
        None => packaged_source()?,
    };
    INCLUDE_FOLDERS
        .iter()
        .map(|folder| {
            let path = source.join(folder);
            if path.is_dir() { Ok(path) } else { Err(missing_folder(&source, folder)) }
        })
        .collect()
}

fn missing_folder(source: &Path, folder: &str) -> Box<dyn Error> {
    format!(
        "no llama.cpp sources in {}: {folder} is missing; set SHOAL_LLAMA_SRC to the llama.cpp folder that {SOURCE_PACKAGE} builds",
        source.display()
    )
    .into()
}

/// Where Cargo keeps the source package: the registry cache or a vendored folder, Cargo knows.
fn packaged_source() -> Result<PathBuf> {
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("Cargo.toml");
    // The packages are there, since Cargo has just compiled them: it must not ask the network again. Only this
    // target's packages are, so the others must not be looked for.
    let options = ["--offline".into(), "--filter-platform".into(), env::var("TARGET")?];
    let metadata = MetadataCommand::new()
        .manifest_path(manifest)
        .features(CargoOpt::AllFeatures)
        .other_options(options)
        .exec()
        .map_err(|error| format!("cargo metadata cannot say where {SOURCE_PACKAGE} is ({error}); set SHOAL_LLAMA_SRC to its llama.cpp folder"))?;
    let package = metadata
        .packages
        .iter()
        .find(|package| package.name.as_str() == SOURCE_PACKAGE)
        .ok_or_else(|| format!("{SOURCE_PACKAGE} is not among the dependencies"))?;
    println!("cargo::rustc-env=SHOAL_LLAMA_PACKAGE_VERSION={}", package.version);
    let folder = package.manifest_path.parent().ok_or("its manifest has no folder")?;
    Ok(folder.join("llama.cpp").into_std_path_buf())
}

/// Phase 3: what a new run depends on. The pinned sources cannot change without a new Cargo.lock.
fn declare_inputs(shim: &Path) -> Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", shim.display());
    for file in files_in(shim)? {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    Ok(())
}

fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

/// Phase 4: Rust declarations of the shim's own functions and types, and of nothing else: llama.cpp's types come
/// from `llama-cpp-sys-2`, so that a pointer from one side fits the other.
fn bind_headers(shim: &Path, includes: &[PathBuf]) -> Result<()> {
    let bindings = bindgen::Builder::default()
        .header(shim.join("shoal_shim.h").to_string_lossy())
        .clang_args(includes.iter().map(|folder| format!("-I{}", folder.display())))
        .allowlist_item("(shoal|SHOAL)_.*")
        .blocklist_item("(llama|ggml|gguf|LLAMA|GGML|GGUF)_.*")
        .raw_line("use llama_cpp_sys_2::*;")
        .prepend_enum_name(false)
        .generate_comments(true)
        .generate()?;
    bindings.write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("shim.rs"))?;
    Ok(())
}

/// Phase 5: every `shim/*.cpp`. The archive is bundled into this crate's rlib, which the linker meets before that of
/// `llama-cpp-sys-2`: the shim needs `llama-common`, never the other way round.
fn compile_shim(shim: &Path, includes: &[PathBuf]) -> Result<()> {
    let sources = files_in(shim)?
        .into_iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "cpp"));
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").files(sources).include(shim).warnings(true);
    for folder in includes {
        // As system headers: their warnings are not ours.
        let flag = if build.get_compiler().is_like_msvc() { "/external:I" } else { "-isystem" };
        build.flag(flag).flag(folder);
    }
    if env::var("CARGO_CFG_TARGET_OS")? == "macos" {
        // llama-cpp-sys-2 names libc++ already; a second mention only draws linker warnings.
        build.cpp_link_stdlib(None);
    }
    build.try_compile("shoal_shim")?;
    Ok(())
}
