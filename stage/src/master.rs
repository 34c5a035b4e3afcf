//! The engine on the inference thread: what it is told, what becomes of its requests' clients, and how long a step may
//! be under way. Knows neither links nor inboxes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cluster::{Epoch, SlotId, StepId};
use protocol::frame::{Frame, Rows};
use protocol::worker::WorkerConfig;
use tokio::time::Instant;

use crate::chain::Chain;
use crate::engine::{
    Admission, Engine, EngineLimits, FailureKind, FrameKind, FrameMemory, LimitsError, Logits, RequestKey,
    Rollback, TransferEnd,
};
use crate::events::Admit;
use crate::generate::{Fate, Outbox, PostedEvents, Watch};
use crate::hand_off::TakeOvers;
use crate::sampling::{StageSampling, request};
use crate::shared::Shared;

/// The engine and what it must be told.
pub(crate) struct Master {
    engine: Engine<StageSampling, PostedEvents>,
    outbox: Outbox,
    shared: Arc<Shared>,
    /// The engine's clock reads the time since then.
    started: Instant,
    /// Requests that the engine may hold: no more than slots and queue together, and those that just ended.
    watched: Vec<(RequestKey, Watch)>,
    last_key: u64,
    step_deadline: Duration,
    /// When a step last came back, or the first went out.
    moved: Option<Instant>,
    /// Decode steps under way.
    sent: VecDeque<Sent>,
    take_overs: TakeOvers,
}

/// A decode step under way.
struct Sent {
    step: StepId,
    rows: usize,
    at: Instant,
}

