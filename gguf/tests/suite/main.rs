//! Tests of the whole crate through its public face, in one binary.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says so by panicking")]

mod common;
mod cuts;
mod malformed;
mod properties;
mod shapes;
mod splits;
