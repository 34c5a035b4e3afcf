//! Certification: a model cut into slices gives the tokens and, bit for bit, the logits of the whole model on the
//! CPU, and what cannot be cut is refused with the reason. `docs/architectures.md` shows the table that is proven here.
//!
//! It works on the crates `gguf` and `llama` alone: no process, no network, no frame.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests are tests")]
#![forbid(unsafe_code)]

mod architectures;
mod comparison;
mod conversation;
mod cutting;
mod hand_off;
mod real_models;
mod recipe;
mod recipes;
mod refusals;
