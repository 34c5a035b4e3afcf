//! The engine: continuous batching over a pipeline of stages, at the master.
//!
//! [`Engine`] is a synchronous state machine. Its owner admits and cancels requests, takes the frames it makes and
//! sends them to stage 0, and hands back each step's logits when the last stage has run it. It has no thread, no clock
//! (the time is passed in) and no knowledge of llama.cpp or of how frames travel, so that it can be tested alone
//! under every order of events.
//!
//! # Order, or why a slot can be given away at once
//!
//! A slot freed by a cancellation is given to the next request in the same call, while rows of the cancelled one may
//! still be under way. Nothing waits for them, and nothing is fenced but by order. The engine counts on three rules
//! that stages keep:
//!
//! 1. Links deliver frames in the order they were sent.
//! 2. A stage takes waiting frames in the order they came, except that decode frames pass waiting prefill frames: it
//!    takes no prefill frame while a decode frame waits. It may run several waiting decode frames as one batch.
//! 3. A frame's operations are applied right before its rows; every frame is run, whatever became of its request, and
//!    is passed on, one frame for one, in the order of running.
//!
//! From these follows that **on every stage, the frames of one slot run in the order the engine made them**:
//!
//! - *Two frames of one kind* never swap: rules 1 and 2, stage by stage.
//! - *A decode frame made before a prefill frame* reaches stage 0 before it. When the stage takes the prefill frame no
//!   decode frame waits, so the decode frame has been taken; by rule 3 they reach the next stage in this order.
//! - *A decode frame d made after a prefill frame p* may pass p, but not if both have rows of one slot. The request that
//!   d belongs to has had its whole prompt computed, so its last prefill frame q had come back when d was made. If p was
//!   made after q, it belongs to a later request of the slot, so d's was over before p was made, and d was not made after
//!   p. So p is q or was made before q; prefill frames do not swap, so p had run on every stage when q came back.
//!
//! Hence the tokens that the engine records for a slot when it makes a frame are what every stage's cache holds when it
//! comes to the slot's next frame. The first frame of a request removes what lies beyond its reused prefix, so it sees
//! nothing of the slot's earlier requests (case 9): rows of a cancelled request that are still under way are either
//! part of the recorded prefix or removed by that frame, which runs after them. When they come back, their key is no
//! longer that of the slot's request, and they are ignored.
//!
//! It follows too that of the decode frames that wait at a stage no two touch one slot, and decode frames carry no
//! operations, so any of them may be run as one batch. A stage that checks this itself, and lets no frame pass another
//! of its slot, will never find anything to hold back.

mod compose;
mod events;
mod frame;
mod hand_off;
mod limits;
mod queue;
mod request;
mod running;
mod sampling;
mod schedule;
mod slot;
mod steps;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::time::Duration;

use cluster::{SlotId, StepId};

pub use events::{
    Closed, Event, EventSink, FailureKind, FinishReason, Finished, GeneratedToken, HandedOver,
    TokenProbability,
};
pub use frame::{FrameKind, FrameMemory, StepFrame};
pub use hand_off::{TakenOver, Transfer, TransferEnd};
pub use limits::{EngineLimits, LimitsError, Rollback};
pub use request::{Admission, AdmitError, Request, RequestKey, Token};
pub use sampling::{Logits, Sample, Sampled, Sampling, SamplingError};
pub use steps::UnknownStep;

use queue::Queue;
use running::{Advance, Phase, Running, Ticket};
use schedule::{Pick, Schedule, Share};
use slot::Slot;
use steps::{OutputRow, Steps};

/// The state machine. `S` makes samplers, `E` takes events. Time is any monotonic clock's reading.
#[derive(Debug)]
pub struct Engine<S: Sampling, E> {
    limits: EngineLimits,
    sampling: S,
    link: Link,
    slots: Vec<Slot<Running<S::Sampler, E>>>,
    queue: Queue<S::Sampler, E>,
    schedule: Schedule,
    steps: Steps,
    /// Of frames that have been through.
    memory: Vec<FrameMemory>,
    releases: u64,
    generated_tokens: u64,
    prefilled_tokens: u64,
    taken_over: TakenOver,
}

