//! The stage worker: holds some of a model's blocks, runs the frames that come from the stage before, and passes them on.
//! The last stage of a replica, its master, also holds the engine, which makes the frames and draws the tokens.
//!
//! A worker is a process of its own, because llama.cpp can end the process it runs in. It never supervises, restarts or
//! re-links anything: a broken chain is reported in its Status, and the agent decides.
//!
//! | file | is |
//! | --- | --- |
//! | `worker`, `parent` | how a worker starts, and its ties to the agent |
//! | `service`, `link`, `generate` | what it serves: links and frames, and on the master requests |
//! | `inference`, `events`, `shared` | the one thread that computes, what it is told, and what it tells |
//! | `inbox` | which frames run next |
//! | `chain`, `turns`, `load`, `memory` | the slices: running, loading and weighing them |
//! | `emulated` | instead of slices: a device that sleeps for its profiled times |
//! | `observed` | how long steps took |
//! | `master`, `sampling`, `engine` | continuous batching; `engine` knows neither llama.cpp nor tokio |
#![forbid(unsafe_code)]

pub mod engine;

mod chain;
mod emulated;
mod events;
mod generate;
mod inbox;
mod inference;
mod link;
mod load;
mod master;
mod memory;
mod observed;
mod parent;
mod sampling;
mod service;
mod shared;
mod turns;
mod worker;

pub use worker::{Worker, WorkerError, run_worker};
