//! The part of a replica that decodes, and on a mixed one prefills between steps.
//!
//! All running requests get tokens at one rate that depends on their number, so a replica keeps one counter of tokens
//! since its start and a request is done when the counter has moved on by its length. That makes every event
//! O(log n), whatever the number of requests running.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::SimReplica;

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
    prefill: Option<Chunks>,
    /// Requests routed to a mixed replica, waiting for a slot and the prefill before them.
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
            prefill: None,
            line: VecDeque::new(),
            line_work: 0.0,
            busy: vec![0.0; replica.slots + 1],
            prefilling: 0.0,
        }
    }

    pub(super) fn is_prefilling(&self) -> bool {
        self.prefill.is_some()
    }

    /// Seconds of the prefill in progress that are left at full speed.
    pub(super) fn prefill_left(&self) -> f64 {
        self.prefill.map_or(0.0, |chunks| chunks.left)
    }

    /// Seconds per token now, and the share of a second that prefill gets.
    fn rates(&self, replica: &SimReplica) -> (f64, f64) {
        let n = self.running.len();
        match (&self.prefill, n) {
            (None, _) => (replica.tpot(n), 0.0),
            (Some(_), 0) => (replica.tpot(1), 1.0),
            (Some(chunks), n) => {
                let step = replica.tpot(n) + chunks.chunk;
                (step, chunks.chunk / step)
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
        if let Some(chunks) = &mut self.prefill {
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
        let prefilled = self.prefill.map(|chunks| chunks.left.max(0.0) / share);
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
        let chunks = (prompt / replica.prefill.chunk()).ceil().max(1.0);
        self.prefill = Some(Chunks {
            request,
            left: pass.slowest,
            chunk: pass.slowest / chunks,
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
        let chunks = self.prefill.filter(|chunks| self.is_now(chunks.left / share))?;
        self.prefill = None;
        Some(Done::Prefilled(chunks.request, chunks.tail))
    }

    /// Whether what is so many seconds away is due. The clock is made of rounded sums, so a nanosecond is nothing; and what
    /// is closer than the clock's next number would never come.
    fn is_now(&self, seconds: f64) -> bool {
        const EPSILON: f64 = 1e-9;
        seconds <= EPSILON || self.now + seconds <= self.now
    }
}