#[derive(Debug)]
enum Link {
    Up,
    Down { reason: String },
}

/// The engine's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStatus {
    /// Slots in use.
    pub active: u32,
    /// Requests that wait for a slot.
    pub queued: u32,
    /// Frames that have not returned.
    pub in_flight: u32,
    /// Tokens drawn since the start.
    pub generated_tokens: u64,
    /// Prompt tokens computed since the start; cached ones are not counted.
    pub prefilled_tokens: u64,
    /// Slots that are held for others; they are in use.
    pub held: u32,
    /// Sequences taken over from others since the start.
    pub taken_over: TakenOver,
}

impl<S: Sampling, E: EventSink> Engine<S, E> {
    /// An engine with empty slots. It admits nothing until [`reset`](Self::reset) says that the stages are linked.
    ///
    /// # Errors
    /// When a limit is 0 that must not be.
    pub fn new(limits: EngineLimits, sampling: S) -> Result<Self, LimitsError> {
        limits.check()?;
        Ok(Self {
            limits,
            sampling,
            link: Link::Down { reason: "the stages were never linked".to_owned() },
            slots: (0..limits.slots).map(|id| Slot::new(SlotId(id), limits.n_ctx)).collect(),
            queue: Queue::new(limits.queue_limit),
            schedule: Schedule::new(&limits),
            steps: Steps::default(),
            memory: Vec::new(),
            releases: 0,
            generated_tokens: 0,
            prefilled_tokens: 0,
            taken_over: TakenOver::default(),
        })
    }

