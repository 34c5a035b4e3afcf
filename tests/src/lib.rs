//! Starts real `shoal` processes for tests and watches them from outside, as a user would.
//!
//! It knows the binary, HTTP and `/proc`; it must not reach into the product's crates to make a test easier.
#![forbid(unsafe_code)]

pub mod chat;
pub mod cluster;
pub mod draws;
pub mod emulated;
pub mod hand_off;
#[cfg(target_os = "linux")]
pub mod lan;
pub mod models;
pub mod node;
pub mod process;
pub mod reference;
#[cfg(target_os = "linux")]
pub mod restart;
pub mod server;
pub mod shifted;
#[cfg(target_os = "linux")]
pub mod site;
#[cfg(target_os = "linux")]
pub mod survival;
