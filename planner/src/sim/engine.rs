//! The event loop.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::decode::{Decoder, Done};
use super::report::{ReplicaUse, Report, Served, thinned};
use super::{Bounds, DecodeView, Policy, PrefillView, Request, SimCluster};
use crate::chain::Pass;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// A replica's slowest stage can begin the next prompt.
    PrefillFree(u32),
    /// A prompt's first token is out.
    FirstToken(u32),
    /// A cache has arrived.
    CacheArrived(u32),
    /// All stages on either side have seen that.
    TakenOver(u32),
}

/// A time, as bits, and a number in the order of scheduling.
type Due = (u64, u64);

/// Nothing is due.
const NEVER: Due = (u64::MAX, u64::MAX);

/// What happens next.
#[derive(Debug, Clone, Copy)]
enum Next {
    Event,
    /// Something at a decoding replica.
    Decoder(usize),
}

/// A replica that only prefills: a pipeline that takes one prompt after the other.
#[derive(Debug, Default)]
pub(super) struct Prefiller {
    /// Requests and what their prompts take.
    line: VecDeque<(usize, Pass)>,
    /// Requests that it computes, or holds until they are taken over.
    pub taken: usize,
    pub free_at: f64,
    /// Seconds of a chunk of the prompt at hand.
    pub chunk: f64,
    busy: f64,
    /// Seconds of the slowest stage that wait in line.
    backlog: f64,
}

pub(super) struct Engine<'a> {
    pub cluster: &'a SimCluster,
    pub requests: &'a [Request],
    policy: &'a mut dyn Policy,
    bounds: Bounds,
    pub now: f64,
    /// By time, then by order of scheduling.
    events: BinaryHeap<Reverse<(u64, u64, Kind)>>,
    scheduled: u64,
    /// The same of what is due at each decoding replica, which changes with everything that happens there.
    due: Vec<Due>,
    handled: u64,
    pub served: Vec<Served>,
    pub prefillers: Vec<Prefiller>,
    pub decoders: Vec<Decoder>,
    /// When each replica's sending card is free, and how long it was not.
    pub sender_free: Vec<f64>,
    pub sending: Vec<f64>,
    /// Requests with a first token and no slot.
    line: VecDeque<usize>,
    mean_output: f64,
    in_system: usize,
    pub in_replica: Vec<usize>,
    request_seconds: f64,
    replica_seconds: Vec<f64>,
    queues: Vec<(f64, u32, u32)>,
    /// The longest wait, and the share of its means in [`Bounds::most`], as far as they are known.
    longest_wait: f64,
    means: f64,
    /// Something takes for ever.
    endless: bool,
    prefill_views: Vec<PrefillView>,
    /// What the prompt of a request that is looked at takes, for each view.
    passes: Vec<Pass>,
    decode_views: Vec<DecodeView>,
}

/// Runs requests, in the order of their arrival, through a cluster. None if no replica can serve them in finite time, or if
/// the bounds were broken.
pub fn simulate(
    cluster: &SimCluster,
    requests: &[Request],
    policy: &mut dyn Policy,
    bounds: Bounds,
) -> Option<Report> {
    if !cluster.can_serve() {
        return None;
    }
    let mut engine = Engine::new(cluster, requests, policy, bounds);
    engine.run();
    (!engine.endless && !engine.too_much()).then(|| engine.report())
}

impl<'a> Engine<'a> {
    fn new(
        cluster: &'a SimCluster,
        requests: &'a [Request],
        policy: &'a mut dyn Policy,
        bounds: Bounds,
    ) -> Self {
        let n = cluster.replicas().len();
        Self {
            cluster,
            requests,
            policy,
            bounds,
            now: 0.0,
            events: BinaryHeap::new(),
            scheduled: 0,
            due: vec![NEVER; n],
            handled: 0,
            served: requests.iter().map(|r| Served::pending(r.at, r.output)).collect(),
            prefillers: (0..n).map(|_| Prefiller::default()).collect(),
            decoders: cluster.replicas().iter().map(Decoder::new).collect(),
            sender_free: vec![0.0; n],
            sending: vec![0.0; n],
            line: VecDeque::new(),
            mean_output: requests.iter().map(|r| r.output).sum::<f64>() / requests.len().max(1) as f64,
            in_system: 0,
            in_replica: vec![0; n],
            request_seconds: 0.0,
            replica_seconds: vec![0.0; n],
            queues: Vec::new(),
            longest_wait: 0.0,
            means: bounds.ttft_weight * bounds.least_ttft + bounds.tpot_weight * bounds.least_tpot,
            endless: false,
            prefill_views: Vec::new(),
            passes: Vec::new(),
            decode_views: Vec::new(),
        }
    }

