//! The inference thread: takes frames from the stage before, runs them, and passes each on to the next stage; on the
//! master, hands them to the engine instead. It owns everything that computes, and is the only one to touch it.
//!
//! One turn of its loop looks at orders and latches, takes in what has arrived, and runs one batch; it sleeps only when
//! there is nothing to run.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use cluster::{Epoch, SlotId};
use protocol::certify::LiveIdentity;
use protocol::frame::{Frame, Rows};
use protocol::slots::SlotSet;
use protocol::v1;
use protocol::worker::WorkerConfig;
use tokio::runtime::Handle;

use crate::chain::{Call, Chain, ChainError};
use crate::emulated::due_ns;
use crate::engine::LimitsError;
use crate::events::{Arrived, Control, Inlet, Outlet, frames_in_flight};
use crate::hand_off::{Parties, TakeOvers};
use crate::inbox::Inbox;
use crate::load::{self, Stage};
use crate::master::Master;
use crate::shared::Shared;

/// What the thread works with.
pub(crate) struct Inference {
    config: Arc<WorkerConfig>,
    shared: Arc<Shared>,
    chain: Box<dyn Chain>,
    /// The engine's side, on the master.
    master: Option<Master>,
    inbox: Inbox,
    epoch: Epoch,
    outlet: Option<Outlet>,
    /// The epoch's chain is broken: frames are dropped until the next epoch.
    is_broken: bool,
    /// When the last batch was done.
    ended: Option<Instant>,
    /// The same while its results are handed on, of an emulated device: they leave then, by its time.
    leaving: Option<Instant>,
    /// Kept for its memory.
    batch: Vec<Arrived>,
    ranges: Vec<Range<usize>>,
}

/// What the thread woke up for.
enum Wake {
    Control(Control),
    Frame(Arrived),
    /// A latch was set, or a deadline has come.
    Look,
    /// Nobody is left who could wake it.
    Gone,
}

/// Whether the thread goes on.
#[derive(PartialEq, Eq)]
enum Turn {
    On,
    Stop,
}

/// Loads the stage and runs it until it is told to stop. A stage that cannot load stays and says why.
pub(crate) fn run(
    config: Arc<WorkerConfig>,
    identity: LiveIdentity,
    shared: Arc<Shared>,
    mut inlet: Inlet,
    runtime: &Handle,
) {
    let loaded = load::load(&config, &shared).map_err(|error| error.to_string());
    let inference = loaded.and_then(|stage| {
        let facts = stage.facts;
        shared.set_kv(stage.kv.clone());
        let take_overs = TakeOvers::new(Arc::clone(&shared), identity, inlet.orders.clone(), runtime.clone());
        let inference = Inference::new(config, Arc::clone(&shared), stage, take_overs)
            .map_err(|error| error.to_string())?;
        shared.set_outcome(Ok(facts));
        Ok(inference)
    });
    match inference {
        Ok(mut inference) => inference.work(&mut inlet, runtime),
        Err(reason) => {
            tracing::error!(%reason, "the stage cannot run");
            shared.set_outcome(Err(reason));
            // Orders are dropped, which tells those who wait for an answer.
            while !matches!(runtime.block_on(inlet.control.recv()), Some(Control::Stop) | None) {}
        }
    }
}

impl Inference {
    fn new(
        config: Arc<WorkerConfig>,
        shared: Arc<Shared>,
        stage: Stage,
        take_overs: TakeOvers,
    ) -> Result<Self, LimitsError> {
        let Stage { chain, sampling, .. } = stage;
        let master = sampling.map(|sampling| Master::new(&config, Arc::clone(&shared), sampling, take_overs));
        let master = master.transpose()?;
        Ok(Self {
            inbox: Inbox::new(config.n_batch),
            config,
            shared,
            chain,
            master,
            epoch: Epoch(0),
            outlet: None,
            is_broken: false,
            ended: None,
            leaving: None,
            batch: Vec::new(),
            ranges: Vec::new(),
        })
    }

    fn work(&mut self, inlet: &mut Inlet, runtime: &Handle) {
        while self.turn(inlet, runtime) == Turn::On {}
        if let Some(master) = &mut self.master {
            master.lose(&format!("stage {} was stopped", self.config.stage));
        }
    }

