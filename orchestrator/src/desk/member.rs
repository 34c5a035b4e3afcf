//! One replica at the desk: who waits for it, who holds its slots, and how soon it could begin with another. Pure.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use cluster::{Epoch, Millis, Role, TokensPerSecond};

use super::prefix::PromptPrefix;
use super::rates::{PredictedRates, Rates};
use super::standing::Standing;
use super::{Order, Ticket};
use crate::router::{DecodeView, ReplicaView};

/// What a replica does, and how fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// What it is used for.
    pub role: Role,
    /// Requests that it has room for.
    pub slots: usize,
    /// Requests in its line.
    pub waiting: usize,
    /// Requests with a slot: those whose prompts are computed, those whose KV changes hands, and those that generate.
    pub held: usize,
    /// Of these, those whose prompts are computed.
    pub prefilling: usize,
    /// Of these, those whose KV is to go to another replica, or to come from one.
    pub paused: usize,
    /// Prompt tokens per second, as observed, or as predicted until then.
    pub prefill: TokensPerSecond,
    /// Time per output token with one request, likewise.
    pub tpot_alone: Millis,
    /// The same with every slot busy.
    pub tpot_full: Millis,
    /// Whether the first was predicted or observed at all.
    pub knows_prefill: bool,
    /// Whether the other two were.
    pub knows_decode: bool,
}

/// A replica.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) standing: Standing,
    pub(super) role: Role,
    /// Whether it decodes what it has the prompt of: as its role says, or for want of others.
    pub(super) generates: bool,
    pub(super) slots: usize,
    /// The incarnation that serves; none while it does not.
    pub(super) serving: Option<Epoch>,
    /// The incarnation that holders of slots belong to.
    pub(super) epoch: Epoch,
    /// Oldest first.
    pub(super) line: BTreeSet<Ticket>,
    line_prompts: u64,
    /// Requests that hold a slot.
    pub(super) held: usize,
    /// Prompt tokens of those that hold a slot and have no token yet, less what was cached.
    prefilling_tokens: u64,
    pub(super) prefilling: usize,
    /// Requests that hold a slot while their KV changes hands: they get no tokens.
    pub(super) paused: usize,
    /// Prompts, and answers as they are expected to be, of all.
    tokens: u64,
    /// Requests in line or with a slot that must not meet each other.
    pub(super) apart: usize,
    rates: Rates,
    meter: Meter,
    /// Prompts it was given last: one for each slot, which keeps it until the next.
    given: VecDeque<PromptPrefix>,
}

/// What a replica did since something last changed there.
#[derive(Debug, Default)]
struct Meter {
    at: Duration,
    tokens: u64,
    /// When the prompt in progress began, or the one before it was done.
    prefill_at: Duration,
}

/// A request's share in a member's sums.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    /// Prompt tokens to compute.
    pub(super) prompt: u64,
    /// Prompt, and answer as expected.
    pub(super) tokens: u64,
    /// Whether it must not meet others like it.
    pub(super) is_apart: bool,
}

impl Member {
    pub(super) fn new(slots: u32, predicted: PredictedRates) -> Self {
        let slots = slots.max(1) as usize;
        Self {
            standing: Standing::Open,
            role: Role::Mixed,
            generates: true,
            slots,
            serving: None,
            epoch: Epoch(0),
            line: BTreeSet::new(),
            line_prompts: 0,
            held: 0,
            prefilling_tokens: 0,
            prefilling: 0,
            paused: 0,
            tokens: 0,
            apart: 0,
            rates: Rates::new(predicted, slots),
            meter: Meter::default(),
            given: VecDeque::new(),
        }
    }

    /// Another incarnation has nobody in its slots. The line stays.
    pub(super) fn begin(&mut self, epoch: Epoch, line: impl Iterator<Item = Share>, now: Duration) {
        self.epoch = epoch;
        (self.held, self.paused, self.prefilling, self.prefilling_tokens) = (0, 0, 0, 0);
        (self.tokens, self.apart) = (0, 0);
        for share in line {
            self.tokens += share.tokens;
            self.apart += usize::from(share.is_apart);
        }
        self.given.clear();
        self.forget_interval(now);
    }

    /// What was not seen does not count.
    pub(super) fn forget_interval(&mut self, now: Duration) {
        self.meter = Meter { at: now, tokens: 0, prefill_at: now };
    }

    pub(super) fn has_free_slot(&self) -> bool {
        self.serving.is_some() && self.held < self.slots
    }

    pub(super) fn enter_line(&mut self, ticket: Ticket, share: Share) {
        self.line.insert(ticket);
        self.line_prompts += share.prompt;
        self.tokens += share.tokens;
        self.apart += usize::from(share.is_apart);
    }

    pub(super) fn leave_line(&mut self, ticket: Ticket, share: Share) {
        if self.line.remove(&ticket) {
            self.line_prompts -= share.prompt;
            self.tokens -= share.tokens;
            self.apart -= usize::from(share.is_apart);
        }
    }

    /// A request gets a slot.
    pub(super) fn seat(&mut self, share: Share, prefix: &PromptPrefix, now: Duration) {
        self.note(now);
        self.held += 1;
        self.computes(share.prompt, now);
        self.tokens += share.tokens;
        self.apart += usize::from(share.is_apart);
        if self.given.len() == self.slots {
            self.given.pop_front();
        }
        self.given.push_back(prefix.clone());
    }