    fn run(&mut self) {
        let mut arrived = 0;
        loop {
            let ((at, _), next) = self.next();
            let arrival = self.requests.get(arrived).map(|r| r.at);
            match arrival {
                // Times are never negative, so their bits are in order.
                Some(arrival) if arrival.to_bits() <= at => {
                    self.move_clock(arrival);
                    self.arrive(arrived);
                    arrived += 1;
                }
                _ if at == NEVER.0 => return,
                _ if f64::from_bits(at).is_infinite() => {
                    self.endless = true;
                    return;
                }
                _ => self.handle(next, f64::from_bits(at)),
            }
            if self.too_much() {
                return;
            }
        }
    }

    /// What happens next but for arrivals.
    fn next(&self) -> (Due, Next) {
        let event = self.events.peek().map_or(NEVER, |Reverse((at, order, _))| (*at, *order));
        let mut first = (event, Next::Event);
        for (index, &due) in self.due.iter().enumerate() {
            if due < first.0 {
                first = (due, Next::Decoder(index));
            }
        }
        first
    }

    /// Time only moves on, and is counted for everyone who is in the system meanwhile.
    fn move_clock(&mut self, to: f64) {
        let passed = (to - self.now).max(0.0);
        self.handled += 1;
        if passed > 0.0 {
            self.request_seconds += passed * self.in_system as f64;
            for (seconds, &inside) in self.replica_seconds.iter_mut().zip(&self.in_replica) {
                *seconds += passed * inside as f64;
            }
        }
        self.now += passed;
        if self.bounds.samples > 0 {
            let waiting = self.prefillers.iter().map(|p| p.line.len()).sum::<usize>()
                + self.decoders.iter().map(|d| d.line.len()).sum::<usize>();
            self.queues.push((self.now, waiting as u32, self.line.len() as u32));
        }
    }

    pub(super) fn schedule(&mut self, at: f64, kind: Kind) {
        self.scheduled += 1;
        self.events.push(Reverse((at.max(self.now).to_bits(), self.scheduled, kind)));
    }

    fn handle(&mut self, next: Next, at: f64) {
        self.move_clock(at);
        match next {
            Next::Decoder(replica) => self.decoder_due(replica),
            Next::Event => match self.events.pop() {
                Some(Reverse((_, _, Kind::PrefillFree(replica)))) => self.begin_prefill(replica as usize),
                Some(Reverse((_, _, Kind::FirstToken(request)))) => self.first_token(request as usize),
                Some(Reverse((_, _, Kind::CacheArrived(request)))) => self.cache_arrived(request as usize),
                Some(Reverse((_, _, Kind::TakenOver(request)))) => self.taken_over(request as usize),
                None => {}
            },
        }
    }

    fn arrive(&mut self, request: usize) {
        self.in_system += 1;
        self.look_at_prefill(request);
        let views = std::mem::take(&mut self.prefill_views);
        let chosen = self.policy.prefill(&views).min(views.len() - 1);
        let (replica, pass) = (views[chosen].replica, self.passes[chosen]);
        self.prefill_views = views;
        self.served[request].prefilled_by = replica;
        self.in_replica[replica] += 1;
        if self.cluster.replicas()[replica].decodes() {
            self.decoders[replica].line_work += pass.slowest;
            self.decoders[replica].line.push_back(request);
            self.give_slots();
        } else {
            let prefiller = &mut self.prefillers[replica];
            let wait = (prefiller.free_at - self.now).max(0.0) + prefiller.backlog;
            prefiller.backlog += pass.slowest;
            prefiller.line.push_back((request, pass));
            // Nobody overtakes here, so the wait is known.
            self.note_wait(wait);
            self.begin_prefill(replica);
        }
    }

