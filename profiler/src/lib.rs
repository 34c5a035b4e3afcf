//! Measures what the planner plans with: latency of reduced models, memory, and the cost of idling.
//!
//! Knows slices and llama.cpp; nothing of plans, replicas or requests.
#![forbid(unsafe_code)]

pub mod idle_gap;
pub mod statistics;
