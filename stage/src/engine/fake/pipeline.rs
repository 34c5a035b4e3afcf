//! Stages, links and time around an engine. A stage keeps the three rules that `engine`'s documentation states; all
//! else (durations, latencies, how many waiting decode frames make a batch, whether the master looks for new frames
//! before or after it takes its next batch) is drawn at random. Every frame is checked against the limits.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use cluster::{RequestId, StepId};
use protocol::frame::{KvOp, RowRun};
use protocol::hand_off::HandOff;

use super::super::{
    Admission, AdmitError, EngineLimits, FailureKind, FrameKind, Logits, Request, RequestKey, StepFrame,
    Token,
};
use super::client::{Client, Log, Sink};
use super::model::{FakeModel, StageCache};
use super::random::Random;
use super::sampling::{Draw, FakeSampling, logits_of};
use super::{FakeEngine, roomy};

/// What things cost, in ticks.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Costs {
    /// A batch, however small.
    pub(in super::super) batch: u64,
    /// A prefill row on top.
    pub(in super::super) prefill_row: u64,
    /// A link's latency, at most.
    pub(in super::super) link: u64,
    /// Added to a batch at random, at most.
    pub(in super::super) jitter: u64,
}

/// A request as a test words it.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Ask {
    pub(in super::super) prompt: Vec<Token>,
    pub(in super::super) replayed: u32,
    pub(in super::super) max_tokens: u32,
    pub(in super::super) ignore_eos: bool,
    pub(in super::super) draw: Draw,
    pub(in super::super) leaves_after: Option<usize>,
}

/// An engine in its replica.
#[derive(Debug)]
pub(in super::super) struct Pipeline {
    pub(in super::super) engine: FakeEngine,
    pub(in super::super) model: FakeModel,
    pub(in super::super) log: Log,
    /// Every frame made, for tests to look at.
    pub(in super::super) frames: Vec<StepFrame>,
    costs: Costs,
    random: Random,
    stages: Vec<Stage>,
    agenda: BTreeMap<(u64, u64), Move>,
    moves: u64,
    in_flight: BTreeMap<StepId, FrameKind>,
}

#[derive(Debug)]
struct Stage {
    cache: StageCache,
    decode: VecDeque<Moving>,
    prefill: VecDeque<Moving>,
    /// The batch that is being run, with its results.
    running: Vec<Moving>,
    /// When the link to this stage has delivered all it was given.
    link_clear: u64,
}

/// A frame on its way.
#[derive(Debug, Clone)]
struct Moving {
    step: StepId,
    kind: FrameKind,
    ops: Vec<KvOp>,
    runs: Vec<RowRun>,
    rows: Vec<u64>,
    /// Rows whose logits the last stage computes.
    outputs: Vec<usize>,
}

#[derive(Debug)]
enum Move {
    Arrives(usize, Moving),
    Wakes(usize),
    Done(usize),
}

impl Pipeline {
    pub(in super::super) fn new(limits: EngineLimits, stages: usize, costs: Costs, seed: u64) -> Self {
        let EngineLimits { n_ctx, n_vocab, rollback, slots, .. } = limits;
        let mut engine = FakeEngine::new(limits, FakeSampling { n_vocab }).unwrap();
        engine.reset();
        Self {
            engine,
            model: FakeModel { stages, n_ctx, n_vocab, rollback },
            log: Log::default(),
            frames: Vec::new(),
            costs,
            random: Random(seed),
            stages: (0..stages).map(|stage| Stage::new(StageCache::new(stage, slots, rollback))).collect(),
            agenda: BTreeMap::new(),
            moves: 0,
            in_flight: BTreeMap::new(),
        }
    }

    /// One stage, no latency, nothing random.
    pub(in super::super) fn single(change: impl FnOnce(&mut EngineLimits)) -> Self {
        let mut limits = roomy();
        change(&mut limits);
        Self::new(limits, 1, Costs { batch: 10, prefill_row: 1, link: 0, jitter: 0 }, 0)
    }

    pub(in super::super) fn now(&self) -> u64 {
        self.log.now.get()
    }

    /// When the next thing happens, if any does.
    pub(in super::super) fn next_at(&self) -> Option<u64> {
        self.agenda.keys().next().map(|(at, _)| *at)
    }

