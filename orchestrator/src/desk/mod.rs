//! Where requests get their place: in a replica's slot, in its line, or apart while no replica serves. A state machine
//! without clock, threads or I/O; the time is passed in.
//!
//! - A request is bound by the router's [policy](crate::router) to one of the replicas that serve, and waits in its line, oldest
//!   first, until a slot is free. The replicas' engines get no request for which they have no slot, so nobody is stuck in
//!   the queue of one that was lost.
//! - When a replica is lost or comes back, all who wait are bound anew, by age. A request whose own replica was lost keeps its
//!   age, so it goes before those that came after it.
//! - Where replicas have roles, requests wait for decode slots in one [central line](Desk::handed_over).
//! - A replica that is [drained](Desk::drain) gets no more requests, and is lost to nobody when it goes.
//! - All lines together are bounded. Who was let in once is never refused: a bound is for newcomers.
//! - A request that lost its replica twice in a row without a token in between may be what kills them. It is kept
//!   [apart](Company::Apart): no replica gets two of these at once, so that innocent ones are told from the guilty.
//!
//! Predictions rest on what is observed here of the requests that pass: the time of prompts and tokens by replica, and
//! the mean length of answers.

mod central;
mod member;
mod moves;
mod place;
mod prefix;
mod rates;
mod standing;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use cluster::{Epoch, Role};
use rustc_hash::FxHashMap;

pub use central::{Errand, Kv};
pub use member::Load;
pub use moves::Move;
pub use place::Place;
pub use prefix::PromptPrefix;
pub use rates::PredictedRates;

use crate::router::{Policy, ReplicaView};
use central::Decode;
use member::{Member, Share};
use moves::Moves;
use standing::Standing;

/// A request at the desk. Older ones are smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// What a request needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens it may generate.
    pub most_output: u32,
    /// How its prompt begins.
    pub prefix: PromptPrefix,
    /// Beside whom it may be computed.
    pub company: Company,
}

/// Beside whom a request may be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Company {
    /// Anyone.
    Any,
    /// Nobody who must be apart too.
    Apart,
}

/// A request was let in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// By which it is known here.
    pub ticket: Ticket,
    /// Seconds until it will have a slot and those before it their first tokens, as predicted.
    pub wait: f64,
    /// Its place in line: 1 is the next to get a slot, 0 has one.
    pub position: usize,
}

/// As many requests wait as may.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{waiting} requests wait, of {limit} that may")]
pub struct Full {
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that may.
    pub limit: usize,
    /// Seconds until a slot might be free.
    pub wait: f64,
}

/// How a request leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// With all its tokens: its length counts for what is expected of others.
    Done,
    /// Before that.
    Early,
}

#[derive(Debug)]
struct Entry {
    order: Order,
    spot: Spot,
    /// With its slot: prompt tokens to compute, until the first token.
    prefill: Option<u64>,
    errand: Errand,
    decode: Decode,
    /// Expected tokens, as they were counted in its replica's sum.
    tokens: u64,
    generated: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spot {
    Parked,
    Line(usize),
    Slot(usize, Epoch),
}

/// The state machine.
#[derive(Debug)]
pub struct Desk {
    policy: Box<dyn Policy>,
    members: Vec<Member>,
    entries: FxHashMap<Ticket, Entry>,
    parked: BTreeSet<Ticket>,
    /// Waiting for a decode slot, in the order of their first tokens.
    central: VecDeque<Ticket>,
    moves: Moves,
    /// In lines and parked.
    waiting: usize,
    limit: usize,
    mean_output: f64,
    last_ticket: u64,
    /// Whose place changed without their doing.
    moved: Vec<Ticket>,
    views: Vec<ReplicaView>,
}

/// Expected of an answer before any was seen: a paragraph or two.
const FIRST_MEAN_OUTPUT: f64 = 128.0;

/// What one answer counts for in the mean: the last few dozen make it.
const OUTPUT_WEIGHT: f64 = 1.0 / 32.0;

impl Desk {
    /// A desk without replicas, in whose lines `limit` requests may wait.
    pub fn new(policy: Box<dyn Policy>, limit: usize) -> Self {
        Self {
            policy,
            members: Vec::new(),
            entries: FxHashMap::default(),
            parked: BTreeSet::new(),
            central: VecDeque::new(),
            moves: Moves::default(),
            waiting: 0,
            limit,
            mean_output: FIRST_MEAN_OUTPUT,
            last_ticket: 0,
            moved: Vec::new(),
            views: Vec::new(),
        }
    }

    /// Adds a replica that does not serve yet and will do both phases, and gives its number.
    pub fn add(&mut self, slots: u32, predicted: PredictedRates) -> usize {
        self.members.push(Member::new(slots, predicted));
        self.members.len() - 1
    }