    /// The numbers it was made with.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// Its counters.
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            active: self.running().count() as u32,
            queued: self.queue.len() as u32,
            in_flight: self.steps.len() as u32,
            generated_tokens: self.generated_tokens,
            prefilled_tokens: self.prefilled_tokens,
            held: self.running().filter(|running| matches!(running.phase(), Phase::Held { .. })).count()
                as u32,
            taken_over: self.taken_over,
        }
    }

    /// Takes a request in: gives it a slot, or a place in the queue. Then ask for [frames](Self::next_frame).
    ///
    /// # Errors
    /// When the request is unfit, the queue is full, or the stages are not linked. No event is sent then.
    ///
    /// # Panics
    /// When the key is that of a request the engine holds.
    pub fn admit(&mut self, admission: Admission<S::Params, E>, now: Duration) -> Result<(), AdmitError> {
        let Admission { key, request, events } = admission;
        assert!(!self.holds(key), "{} has a key of its own, not {key:?}", request.id);
        if let Link::Down { reason } = &self.link {
            return Err(AdmitError::NotLinked { reason: reason.clone() });
        }
        request.check(&self.limits)?;
        let has_free_slot = self.has_free_slot();
        if !has_free_slot && self.queue.is_full() {
            return Err(AdmitError::QueueFull {
                slots: self.limits.slots,
                queued: self.queue.len(),
                limit: self.limits.queue_limit,
            });
        }
        let sampler = self
            .sampling
            .sampler(&request.sampling, &request.prompt, request.replayed)
            .map_err(AdmitError::Sampling)?;
        let Request { id, prompt, replayed, max_tokens, ignore_eos, hand_off, .. } = request;
        let ticket = Ticket { key, id, prompt, replayed, max_tokens, ignore_eos, hand_off, sampler, events };
        if has_free_slot {
            self.start(ticket, now);
        } else {
            self.queue.push(ticket);
        }
        self.check_invariants();
        Ok(())
    }

    /// Gives a request up, wherever it is. Its slot or place goes to the next at once, unless a transfer into the slot is under
    /// way; it gets no further event. A request that is already over is none of its business.
    pub fn cancel(&mut self, key: RequestKey, now: Duration) {
        if let Some(ticket) = self.queue.remove(key) {
            tracing::debug!(request = %ticket.id, "cancelled while queued");
        } else if let Some(index) = self.slot_of(key) {
            if self.slots[index].running.as_mut().is_some_and(Running::abandon) {
                return;
            }
            if let Some(running) = self.release(index) {
                tracing::debug!(request = %running.id(), phase = ?running.phase(), "cancelled");
            }
            self.start_waiting(now);
        }
        self.check_invariants();
    }

    /// The next frame to send, if one may be sent now. To be called until it gives none after every other call;
    /// frames must be sent in the order they are given.
    pub fn next_frame(&mut self) -> Option<StepFrame> {
        let decoding = self.running().filter(|running| running.is_decoding()).count();
        let pick = self.schedule.pick(decoding)?;
        let memory = self.memory.pop().unwrap_or_default();
        let (frame, outputs) = compose::frame(self.steps.next_id(), &pick, &mut self.slots, memory);
        if let Pick::Prefill(shares) = &pick {
            self.announce_next(shares);
        }
        self.steps.sent(&frame, outputs);
        self.check_invariants();
        Some(frame)
    }

    /// Indices of a step's rows (counted over all its runs) of which [`complete`](Self::complete) would want logits
    /// now. A later call may want fewer, never others.
    pub fn outputs_of(&self, step: StepId) -> impl Iterator<Item = usize> {
        let outputs = self.steps.outputs_of(step).iter();
        outputs.filter(|output| self.is_live(output)).map(|output| output.row)
    }

    /// Takes the memory of a frame that has been through, for the next one.
    pub fn recycle(&mut self, memory: FrameMemory) {
        // No more than can be under way at once.
        if self.memory.len() < (self.limits.micro_batches + self.limits.prefill_frames) as usize {
            self.memory.push(memory);
        }
    }

    /// Takes a step's result: draws a token for every generation that waited for it, and starts waiting requests in
    /// the slots of those that ended. Then ask for [frames](Self::next_frame).
    ///
    /// # Errors
    /// When no such step is in flight, as after [`fail_all`](Self::fail_all); nothing has changed.
    pub fn complete(&mut self, step: StepId, logits: &dyn Logits, now: Duration) -> Result<(), UnknownStep> {
        let returned = self.steps.returned(step)?;
        self.schedule.returned(returned.kind);
        if returned.kind == FrameKind::Prefill {
            self.prefilled_tokens += returned.rows as u64;
        }
        for output in &returned.outputs {
            self.advance(output, logits, now);
        }
        self.start_waiting(now);
        self.check_invariants();
        Ok(())
    }

    /// Ends every request with a failure, and refuses others until [`reset`](Self::reset). Steps in flight are given
    /// up: what the stages' caches hold is no longer known.
    pub fn fail_all(&mut self, kind: FailureKind, message: &str) {
        self.link = Link::Down { reason: message.to_owned() };
        self.schedule.clear();
        self.steps.clear();
        for slot in &mut self.slots {
            if let Some(running) = slot.release(0) {
                running.abort(kind, message);
            }
            slot.clear();
        }
        self.queue.drain().for_each(|ticket| ticket.fail(kind, message));
        self.check_invariants();
    }

    /// The stages are linked in a new epoch and have forgotten every sequence. Requests of the epoch before fail as
    /// [`FailureKind::ReplicaLost`]; others are admitted from now on.
    pub fn reset(&mut self) {
        self.fail_all(FailureKind::ReplicaLost, "the replica's stages were linked anew");
        self.link = Link::Up;
    }

    /// Gives a slot to a request; there must be a free one.
    fn start(&mut self, ticket: Ticket<S::Sampler, E>, now: Duration) {
        let Some(placement) = slot::place(&self.slots, &ticket.prompt, self.limits.rollback) else {
            unreachable!("{} was given a free slot", ticket.id)
        };
        let slot = &mut self.slots[placement.index];
        // Whoever has left meanwhile is not started.
        if let Ok(running) = Running::start(ticket, slot.id, placement.cached, now) {
            let cached = placement.cached;
            tracing::debug!(request = %running.id(), slot = slot.id.0, cached, "started");
            if running.unsent() > 0 {
                self.schedule.add_prompt(slot.id, running.next_rows());
            }
            slot.running = Some(running);
        }
    }

    /// Of prompts that have been sent as far as the schedule knew of them, the next rows.
    fn announce_next(&mut self, sent: &[Share]) {
        for Share { slot, .. } in sent {
            let running = self.slots[slot.0 as usize].running.as_ref();
            let next = running.map_or(0, Running::next_rows);
            if next > 0 && !self.schedule.waits(*slot) {
                self.schedule.add_prompt(*slot, next);
            }
        }
    }

    /// Gives free slots to those who have waited longest.
    fn start_waiting(&mut self, now: Duration) {
        while self.has_free_slot()
            && let Some(ticket) = self.queue.pop()
        {
            self.start(ticket, now);
        }
    }

    /// Takes a slot from its request.
    fn release(&mut self, index: usize) -> Option<Running<S::Sampler, E>> {
        self.releases += 1;
        let slot = &mut self.slots[index];
        self.schedule.forget(slot.id);
        slot.release(self.releases)
    }

    /// Hands a row's logits to the request that waits for them, unless it is gone.
    fn advance(&mut self, output: &OutputRow, logits: &dyn Logits, now: Duration) {
        if !self.is_live(output) {
            return;
        }
        let index = output.slot.0 as usize;
        let Some(running) = &mut self.slots[index].running else { return };
        let before = running.generated();
        let ends_generation = |token| self.sampling.ends_generation(token);
        let advance = running.advance(logits.row(output.row), ends_generation, &self.limits, now);
        self.generated_tokens += u64::from(running.generated() - before);
        match advance {
            Advance::Ready => self.schedule.add_ready(output.slot),
            Advance::Held => tracing::debug!(request = %running.id(), "held"),
            Advance::Over => {
                tracing::debug!(request = %running.id(), generated = running.generated(), "over");
                self.release(index);
            }
        }
    }

    fn is_live(&self, output: &OutputRow) -> bool {
        let running = self.slots[output.slot.0 as usize].running.as_ref();
        running.is_some_and(|running| running.key() == output.key)
    }

    fn has_free_slot(&self) -> bool {
        self.slots.iter().any(|slot| slot.running.is_none())
    }

    fn running(&self) -> impl Iterator<Item = &Running<S::Sampler, E>> {
        self.slots.iter().filter_map(|slot| slot.running.as_ref())
    }

    fn slot_of(&self, key: RequestKey) -> Option<usize> {
        let is_keys = |running: &Running<_, _>| running.key() == key;
        self.slots.iter().position(|slot| slot.running.as_ref().is_some_and(is_keys))
    }

    fn holds(&self, key: RequestKey) -> bool {
        self.queue.holds(key) || self.slot_of(key).is_some()
    }

    /// What is true between any two calls. A few comparisons per slot: nothing beside a step.
    fn check_invariants(&self) {
        assert!(self.queue.len() == 0 || !self.has_free_slot(), "nobody waits for a free slot");
        for slot in &self.slots {
            let id = slot.id;
            let awaited = self.steps.outputs().filter(|o| o.slot == id && self.is_live(o)).count();
            let (waits, awaits) = match slot.running.as_ref().map(|running| running.phase()) {
                None => (false, 0),
                Some(Phase::Prefill { .. }) => {
                    let all_sent = slot.running.as_ref().is_some_and(|r| r.unsent() == 0);
                    (!all_sent, usize::from(all_sent))
                }
                Some(Phase::Ready { .. }) => (true, 0),
                Some(Phase::InFlight) => (false, 1),
                Some(Phase::TakingOver { .. } | Phase::Held { .. }) => (false, 0),
            };
            assert_eq!(self.schedule.waits(id), waits, "{id} has rows to send or has not");
            assert_eq!(awaited, awaits, "{id} waits for one row at most, and only when all is sent");
        }
    }
}
