//! End-to-end tests: real processes, real models, only what a user can see.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests are tests")]

mod adapted;
mod bad_input;
mod bench_serve;
mod chat_api;
mod clustered;
mod deployed;
mod doctor;
mod failure;
mod joining;
mod memory;
mod metrics;
mod node_replica;
mod nodes;
mod openai_client;
mod planning;
mod replicas;
mod roles;
mod slices;
mod strangers;
mod test_bed;
mod text_equality;
