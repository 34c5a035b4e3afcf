//! `shoal profile` from outside: real measurements of a small model, and what happens when they are disturbed.
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)]

mod bad_input;
mod disturbed;
mod measured;
mod profiling;