    /// Answers are expected to have so many tokens, until they are seen to have others.
    pub fn expect_output(&mut self, mean: f64) {
        self.mean_output = mean.max(1.0);
    }

    /// A replica serves in an epoch, or does not. Who holds a slot of an epoch that went on serving keeps it.
    pub fn serve(&mut self, replica: usize, serving: Option<Epoch>, now: Duration) {
        let Some(member) = self.members.get_mut(replica) else { return };
        let serving = serving.filter(|_| member.standing == Standing::Open);
        if member.serving == serving {
            return;
        }
        member.serving = serving;
        member.forget_interval(now);
        if let Some(epoch) = serving.filter(|epoch| *epoch != member.epoch) {
            let entries = &self.entries;
            let line: Vec<Share> =
                member.line.iter().filter_map(|ticket| entries.get(ticket)).map(Entry::share).collect();
            member.begin(epoch, line.into_iter(), now);
        }
        self.review_decoders(now);
        self.bind_all_anew(now);
    }

    /// Takes a request in.
    ///
    /// # Errors
    /// When it would have to wait and as many wait as may.
    pub fn arrive(&mut self, order: Order, now: Duration) -> Result<Arrival, Full> {
        let chosen = self.choose(&order, now);
        let (wait, is_free) = chosen.map_or((0.0, false), |view| {
            let member = &self.members[view.replica];
            let wait = view.backlog + self.decode_wait(view.replica);
            (wait, member.has_free_slot() && member.line.is_empty())
        });
        if !is_free && self.waiting >= self.limit {
            let wait = self.shortest_wait(now);
            return Err(Full { waiting: self.waiting, limit: self.limit, wait });
        }
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        self.entries.insert(ticket, Entry::new(order));
        self.park(ticket);
        if let Some(view) = chosen {
            self.bind(ticket, view.replica, now);
        }
        self.moved.retain(|moved| *moved != ticket);
        Ok(Arrival { ticket, wait, position: self.position(ticket) })
    }

    /// A request whose replica was lost wants another, with what it has now as its prompt. Its age stays.
    pub fn lost(&mut self, ticket: Ticket, order: Order, now: Duration) {
        self.take_off(ticket, now);
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        entry.order = order;
        self.park(ticket);
        self.bind_parked(now);
    }

    /// Its replica's engine began with it: so many of its prompt's tokens were there.
    pub fn started(&mut self, ticket: Ticket, cached: u32) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        if let (Some(prompt), Some(member)) = (&mut entry.prefill, seat_of(&mut self.members, entry.spot)) {
            let cached = u64::from(cached).min(*prompt);
            *prompt -= cached;
            member.cached(cached);
        }
    }

