//! What Shoal's processes say to each other: gRPC messages, the checks every received message passes before it is
//! used, the worker's configuration, how processes find each other, and the TLS identities under which all of it travels.
//!
//! Nothing here runs a model or supervises a process, and no other crate knows a byte layout.
#![forbid(unsafe_code)]

pub mod certify;
pub mod checkup;
pub mod emulation;
pub mod finding;
pub mod fingerprint;
pub mod frame;
pub mod hand_off;
pub mod identity;
pub mod listen;
pub mod membership;
pub mod node;
pub mod observation;
pub mod patience;
pub mod pin;
pub mod plan_files;
pub mod rows;
pub mod sampling;
pub mod slices;
pub mod slots;
pub mod throttle;
pub mod tls;
pub mod token;
pub mod trust;
pub mod worker;

/// The messages and services of `proto/`, as generated.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated; documented in the .proto file"
)]
pub mod v1 {
    tonic::include_proto!("shoal.v1");
}
