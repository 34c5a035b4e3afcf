//! The part of a replica that decodes, and on a mixed one prefills between steps.
//!
//! All running requests get tokens at one rate that depends on their number, so a replica keeps one counter of tokens
//! since its start and a request is done when the counter has moved on by its length. That makes every event
//! O(log n), whatever the number of requests running.
//!
//! Prompts that have a slot are computed in turns, chunk by chunk, so each of them gets an equal share of what prefill gets.
//! Between two chunks come as many decode steps as the engine lets pass (`stage::engine::schedule`): where decode steps alone can
//! keep a stage busy, several, else one, since a step has to wait for the chunk that it meets.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::SimReplica;

/// Decode steps for each chunk where decoding keeps a stage busy, at most, and one for every so many tokens of the chunk.
const MOST_STEPS: f64 = 4.0;
const TOKENS_PER_STEP: f64 = 64.0;

/// A prefill in progress on a mixed replica.
#[derive(Debug, Clone, Copy)]
struct Chunks {
    request: usize,
    /// Seconds of the slowest stage that are left.
    left: f64,
    /// Seconds of one chunk.
    chunk: f64,
    /// Seconds the last chunk needs after the slowest stage is done with it.
    tail: f64,
}

/// State of one replica.
#[derive(Debug)]
pub(super) struct Decoder {
    now: f64,
    /// Tokens since the start.
    tokens: f64,
    /// Running requests by the counter's value at their end. Counters are never negative, so their bits are in order.
    running: BinaryHeap<Reverse<(u64, usize)>>,
    /// Slots taken: running, reserved for a cache on its way, or prefilling.
    pub taken: usize,
    prefills: Vec<Chunks>,
    /// Requests routed to a mixed replica, waiting for a slot.
    pub line: VecDeque<usize>,
    /// Seconds of prefill in that line.
    pub line_work: f64,
    pub busy: Vec<f64>,
    pub prefilling: f64,
}

/// What happened at a replica's event.
pub(super) enum Done {
    /// A request has its last token.
    Decoded(usize),
    /// A request's prefill leaves the slowest stage; it is complete this many seconds later.
    Prefilled(usize, f64),
}

impl Decoder {
    pub(super) fn new(replica: &SimReplica) -> Self {
        Self {
            now: 0.0,
            tokens: 0.0,
            running: BinaryHeap::new(),
            taken: 0,
            prefills: Vec::new(),
            line: VecDeque::new(),
            line_work: 0.0,
            busy: vec![0.0; replica.slots + 1],
            prefilling: 0.0,
        }
    }

    /// Requests that get tokens.
    pub(super) fn n_running(&self) -> usize {
        self.running.len()
    }

    /// Prompts that are computed.
    pub(super) fn n_prefilling(&self) -> usize {
        self.prefills.len()
    }

    /// Seconds of the prefills in progress that are left at full speed.
    pub(super) fn prefill_left(&self) -> f64 {
        self.prefills.iter().map(|chunks| chunks.left).sum()
    }

    /// Seconds per token now, and the share of a second that each prefill gets.
    fn rates(&self, replica: &SimReplica) -> (f64, f64) {
        let (n, prefills) = (self.running.len(), self.prefills.len() as f64);
        match (self.prefills.is_empty(), n) {
            (true, _) => (replica.tpot(n), 0.0),
            (false, 0) => (replica.tpot(1), 1.0 / prefills),
            (false, n) => {
                let chunk = self.prefills.iter().map(|chunks| chunks.chunk).sum::<f64>() / prefills;
                let steps = steps_per_chunk(replica, n);
                let round = steps * replica.tpot(n) + chunk;
                (round / steps, chunk / round / prefills)
            }
        }
    }

    /// Moves the clock on to `time`.
    pub(super) fn advance(&mut self, replica: &SimReplica, time: f64) {
        let (tpot, share) = self.rates(replica);
        let passed = time - self.now;
        self.busy[self.running.len()] += passed;
        if !self.running.is_empty() {
            self.tokens += passed / tpot;
        }
        for chunks in &mut self.prefills {
            chunks.left -= passed * share;
            self.prefilling += passed * share;
        }
        self.now = time;
    }

    /// When the next thing happens, if nothing comes in before.
    pub(super) fn next(&self, replica: &SimReplica) -> Option<f64> {
        let (tpot, share) = self.rates(replica);
        let ends =
            self.running.peek().map(|Reverse((end, _))| (f64::from_bits(*end) - self.tokens).max(0.0) * tpot);
        let least = self.prefills.iter().map(|chunks| chunks.left.max(0.0)).min_by(f64::total_cmp);
        let prefilled = least.map(|left| left / share);
        match (ends, prefilled) {
            (Some(a), Some(b)) => Some(self.now + a.min(b)),
            (a, b) => a.or(b).map(|wait| self.now + wait),
        }
    }

    /// A request begins to decode; its slot is taken already.
    pub(super) fn start(&mut self, request: usize, tokens: f64) {
        self.running.push(Reverse(((self.tokens + tokens.max(0.0)).to_bits(), request)));
    }

    /// A prefill begins on a mixed replica; its slot is taken already. Returns its seconds.
    pub(super) fn start_prefill(&mut self, replica: &SimReplica, request: usize, prompt: f64) -> f64 {
        let pass = replica.prefill.of(prompt);
        self.prefills.push(Chunks {
            request,
            left: pass.slowest,
            chunk: pass.slowest / replica.prefill.n_chunks(prompt),
            tail: pass.sum - pass.slowest,
        });
        pass.slowest
    }

    /// The thing that was due, if it is; called until there is none.
    pub(super) fn take_due(&mut self, replica: &SimReplica) -> Option<Done> {
        let (tpot, share) = self.rates(replica);
        if let Some(&Reverse((end, request))) = self.running.peek()
            && self.is_now((f64::from_bits(end) - self.tokens) * tpot)
        {
            self.running.pop();
            return Some(Done::Decoded(request));
        }
        let done = self.prefills.iter().position(|chunks| self.is_now(chunks.left / share))?;
        let Chunks { request, tail, .. } = self.prefills.remove(done);
        Some(Done::Prefilled(request, tail))
    }

    /// Whether what is so many seconds away is due. The clock is made of rounded sums, so a nanosecond is nothing; and what
    /// is closer than the clock's next number would never come.
    fn is_now(&self, seconds: f64) -> bool {
        const EPSILON: f64 = 1e-9;
        seconds <= EPSILON || self.now + seconds <= self.now
    }
}

/// Decode steps of `n` requests that pass between two chunks.
fn steps_per_chunk(replica: &SimReplica, n: usize) -> f64 {
    let keeps_busy = n >= replica.stages;
    let steps = (replica.prefill.chunk() / TOKENS_PER_STEP).floor().clamp(1.0, MOST_STEPS);
    if keeps_busy { steps } else { 1.0 }
}