impl Master {
    pub(crate) fn new(
        config: &WorkerConfig,
        shared: Arc<Shared>,
        sampling: StageSampling,
        take_overs: TakeOvers,
    ) -> Result<Self, LimitsError> {
        let limits = EngineLimits {
            slots: config.slots,
            n_ctx: config.n_ctx,
            n_vocab: sampling.n_vocab(),
            prefill_chunk: config.prefill_chunk,
            // One for each stage keeps all of them busy with one prompt; those that take turns cannot all be busy.
            prefill_frames: if config.turns.is_some() { 1 } else { config.n_stages },
            micro_batches: config.micro_batches,
            queue_limit: config.queue_limit,
            rollback: rollback(config),
        };
        let master = Self {
            engine: Engine::new(limits, sampling)?,
            outbox: Outbox::default(),
            shared,
            started: Instant::now(),
            watched: Vec::new(),
            last_key: 0,
            step_deadline: Duration::from_secs(u64::from(config.step_deadline_secs)),
            moved: None,
            sent: VecDeque::new(),
            take_overs,
        };
        master.publish();
        Ok(master)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Takes a request in, or refuses it; then tells who asked.
    pub(crate) fn admit(&mut self, Admit { generation, events, reply }: Admit) {
        self.last_key += 1;
        let (key, watch, now) = (RequestKey(self.last_key), events.watch(), self.now());
        let events = self.outbox.for_request(events);
        let admission = Admission { key, request: request(generation), events };
        let result = self.engine.admit(admission, now);
        if result.is_ok() {
            self.watched.push((key, watch));
        }
        // Before the reply: whoever asks for the counters after it finds the request among them.
        self.publish();
        // One who does not wait any more has dropped the event stream too, and is cancelled for it.
        let _ = reply.send(result);
    }

    /// Cancels the requests of clients that have left.
    pub(crate) fn cancel_abandoned(&mut self) {
        let (engine, now) = (&mut self.engine, self.started.elapsed());
        self.watched.retain(|(key, watch)| match watch.fate() {
            Fate::Alive => true,
            Fate::Over => false,
            Fate::Abandoned => {
                engine.cancel(*key, now);
                false
            }
        });
    }

    /// The stages are linked anew and empty.
    pub(crate) fn reset(&mut self) {
        self.take_overs.stop();
        self.engine.reset();
        self.moved = None;
        self.sent.clear();
        self.publish();
    }

    /// The stages are lost, and every request with them.
    pub(crate) fn lose(&mut self, reason: &str) {
        self.take_overs.stop();
        self.engine.fail_all(FailureKind::ReplicaLost, reason);
        self.moved = None;
        self.sent.clear();
        self.publish();
    }

    /// The next step, if one may go out now, for stage 0.
    pub(crate) fn next_step(&mut self, epoch: Epoch) -> Option<Frame> {
        // Before anything goes out for a slot that was held until now.
        self.tell_holds();
        let step = self.engine.next_frame()?;
        let now = Instant::now();
        self.moved.get_or_insert(now);
        if step.kind == FrameKind::Decode {
            self.sent.push_back(Sent { step: step.step, rows: step.tokens.len(), at: now });
        }
        Some(Frame {
            epoch,
            step: step.step,
            ops: step.ops,
            runs: step.runs,
            prefill: step.kind == FrameKind::Prefill,
            rows: Rows::Tokens(step.tokens),
            copies: step.copies,
        })
    }

    /// Rows of a step whose logits are wanted, counted from its first.
    pub(crate) fn outputs_of(&self, step: StepId) -> impl Iterator<Item = usize> {
        self.engine.outputs_of(step)
    }

    /// A step has been run; its rows begin at `first_row` of the chain's batch.
    pub(crate) fn complete(&mut self, step: StepId, chain: &dyn Chain, first_row: usize) {
        // A client may have left while the step was under way; then its slot goes to the next at once.
        self.cancel_abandoned();
        if let Err(unknown) = self.engine.complete(step, &StepLogits { chain, first_row }, self.now()) {
            tracing::debug!(%unknown, "a step came back that nobody waits for");
        }
        self.moved = (self.engine.status().in_flight > 0).then(Instant::now);
        if let Some(place) = self.sent.iter().position(|sent| sent.step == step)
            && let Some(sent) = self.sent.remove(place)
        {
            self.shared.observed().round_trips.add(sent.rows as u64, sent.at.elapsed());
        }
    }

    /// Takes the memory of a frame that has been through.
    pub(crate) fn recycle(&mut self, Frame { runs, rows, .. }: Frame) {
        let tokens = match rows {
            Rows::Tokens(tokens) => tokens,
            Rows::Hidden { .. } => Vec::new(),
        };
        self.engine.recycle(FrameMemory::of(runs, tokens));
    }

    /// Begins the transfers that are due, and ends the holds whose time is up.
    pub(crate) fn hand_off(&mut self, epoch: Epoch) {
        self.engine.expire_holds(self.now());
        while let Some(transfer) = self.engine.next_transfer() {
            self.take_overs.begin(epoch, transfer);
        }
    }

    /// A transfer has ended.
    pub(crate) fn transferred(&mut self, key: RequestKey, end: TransferEnd) {
        let (failure, now) = (end.failure().map(str::to_owned), self.now());
        if let Some(reason) = failure {
            tracing::warn!(request = key.0, %reason, "a sequence was not taken over; its prompt is computed here");
        }
        self.engine.transferred(key, end, now);
    }

    /// Ends a hold, unless it has ended by itself.
    pub(crate) fn release_held(&mut self, slot: SlotId, hold: RequestKey) {
        self.engine.release_held(slot, hold, self.now());
        self.publish();
    }

    fn tell_holds(&self) {
        self.shared.holds().are(self.engine.held_slots());
    }

    /// When something is to be done though nothing has come: a step is overdue, or a hold expires.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        let expiry = self.engine.next_expiry().map(|at| self.started + at);
        self.deadline().into_iter().chain(expiry).min()
    }

    /// When a step will have been under way for too long.
    fn deadline(&self) -> Option<Instant> {
        self.moved.map(|moved| moved + self.step_deadline)
    }

    /// Why the replica is given up, if no step has come back in time.
    pub(crate) fn overdue(&self, now: Instant) -> Option<String> {
        self.deadline().filter(|deadline| *deadline <= now).map(|_| {
            let (steps, seconds) = (self.engine.status().in_flight, self.step_deadline.as_secs());
            format!("none of {steps} steps in flight came back within {seconds} s")
        })
    }

    /// Makes the engine's counters known, then its events.
    pub(crate) fn publish(&self) {
        self.shared.set_engine(self.engine.status());
        // Before anybody hears that a slot is held.
        self.tell_holds();
        self.outbox.flush();
    }
}

fn rollback(config: &WorkerConfig) -> Rollback {
    match config.smallest_window {
        _ if config.recurrent => Rollback::AppendOnly,
        Some(window) => Rollback::Window(window),
        None => Rollback::Any,
    }
}

/// The chain's logits, by a step's own rows.
struct StepLogits<'a> {
    chain: &'a dyn Chain,
    first_row: usize,
}

impl Logits for StepLogits<'_> {
    fn row(&self, row: usize) -> Option<&[f32]> {
        self.chain.logits(self.first_row + row)
    }
}