    fn turn(&mut self, inlet: &mut Inlet, runtime: &Handle) -> Turn {
        while let Ok(order) = inlet.control.try_recv() {
            if self.obey(order) == Turn::Stop {
                return Turn::Stop;
            }
        }
        self.look();
        while self.has_room()
            && let Ok(frame) = inlet.frames.try_recv()
        {
            self.take_in(frame);
        }
        if self.inbox.len() > 0 {
            self.run_batch();
            return Turn::On;
        }
        match runtime.block_on(self.wake(inlet)) {
            Wake::Control(order) => self.obey(order),
            Wake::Frame(frame) => {
                self.take_in(frame);
                Turn::On
            }
            Wake::Look => Turn::On,
            Wake::Gone => Turn::Stop,
        }
    }

    async fn wake(&self, inlet: &mut Inlet) -> Wake {
        let deadline = self.master.as_ref().and_then(Master::wakes_at);
        tokio::select! {
            order = inlet.control.recv() => order.map_or(Wake::Gone, Wake::Control),
            frame = inlet.frames.recv() => frame.map_or(Wake::Gone, Wake::Frame),
            () = self.shared.rung() => Wake::Look,
            () = until(deadline) => Wake::Look,
        }
    }

    fn obey(&mut self, order: Control) -> Turn {
        match order {
            Control::Stop => return Turn::Stop,
            Control::Reset { epoch, link, done } => {
                self.inbox.clear();
                self.chain.clear();
                self.shared.copies().clear();
                self.epoch = epoch;
                self.outlet = link;
                self.is_broken = false;
                if let Some(master) = &mut self.master {
                    master.reset();
                }
                tracing::info!(epoch = epoch.0, stage = self.config.stage, "joined the epoch");
                // Whoever asked may have given up; the epoch has begun all the same.
                let _ = done.send(());
            }
            Control::HandOff(order) => {
                let (epoch, is_broken) = (self.epoch, self.is_broken);
                let (chain, master) = (&mut *self.chain, self.master.as_mut());
                Parties { epoch, is_broken, chain, master }.obey(order);
            }
            Control::Admit(admit) => {
                if let Some(master) = &mut self.master {
                    master.admit(*admit);
                }
            }
        }
        Turn::On
    }

    /// Notices breaks, deadlines and clients that have left, and sends what may be sent now.
    fn look(&mut self) {
        if let Some(master) = &mut self.master {
            master.cancel_abandoned();
            if let Some(reason) = master.overdue(tokio::time::Instant::now()) {
                self.shared.report_break(self.epoch, || reason);
            }
        }
        if !self.is_broken
            && let Some(reason) = self.shared.broken_in(self.epoch)
        {
            self.break_off(&reason);
        }
        self.send_steps();
    }

    /// Ends the epoch on this stage. Dropping the outlet tells the stages after it, down to the master.
    fn break_off(&mut self, reason: &str) {
        self.is_broken = true;
        self.outlet = None;
        self.inbox.clear();
        if let Some(master) = &mut self.master {
            master.lose(reason);
        }
    }

    /// The inbox takes what a replica can have in flight; beyond that, frames wait in their channel.
    fn has_room(&self) -> bool {
        self.inbox.len() < frames_in_flight(&self.config)
    }

    fn take_in(&mut self, arrived: Arrived) {
        if arrived.frame.epoch == self.epoch && !self.is_broken {
            self.inbox.push(arrived);
        }
    }

    fn run_batch(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        self.inbox.take(&mut batch);
        let steps = batch.len();
        self.shared.copies().forget(|| {
            batch.iter().fold(SlotSet::EMPTY, |mut all, arrived| {
                all.extend(&arrived.frame.slots());
                all
            })
        });
        let copies: Vec<SlotId> = batch.iter().flat_map(|arrived| &arrived.frame.copies).copied().collect();
        let result = self.compute(&batch);
        match result {
            Ok(()) => {
                self.shared.count_steps(steps);
                self.hand_on(batch.drain(..));
                self.copy_out(&copies);
            }
            Err(error) => {
                let step = batch.first().map_or(0, |arrived| arrived.frame.step.0);
                let stage = self.config.stage;
                self.shared
                    .report_break(self.epoch, || format!("stage {stage} failed at step {step}: {error}"));
            }
        }
        batch.clear();
        self.batch = batch;
    }

