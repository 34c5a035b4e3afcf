//! Workers on a real model: SmolLM2, cut into slices, over TLS, in this process and in child processes.
//!
//! SmolLM2 (Q4_1) gives bit-equal logits whatever the batch, so texts are compared exactly.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test says so by panicking"
)]

mod emulated;
mod failure;
mod hand_off;
mod process;
mod replica;
mod text;
mod whole;
