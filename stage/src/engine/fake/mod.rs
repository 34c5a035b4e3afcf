//! What the engine's tests put in place of llama.cpp, links and clients: a model whose every token depends on the whole
//! cache it was computed from, stages that keep the inbox rule in virtual time, and clients that remember every event.
//!
//! It exists to test the state machine alone; nothing of it is built into a worker.

mod client;
mod model;
mod pipeline;
mod random;
mod sampling;

pub(super) use client::{Client, Sink};
pub(super) use pipeline::{Ask, Costs, Pipeline};
pub(super) use random::mix;
pub(super) use sampling::{Draw, END_OF_GENERATION, FakeSampling};

use super::{Engine, EngineLimits, Rollback};

pub(super) type FakeEngine = Engine<FakeSampling, Sink>;

/// Limits that leave a test alone; it changes what it is about.
pub(super) fn roomy() -> EngineLimits {
    EngineLimits {
        slots: 4,
        n_ctx: 64,
        n_vocab: 32,
        prefill_chunk: 8,
        prefill_frames: 2,
        micro_batches: 2,
        queue_limit: 8,
        rollback: Rollback::Any,
    }
}