    fn look_at_prefill(&mut self, request: usize) {
        self.prefill_views.clear();
        self.passes.clear();
        for (index, replica) in self.cluster.replicas().iter().enumerate() {
            if !replica.prefills() || (replica.decodes() && replica.slots == 0) {
                continue;
            }
            let pass = replica.prefill.of(self.requests[request].prompt);
            let (waiting, backlog) = if replica.decodes() {
                self.mixed_backlog(index)
            } else {
                let prefiller = &self.prefillers[index];
                (prefiller.line.len(), (prefiller.free_at - self.now).max(0.0) + prefiller.backlog)
            };
            self.passes.push(pass);
            let (decode, taken) = if replica.decodes() {
                let held = self.decoders[index].taken;
                let beside = (held + self.decoders[index].line.len() + 1).min(replica.slots);
                (self.mean_output * replica.tpot(beside), held as f64 / replica.slots as f64)
            } else {
                (0.0, self.prefillers[index].taken as f64 / replica.slots.max(1) as f64)
            };
            self.prefill_views.push(PrefillView {
                replica: index,
                role: replica.role,
                waiting,
                backlog,
                service: pass.sum,
                decode,
                taken,
            });
        }
    }

    /// Requests before a new one on a mixed replica, and the seconds until it would start: prefills before it, slowed
    /// down by decoding, and a slot's worth of generation for every full set of slots before it.
    fn mixed_backlog(&self, index: usize) -> (usize, f64) {
        let (replica, decoder) = (&self.cluster.replicas()[index], &self.decoders[index]);
        let waiting = decoder.line.len();
        let work = decoder.prefill_left() + decoder.line_work;
        let free = replica.slots.saturating_sub(decoder.taken);
        let generation = match (waiting + 1).saturating_sub(free) {
            0 => 0.0,
            ahead => ahead as f64 / replica.slots as f64 * self.mean_output * replica.tpot(replica.slots),
        };
        (waiting + decoder.n_prefilling(), work + generation)
    }

    /// Begins with the next prompt, if there is one, and a place for it, and the slowest stage is done with the one before.
    pub(super) fn begin_prefill(&mut self, index: usize) {
        let replica = &self.cluster.replicas()[index];
        let prefiller = &mut self.prefillers[index];
        let is_full = replica.slots > 0 && prefiller.taken >= replica.slots;
        if is_full || prefiller.free_at > self.now {
            return;
        }
        let Some((request, pass)) = prefiller.line.pop_front() else { return };
        prefiller.taken += 1;
        prefiller.chunk = pass.slowest / replica.prefill.n_chunks(self.requests[request].prompt);
        prefiller.backlog = if prefiller.line.is_empty() { 0.0 } else { prefiller.backlog - pass.slowest };
        prefiller.free_at = self.now + pass.slowest;
        prefiller.busy += pass.slowest;
        self.served[request].prefill_start = self.now;
        self.note_wait(self.now - self.served[request].arrival);
        self.schedule(self.now + pass.slowest, Kind::PrefillFree(index as u32));
        self.schedule(self.now + pass.sum, Kind::FirstToken(request as u32));
    }

    fn first_token(&mut self, request: usize) {
        let served = &mut self.served[request];
        served.first_token = self.now;
        let (by, ttft) = (served.prefilled_by, served.ttft());
        self.note_mean(self.bounds.ttft_weight * (ttft - self.bounds.least_ttft));
        let served = &mut self.served[request];
        if self.requests[request].output <= 1.0 {
            let mixed = self.cluster.replicas()[by].decodes();
            (served.slot, served.decode_start, served.decoded_by) = (self.now, self.now, by);
            self.finish(request);
            if mixed {
                self.advance(by);
                self.decoders[by].taken -= 1;
                self.reschedule(by);
                self.give_slots();
            } else {
                self.let_go(by);
            }
            return;
        }
        if self.cluster.replicas()[by].decodes() {
            // A mixed replica gave the slot before it prefilled.
            served.slot = self.now;
            served.decoded_by = by;
            self.begin_decode(request);
        } else {
            self.in_replica[by] -= 1;
            self.line.push_back(request);
            self.give_slots();
        }
    }

    /// Gives free slots to whoever has waited longest: to the central line's head, and on mixed replicas to the head
    /// of their own line if it came earlier.
    fn give_slots(&mut self) {
        for index in 0..self.decoders.len() {
            self.start_mixed(index, self.line.front().copied());
        }
        let mut place = 0;
        while let Some(&request) = self.line.get(place) {
            if !self.look_at_decode(request) {
                break;
            }
            if self.decode_views.is_empty() {
                // No slot is free where its cache could be sent: whoever can use one goes first.
                place += 1;
                continue;
            }
            let views = std::mem::take(&mut self.decode_views);
            let chosen = self.policy.decode(&views).min(views.len() - 1);
            let to = views[chosen].replica;
            self.decode_views = views;
            self.line.remove(place);
            self.reserve(request, to);
        }
        for index in 0..self.decoders.len() {
            self.start_mixed(index, None);
        }
    }