    /// Copies sequences that another replica will ask for. If that fails, it fails again when they are asked for, and is told then.
    fn copy_out(&mut self, slots: &[SlotId]) {
        let Some(Ok(facts)) = self.shared.kv() else { return };
        for slot in slots {
            match self.chain.export(*slot) {
                Ok(blob) => {
                    let tokens = blob.tokens();
                    self.shared.copies().keep((self.epoch, *slot), (blob, tokens), facts.n_ctx);
                }
                Err(error) => tracing::debug!(%slot, %error, "a sequence was not copied out"),
            }
        }
    }

    fn compute(&mut self, batch: &[Arrived]) -> Result<(), ChainError> {
        for op in batch.iter().flat_map(|arrived| &arrived.frame.ops) {
            self.chain.apply(*op)?;
        }
        self.chain.begin();
        self.ranges.clear();
        let mut outputs = 0;
        for Arrived { frame, .. } in batch {
            let rows = self.chain.add(frame);
            if let Some(master) = &self.master {
                for row in master.outputs_of(frame.step) {
                    self.chain.want(rows.start + row);
                    outputs += 1;
                }
            }
            self.ranges.push(rows);
        }
        let Some(call) = Call::of(batch, outputs, self.ended) else { return Ok(()) };
        let took = self.chain.run(&call)?;
        self.ended = Some(self.chain.ended());
        self.shared.observed().step(&call, took);
        Ok(())
    }

    /// Passes the results on, one frame for one, in order.
    fn hand_on(&mut self, frames: impl Iterator<Item = Arrived>) {
        self.leaving = self.ended.filter(|_| self.config.emulation.is_some());
        let ranges = std::mem::take(&mut self.ranges);
        for (Arrived { frame, at }, rows) in frames.zip(&ranges) {
            let (is_decode, n_rows) = (!frame.prefill, rows.len() as u64);
            match &mut self.master {
                Some(master) => {
                    master.complete(frame.step, &*self.chain, rows.start);
                    master.recycle(frame);
                    self.send_steps();
                }
                None => self.pass_on(frame, rows.clone()),
            }
            if is_decode {
                self.shared.observed().visits.add(n_rows, at.elapsed());
            }
        }
        self.ranges = ranges;
        self.leaving = None;
    }

    fn pass_on(&mut self, frame: Frame, rows: Range<usize>) {
        let Some(Outlet { frames, encoding }) = &self.outlet else { return };
        let data = encoding.encode(self.chain.hidden(rows));
        let next = Frame { rows: Rows::Hidden { encoding: *encoding, data }, ..frame };
        // Waits while the next stage is behind. When the link ends, so does the wait, and the link says why.
        let next = leaving_at(self.leaving, next.into_wire(self.config.exit_layer()));
        if frames.blocking_send(next).is_err() {
            self.outlet = None;
        }
    }

    /// Sends the steps that the engine has ready: to stage 0, or to this very stage if it is the only one.
    fn send_steps(&mut self) {
        let Some(master) = &mut self.master else { return };
        if !self.is_broken {
            master.hand_off(self.epoch);
        }
        while !self.is_broken
            && let Some(step) = master.next_step(self.epoch)
        {
            let Some(Outlet { frames, .. }) = &self.outlet else {
                self.inbox.push(Arrived { frame: step, at: self.leaving.unwrap_or_else(Instant::now) });
                continue;
            };
            let step = leaving_at(self.leaving, step.into_wire(self.config.exit_layer()));
            // The channel has room for all that can be in flight; one that is full or closed is a broken link.
            if frames.try_send(step).is_err() {
                self.shared
                    .report_break(self.epoch, || "the link to stage 0 takes no more frames".to_owned());
                break;
            }
        }
        master.publish();
    }
}

async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Of an emulated device, a frame says when it leaves by the device's time.
fn leaving_at(at: Option<Instant>, frame: v1::Frame) -> v1::Frame {
    v1::Frame { due_ns: at.map_or(0, due_ns), ..frame }
}