    /// Of a request in a slot, so many prompt tokens are computed.
    pub(super) fn computes(&mut self, prompt: u64, now: Duration) {
        self.note(now);
        if self.prefilling == 0 {
            self.meter.prefill_at = now;
        }
        self.prefilling += 1;
        self.prefilling_tokens += prompt;
    }

    /// A request whose prompt was computed elsewhere gets a slot, for its KV to come to.
    pub(super) fn reserve(&mut self, share: Share, now: Duration) {
        self.note(now);
        self.held += 1;
        self.paused += 1;
        self.tokens += share.tokens;
        self.apart += usize::from(share.is_apart);
    }

    /// The KV of a request that has a slot is to change hands.
    pub(super) fn pause(&mut self, now: Duration) {
        self.note(now);
        self.paused += 1;
    }

    /// It has, or is not to any more.
    pub(super) fn resume(&mut self, now: Duration) {
        self.note(now);
        self.paused -= 1;
    }

    /// So many of a request's prompt tokens need not be computed.
    pub(super) fn cached(&mut self, tokens: u64) {
        self.prefilling_tokens -= tokens;
    }

    /// A request's prompt is computed: its first token came.
    pub(super) fn first_token(&mut self, prompt: u64, now: Duration) {
        self.note(now);
        let spent = now.saturating_sub(self.meter.prefill_at).as_secs_f64();
        self.rates.saw_prefill(spent, prompt as f64);
        self.meter.prefill_at = now;
        self.prefilling -= 1;
        self.prefilling_tokens -= prompt;
    }

    /// A further token came.
    pub(super) fn token(&mut self) {
        self.meter.tokens += 1;
    }

    /// A request that had its first token gives its slot back.
    pub(super) fn unseat(&mut self, share: Share, now: Duration) {
        self.note(now);
        self.held -= 1;
        self.tokens -= share.tokens;
        self.apart -= usize::from(share.is_apart);
    }

    /// One that had none does.
    pub(super) fn unseat_early(&mut self, share: Share, now: Duration) {
        self.unseat(share, now);
        self.prefilling -= 1;
        self.prefilling_tokens -= share.prompt;
    }

    /// Requests that get tokens.
    pub(super) fn generating(&self) -> usize {
        self.held - self.prefilling - self.paused
    }

    /// Before the number of those that generate changes: what they got meanwhile.
    fn note(&mut self, now: Duration) {
        let n = self.generating();
        if n > 0 {
            let seconds = now.saturating_sub(self.meter.at).as_secs_f64();
            self.rates.saw_decode(n, seconds, self.meter.tokens);
        }
        (self.meter.at, self.meter.tokens) = (now, 0);
    }

    /// Seconds until a request that came now would begin: the prompts before it, and a slot's worth of generation for every full
    /// set of slots before it; as in the planner's simulator.
    pub(super) fn backlog(&self, mean_output: f64, now: Duration) -> f64 {
        let begun = now.saturating_sub(self.meter.prefill_at).as_secs_f64();
        let left = (self.rates.prefill_seconds(self.prefilling_tokens as f64) - begun).max(0.0);
        let work = left + self.rates.prefill_seconds(self.line_prompts as f64);
        if !self.generates {
            return work;
        }
        let free = self.slots.saturating_sub(self.held);
        let ahead = (self.line.len() + 1).saturating_sub(free) as f64;
        work + ahead / self.slots as f64 * mean_output * self.rates.tpot(self.slots)
    }

    /// As a request sees it that came now.
    pub(super) fn view(&self, replica: usize, order: &Order, mean_output: f64, now: Duration) -> ReplicaView {
        let beside = (self.held + self.line.len() + 1).min(self.slots);
        let expected = mean_output.min(f64::from(order.most_output));
        let decode = if self.generates { expected * self.rates.tpot(beside) } else { 0.0 };
        let prefix = self.given.iter().map(|given| given.shared_with(&order.prefix)).max().unwrap_or(0);
        ReplicaView {
            replica,
            waiting: self.line.len() + self.prefilling,
            held: self.held,
            slots: self.slots,
            backlog: self.backlog(mean_output, now),
            service: self.rates.prefill_seconds(f64::from(order.prompt)),
            decode,
            tokens: self.tokens,
            prefix,
        }
    }

    /// Seconds that a prompt of so many tokens takes; none where nobody has said or seen it.
    pub(super) fn prefill_seconds(&self, tokens: f64) -> Option<f64> {
        self.rates.knows_prefill().then(|| self.rates.prefill_seconds(tokens))
    }

    /// With every slot busy.
    pub(super) fn tokens_per_second(&self) -> f64 {
        self.slots as f64 / self.rates.tpot(self.slots)
    }

    /// For people.
    pub(super) fn load(&self) -> Load {
        let per_token = self.rates.prefill_seconds(1.0);
        Load {
            role: self.role,
            slots: self.slots,
            waiting: self.line.len(),
            held: self.held,
            prefilling: self.prefilling,
            paused: self.paused,
            prefill: TokensPerSecond(per_token.recip()),
            tpot_alone: Millis(self.rates.tpot(1) * 1e3),
            tpot_full: Millis(self.rates.tpot(self.slots) * 1e3),
            knows_prefill: self.rates.knows_prefill(),
            knows_decode: self.rates.knows_decode(),
        }
    }

    /// As the head of the central line sees it.
    pub(super) fn decode_view(&self, replica: usize) -> DecodeView {
        let free = self.slots.saturating_sub(self.held);
        DecodeView { replica, free, held: self.held, speed: 1.0 / self.rates.tpot(self.held + 1) }
    }
}