    /// Looks for free slots for a request; false if there is none for anybody.
    fn look_at_decode(&mut self, request: usize) -> bool {
        self.decode_views.clear();
        let from = self.served[request].prefilled_by;
        let mut any = false;
        for (index, replica) in self.cluster.replicas().iter().enumerate() {
            let taken = self.decoders[index].taken;
            if !replica.decodes() || taken >= replica.slots {
                continue;
            }
            any = true;
            if self.cluster.connects(from, index) {
                let speed = 1.0 / replica.tpot(taken + 1);
                let free = replica.slots - taken;
                self.decode_views.push(DecodeView { replica: index, free, running: taken, speed });
            }
        }
        any
    }

    /// Gives a mixed replica's free slots to those at the head of its line, unless the request `before` came earlier.
    fn start_mixed(&mut self, index: usize, before: Option<usize>) {
        while let Some(&request) = self.decoders[index].line.front()
            && self.decoders[index].taken < self.cluster.replicas()[index].slots
            && before.is_none_or(|before| before > request)
        {
            self.start_mixed_prefill(index, request);
        }
    }

    fn start_mixed_prefill(&mut self, index: usize, request: usize) {
        let replica = &self.cluster.replicas()[index];
        self.advance(index);
        let decoder = &mut self.decoders[index];
        decoder.line.pop_front();
        decoder.taken += 1;
        let work = decoder.start_prefill(replica, request, self.requests[request].prompt);
        decoder.line_work = if decoder.line.is_empty() { 0.0 } else { decoder.line_work - work };
        self.served[request].prefill_start = self.now;
        self.note_wait(self.now - self.served[request].arrival);
        self.reschedule(index);
    }

    pub(super) fn begin_decode(&mut self, request: usize) {
        let served = &mut self.served[request];
        served.decode_start = self.now;
        let (wait, index) = (served.wait(), served.decoded_by);
        self.note_wait(wait);
        self.advance(index);
        self.decoders[index].start(request, self.requests[request].output - 1.0);
        self.reschedule(index);
    }

    fn decoder_due(&mut self, index: usize) {
        self.advance(index);
        let replica = &self.cluster.replicas()[index];
        while let Some(done) = self.decoders[index].take_due(replica) {
            match done {
                Done::Decoded(request) => {
                    self.decoders[index].taken -= 1;
                    self.finish(request);
                }
                Done::Prefilled(request, tail) => {
                    self.schedule(self.now + tail, Kind::FirstToken(request as u32));
                }
            }
        }
        self.reschedule(index);
        self.give_slots();
    }

    fn finish(&mut self, request: usize) {
        let served = &mut self.served[request];
        served.finish = self.now;
        self.in_system -= 1;
        self.in_replica[served.decoded_by] -= 1;
        let tpot = served.tpot();
        self.note_mean(self.bounds.tpot_weight * (tpot - self.bounds.least_tpot));
    }

    fn advance(&mut self, index: usize) {
        self.decoders[index].advance(&self.cluster.replicas()[index], self.now);
    }

    fn reschedule(&mut self, index: usize) {
        let at = self.decoders[index].next(&self.cluster.replicas()[index]);
        self.scheduled += 1;
        self.due[index] = at.map_or(NEVER, |at| (at.max(self.now).to_bits(), self.scheduled));
    }

    /// Some request waits so long, or longer.
    fn note_wait(&mut self, wait: f64) {
        self.longest_wait = self.longest_wait.max(wait);
    }

    /// A request's share of a weighted mean is known, less what was known before.
    fn note_mean(&mut self, weighted: f64) {
        self.means += weighted / self.requests.len() as f64;
    }

    /// Whether the bounds are broken. Sums are in another order than a report's, so equal is not above.
    fn too_much(&self) -> bool {
        self.longest_wait + self.means > self.bounds.most * (1.0 + 1e-9)
    }

    fn report(mut self) -> Report {
        for index in 0..self.decoders.len() {
            self.advance(index);
        }
        let replicas = (0..self.decoders.len()).map(|i| ReplicaUse {
            decoding: std::mem::take(&mut self.decoders[i].busy),
            prefilling: self.prefillers[i].busy + self.decoders[i].prefilling,
            sending: self.sending[i],
            request_seconds: self.replica_seconds[i],
        });
        Report {
            replicas: replicas.collect(),
            served: self.served,
            end: self.now,
            request_seconds: self.request_seconds,
            queues: thinned(&self.queues, self.now, self.bounds.samples),
            events: self.handled,
        }
    }
}