    pub(in super::super) fn admit(&mut self, key: u64, ask: &Ask) -> Result<Rc<RefCell<Client>>, AdmitError> {
        let client = Rc::new(RefCell::new(Client { leaves_after: ask.leaves_after, ..Client::default() }));
        let request = Request {
            id: RequestId(format!("request {key}")),
            prompt: ask.prompt.clone(),
            replayed: ask.replayed,
            max_tokens: ask.max_tokens,
            ignore_eos: ask.ignore_eos,
            hand_off: HandOff::None,
            sampling: ask.draw.clone(),
        };
        let events = Sink { key, log: self.log.clone(), client: Rc::clone(&client) };
        self.engine.admit(Admission { key: RequestKey(key), request, events }, self.clock())?;
        self.pump();
        Ok(client)
    }

    pub(in super::super) fn cancel(&mut self, key: u64) {
        self.engine.cancel(RequestKey(key), self.clock());
        self.pump();
    }

    /// A stage is lost: every request fails, and results of steps that were in flight mean nothing any more.
    pub(in super::super) fn lose(&mut self, message: &str) {
        self.engine.fail_all(FailureKind::ReplicaLost, message);
        self.agenda.clear();
        for step in std::mem::take(&mut self.in_flight).into_keys() {
            let late = self.engine.complete(step, &Computed(BTreeMap::new()), self.clock());
            assert_eq!(late.unwrap_err().step, step);
        }
        assert_eq!(self.engine.next_frame(), None, "nothing is sent to lost stages");
    }

    /// The stages are there again, and empty.
    pub(in super::super) fn relink(&mut self) {
        let EngineLimits { slots, rollback, .. } = *self.engine.limits();
        for (index, stage) in self.stages.iter_mut().enumerate() {
            *stage = Stage::new(StageCache::new(index, slots, rollback));
        }
        self.engine.reset();
    }

    /// Lets one thing happen; false if nothing is left to happen.
    pub(in super::super) fn step(&mut self) -> bool {
        let Some(((at, _), happens)) = self.agenda.pop_first() else { return false };
        self.log.now.set(at);
        match happens {
            Move::Arrives(stage, frame) => self.arrive(stage, frame),
            Move::Wakes(stage) => self.begin(stage),
            Move::Done(stage) => self.done(stage),
        }
        true
    }

    /// Lets everything happen.
    pub(in super::super) fn run(&mut self) {
        while self.step() {}
    }

    /// Lets things happen until something is so.
    pub(in super::super) fn run_until(&mut self, mut is_so: impl FnMut(&Self) -> bool) {
        while !is_so(self) {
            assert!(self.step(), "all has happened, and it is not so");
        }
    }

    /// Checks that nothing runs or waits, and that every stage holds what the engine believes.
    pub(in super::super) fn check_idle(&self) {
        let status = self.engine.status();
        assert_eq!((status.active, status.queued, status.in_flight), (0, 0, 0), "the engine is idle");
        for (index, slot) in self.engine.slots.iter().enumerate() {
            let believed: Vec<_> = slot.cache.tokens().iter().map(|t| StageCache::embed(*t)).collect();
            if let Some(held) = self.stages[0].cache.held(index) {
                assert_eq!(held, believed, "stage 0 holds what the engine recorded for slot {index}");
            }
            for stage in &self.stages {
                let held = stage.cache.held(index).map(|rows| rows.len());
                assert!(held.is_none_or(|held| held == believed.len()), "so does every stage");
            }
        }
    }

    /// Sends what the engine has to send.
    fn pump(&mut self) {
        while let Some(frame) = self.engine.next_frame() {
            self.check(&frame);
            self.in_flight.insert(frame.step, frame.kind);
            self.frames.push(frame.clone());
            let rows = frame.tokens.iter().map(|token| StageCache::embed(*token)).collect();
            let StepFrame { step, kind, ops, runs, .. } = frame;
            self.send(0, Moving { step, kind, ops, runs, rows, outputs: Vec::new() });
        }
    }