    /// A token came.
    pub fn token(&mut self, ticket: Ticket, now: Duration) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        entry.generated += 1;
        let Some(member) = seat_of(&mut self.members, entry.spot) else { return };
        match entry.prefill.take() {
            None => member.token(),
            Some(prompt) => {
                member.first_token(prompt, now);
                // It has shown that it can be computed.
                if std::mem::replace(&mut entry.order.company, Company::Any) == Company::Apart {
                    member.apart -= 1;
                    self.bind_parked(now);
                }
                self.prefilled(ticket, now);
            }
        }
    }

    /// A request leaves, wherever it is.
    pub fn leave(&mut self, ticket: Ticket, leaving: Leaving, now: Duration) {
        self.take_off(ticket, now);
        let Some(entry) = self.entries.remove(&ticket) else { return };
        if leaving == Leaving::Done {
            self.mean_output += (f64::from(entry.generated.max(1)) - self.mean_output) * OUTPUT_WEIGHT;
        }
        self.bind_parked(now);
    }

    /// Whose place changed since the last call, but for who just arrived.
    pub fn take_moved(&mut self) -> Vec<Ticket> {
        std::mem::take(&mut self.moved)
    }

    /// Requests that wait, wherever.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Requests that may wait.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Requests that wait for another replica to decode them.
    pub fn waiting_to_decode(&self) -> usize {
        self.central.len()
    }

    /// What each replica does.
    pub fn loads(&self) -> impl Iterator<Item = Load> {
        self.members.iter().map(Member::load)
    }

    /// Seconds until a slot might be free anywhere.
    fn shortest_wait(&self, now: Duration) -> f64 {
        let serving = self.members.iter().enumerate().filter(|(_, member)| member.serving.is_some());
        let waits = serving
            .map(|(replica, member)| member.backlog(self.mean_output, now) + self.decode_wait(replica));
        waits.fold(f64::INFINITY, f64::min)
    }

    fn serving(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.serving.is_some())
    }

    /// Whom the policy chooses for a request; none if nobody can take it.
    fn choose(&mut self, order: &Order, now: Duration) -> Option<ReplicaView> {
        self.views.clear();
        let any_prefills = self.serving().any(|member| member.role != Role::Decode);
        for (replica, member) in self.members.iter().enumerate() {
            let is_apart = order.company == Company::Apart && member.apart > 0;
            let prefills = member.role != Role::Decode || !any_prefills;
            if member.serving.is_some() && prefills && !is_apart {
                self.views.push(member.view(replica, order, self.mean_output, now));
            }
        }
        let last = self.views.len().checked_sub(1)?;
        let chosen = self.policy.place(&self.views).min(last);
        self.views.get(chosen).copied()
    }

    /// Puts a request where no replica is.
    fn park(&mut self, ticket: Ticket) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.spot = Spot::Parked;
            entry.prefill = None;
            self.parked.insert(ticket);
            self.waiting += 1;
            self.moved.push(ticket);
        }
    }

    /// Moves a parked request to a replica's line, and on to a slot if there is one.
    fn bind(&mut self, ticket: Ticket, replica: usize, now: Duration) {
        let mean_output = self.mean_output;
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        if !self.parked.remove(&ticket) {
            return;
        }
        entry.spot = Spot::Line(replica);
        entry.tokens =
            u64::from(entry.order.prompt) + mean_output.min(f64::from(entry.order.most_output)) as u64;
        self.members[replica].enter_line(ticket, entry.share());
        self.moved.push(ticket);
        self.settle(now);
    }

    /// Binds those who are parked, oldest first, as far as they can be.
    fn bind_parked(&mut self, now: Duration) {
        if self.parked.is_empty() || self.serving().next().is_none() {
            return;
        }
        for ticket in self.parked.clone() {
            let Some(order) = self.entries.get(&ticket).map(|entry| entry.order.clone()) else { continue };
            if let Some(view) = self.choose(&order, now) {
                self.bind(ticket, view.replica, now);
            }
        }
    }

    /// Binds all who wait as if they came now, oldest first: who serves has changed.
    fn bind_all_anew(&mut self, now: Duration) {
        for replica in 0..self.members.len() {
            for ticket in self.members[replica].line.clone() {
                self.take_off(ticket, now);
                self.park(ticket);
            }
        }
        self.bind_parked(now);
    }

    /// Gives a replica's free slots to the oldest in its line, unless the head of the central line is older.
    fn fill(&mut self, replica: usize, head: Option<Ticket>, now: Duration) {
        loop {
            let member = &mut self.members[replica];
            let Some(&ticket) = member.line.first().filter(|_| member.has_free_slot()) else { return };
            if member.role != Role::Prefill && head.is_some_and(|head| head < ticket) {
                return;
            }
            let Some(entry) = self.entries.get_mut(&ticket) else { return };
            let share = entry.share();
            member.leave_line(ticket, share);
            member.seat(share, &entry.order.prefix, now);
            entry.spot = Spot::Slot(replica, member.epoch);
            entry.prefill = Some(share.prompt);
            entry.errand = if member.generates { Errand::Whole } else { Errand::Prompt };
            self.waiting -= 1;
            self.moved.push(ticket);
        }
    }

    /// Takes a request from where it is, and gives its slot to the next.
    fn take_off(&mut self, ticket: Ticket, now: Duration) {
        self.end_handover(ticket, now);
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        let share = entry.share();
        match entry.spot {
            Spot::Parked => {
                self.waiting -= usize::from(self.parked.remove(&ticket));
            }
            Spot::Line(replica) => {
                self.members[replica].leave_line(ticket, share);
                self.waiting -= 1;
            }
            spot @ Spot::Slot(..) => {
                if let Some(member) = seat_of(&mut self.members, spot) {
                    match entry.prefill.take() {
                        Some(prompt) => member.unseat_early(Share { prompt, ..share }, now),
                        None => member.unseat(share, now),
                    }
                }
                // So that it is in no slot of anyone's.
                entry.spot = Spot::Parked;
                self.settle(now);
            }
        }
    }
}

impl Entry {
    fn new(order: Order) -> Self {
        let (errand, decode) = (Errand::Whole, Decode::Here);
        Self { order, spot: Spot::Parked, prefill: None, errand, decode, tokens: 0, generated: 0 }
    }

    fn share(&self) -> Share {
        Share {
            prompt: u64::from(self.order.prompt),
            tokens: self.tokens,
            is_apart: self.order.company == Company::Apart,
        }
    }
}

/// The replica in whose slot a request is, unless that incarnation of it is gone.
fn seat_of(members: &mut [Member], spot: Spot) -> Option<&mut Member> {
    let Spot::Slot(replica, epoch) = spot else { return None };
    members.get_mut(replica).filter(|member| member.epoch == epoch)
}
