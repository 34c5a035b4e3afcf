//! The Lan harness: that hosts, links, cuts and limits are what a test asks for. Skipped, with the reason on standard
//! error, where network namespaces cannot be made.
#![cfg(target_os = "linux")]
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr, clippy::print_stdout, clippy::unwrap_used)] // helpers of tests are tests

mod cuts;
mod doctor;
mod hand_off;
mod hosts;
mod joining;
mod leftovers;
mod limits;
mod links;
mod slices;
mod surveys;
mod survival;
mod traffic;
mod watched;