    fn check(&self, frame: &StepFrame) {
        let limits = self.engine.limits();
        let status = self.engine.status();
        let rows = frame.tokens.len() as u32;
        let (in_flight_limit, row_limit) = match frame.kind {
            FrameKind::Decode => (limits.micro_batches, status.active.div_ceil(limits.micro_batches)),
            FrameKind::Prefill => (limits.prefill_frames, limits.prefill_chunk),
        };
        assert!((1..=row_limit).contains(&rows), "{rows} rows in a {:?} frame", frame.kind);
        let in_flight = self.in_flight.values().filter(|kind| **kind == frame.kind).count() as u32;
        assert!(in_flight < in_flight_limit, "{in_flight} {:?} frames in flight", frame.kind);
        let mut slots: Vec<_> = frame.runs.iter().map(|run| run.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), frame.runs.len(), "a slot appears once in a frame");
        assert!(frame.runs.iter().all(|run| run.position + run.n <= limits.n_ctx), "case 24");
        assert_eq!(frame.runs.iter().map(|run| run.n).sum::<u32>(), rows);
        assert!(frame.kind == FrameKind::Prefill || frame.ops.is_empty());
        for op in &frame.ops {
            let KvOp::RemoveFrom { slot, .. } = op else { panic!("the engine sends no {op:?}") };
            assert!(slots.contains(slot), "a frame touches only its own slots");
        }
    }

    fn send(&mut self, stage: usize, frame: Moving) {
        if self.costs.link == 0 {
            return self.arrive(stage, frame);
        }
        let arrives = self.now() + self.random.below(self.costs.link + 1);
        let at = arrives.max(self.stages[stage].link_clear);
        self.stages[stage].link_clear = at;
        self.schedule(at, Move::Arrives(stage, frame));
    }

    fn arrive(&mut self, stage: usize, frame: Moving) {
        match frame.kind {
            FrameKind::Decode => self.stages[stage].decode.push_back(frame),
            FrameKind::Prefill => self.stages[stage].prefill.push_back(frame),
        }
        // The stage may see what else comes at this moment before it begins, or not.
        if self.random.below(2) == 0 {
            self.begin(stage);
        } else {
            self.schedule(self.now(), Move::Wakes(stage));
        }
    }

    /// Takes the next batch, if one waits and none runs.
    fn begin(&mut self, index: usize) {
        let is_last = index + 1 == self.stages.len();
        let stage = &mut self.stages[index];
        if !stage.running.is_empty() {
            return;
        }
        let mut batch: Vec<Moving> = if stage.decode.is_empty() {
            stage.prefill.pop_front().into_iter().collect()
        } else {
            let frames = 1 + self.random.below(stage.decode.len() as u64) as usize;
            stage.decode.drain(..frames).collect()
        };
        let mut cost = self.costs.batch + self.random.below(self.costs.jitter + 1);
        for frame in &mut batch {
            frame.ops.iter().for_each(|op| stage.cache.apply(*op));
            frame.rows = stage.cache.run(&frame.runs, &frame.rows);
            if frame.kind == FrameKind::Prefill {
                cost += self.costs.prefill_row * frame.rows.len() as u64;
            }
            if is_last {
                frame.outputs = self.engine.outputs_of(frame.step).collect();
            }
        }
        if !batch.is_empty() {
            stage.running = batch;
            self.schedule(self.now() + cost, Move::Done(index));
        }
    }

    fn done(&mut self, index: usize) {
        let batch = std::mem::take(&mut self.stages[index].running);
        if index + 1 < self.stages.len() {
            batch.into_iter().for_each(|frame| self.send(index + 1, frame));
            self.begin(index);
            return;
        }
        let pumps_at_once = self.random.below(2) == 0;
        for frame in batch {
            self.complete(frame);
            if pumps_at_once {
                self.pump();
            }
        }
        // The master sends what is ready before it takes its next batch; a stage of its own has it at once.
        self.pump();
        self.begin(index);
    }

    fn complete(&mut self, frame: Moving) {
        assert!(self.in_flight.remove(&frame.step).is_some());
        let computed = frame.outputs.iter().map(|row| (*row, logits_of(frame.rows[*row]))).collect();
        self.engine.complete(frame.step, &Computed(computed), self.clock()).unwrap();
    }

    fn schedule(&mut self, at: u64, happens: Move) {
        self.moves += 1;
        self.agenda.insert((at, self.moves), happens);
    }

    fn clock(&self) -> Duration {
        Duration::from_millis(self.now())
    }
}

impl Stage {
    fn new(cache: StageCache) -> Self {
        Self { cache, decode: VecDeque::new(), prefill: VecDeque::new(), running: Vec::new(), link_clear: 0 }
    }
}

/// The logits of the rows that were asked for.
struct Computed(BTreeMap<usize, [f32; 4]>);

impl Logits for Computed {
    fn row(&self, row: usize) -> Option<&[f32]> {
        self.0.get(&row).map(|logits| logits.as_slice())
    }
}
