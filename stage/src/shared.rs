//! What the worker's threads know of each other: the load state, the epoch, whether the epoch's chain is broken, counters, and what is
//! held and copied for other replicas. Latches, numbers and short lists only, so that nobody ever waits to report a fault, and no report is lost in a queue.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cluster::Epoch;
use protocol::hand_off::ChainStage;
use tokio::sync::{Notify, watch};

use crate::engine::EngineStatus;
use crate::hand_off::{Copies, Holds, KvFacts};
use crate::observed::Observed;

/// What a loaded stage knows of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loaded {
    /// Bytes of weights.
    pub(crate) weights: u64,
    /// Bytes of KV caches and recurrent states.
    pub(crate) cache: u64,
    /// Bytes of compute and output buffers.
    pub(crate) compute: u64,
    /// Bytes of the process that are none of these.
    pub(crate) runtime: u64,
    /// Blocks on a GPU.
    pub(crate) gpu_layers: u32,
    /// Size of the vocabulary: of the embeddings on stage 0, of the head on the master; 0 elsewhere.
    pub(crate) n_vocab: u32,
}

/// How far the model is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum LoadState {
    /// A share of the weights is loaded, 0 to 1.
    Loading(f32),
    /// The stage can run frames.
    Loaded(Loaded),
    /// It never will; the reason is for people.
    Failed(String),
}

/// Shared by the inference thread, the services and the link.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Share of the weights, as f32 bits: written for every tensor.
    progress: AtomicU32,
    outcome: Mutex<Option<Result<Loaded, String>>>,
    epoch: watch::Sender<Epoch>,
    breakage: watch::Sender<Breakage>,
    steps: AtomicU64,
    observed: Observed,
    engine: Mutex<Option<EngineStatus>>,
    bell: Notify,
    kv: OnceLock<Result<KvFacts, String>>,
    copies: Copies,
    holds: Holds,
    chain: Mutex<Vec<ChainStage>>,
}

/// Whether the chain of the newest epoch is broken, and how it came about: the first reason is the one that counts.
#[derive(Debug, Default)]
struct Breakage {
    epoch: Epoch,
    reason: Option<String>,
}

impl Breakage {
    fn reason_in(&self, epoch: Epoch) -> Option<String> {
        self.reason.as_ref().filter(|_| self.epoch == epoch).cloned()
    }
}

impl Shared {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            progress: AtomicU32::new(0),
            outcome: Mutex::new(None),
            epoch: watch::Sender::new(Epoch(0)),
            breakage: watch::Sender::new(Breakage::default()),
            steps: AtomicU64::new(0),
            observed: Observed::default(),
            engine: Mutex::new(None),
            bell: Notify::new(),
            kv: OnceLock::new(),
            copies: Copies::default(),
            holds: Holds::default(),
            chain: Mutex::default(),
        })
    }

    pub(crate) fn load_state(&self) -> LoadState {
        match &*lock(&self.outcome) {
            None => LoadState::Loading(f32::from_bits(self.progress.load(Ordering::Relaxed))),
            Some(Ok(loaded)) => LoadState::Loaded(*loaded),
            Some(Err(reason)) => LoadState::Failed(reason.clone()),
        }
    }

    pub(crate) fn set_progress(&self, share: f32) {
        self.progress.store(share.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn set_outcome(&self, outcome: Result<Loaded, String>) {
        *lock(&self.outcome) = Some(outcome);
    }

    pub(crate) fn set_kv(&self, kv: Result<KvFacts, String>) {
        // Loaded once.
        let _ = self.kv.set(kv);
    }

    /// The stage's keys and values, or why they cannot be handed off; none before it is loaded.
    pub(crate) fn kv(&self) -> Option<&Result<KvFacts, String>> {
        self.kv.get()
    }

    /// Sequences that were copied out before anybody asked for them.
    pub(crate) fn copies(&self) -> &Copies {
        &self.copies
    }

    /// Slots that the master holds for other replicas. Written by its inference thread.
    pub(crate) fn holds(&self) -> &Holds {
        &self.holds
    }

    /// All stages of the replica in the newest epoch, as others reach them.
    pub(crate) fn set_chain(&self, chain: Vec<ChainStage>) {
        *lock(&self.chain) = chain;
    }

    /// All stages of the replica; none if they were not told.
    pub(crate) fn chain(&self) -> Vec<ChainStage> {
        lock(&self.chain).clone()
    }

    /// The epoch whose frames are taken; 0 before the first.
    pub(crate) fn epoch(&self) -> Epoch {
        *self.epoch.borrow()
    }

    /// A new epoch is being prepared: faults of earlier ones no longer count.
    pub(crate) fn prepare_epoch(&self, epoch: Epoch) {
        self.breakage.send_replace(Breakage { epoch, reason: None });
    }

    /// Its frames are taken from now on.
    pub(crate) fn enter_epoch(&self, epoch: Epoch) {
        self.epoch.send_replace(epoch);
    }

    /// The chain is broken, as far as this stage can tell. Only the first reason of the newest epoch is kept.
    pub(crate) fn report_break(&self, epoch: Epoch, reason: impl FnOnce() -> String) {
        let is_news = self.breakage.send_if_modified(|breakage| {
            if breakage.epoch != epoch || breakage.reason.is_some() {
                return false;
            }
            let reason = reason();
            tracing::warn!(epoch = epoch.0, %reason, "the chain of stages is broken");
            breakage.reason = Some(reason);
            true
        });
        if is_news {
            self.ring();
        }
    }

    /// Why the chain of the newest epoch is broken, if it is.
    pub(crate) fn broken(&self) -> Option<String> {
        self.breakage.borrow().reason.clone()
    }

    /// Why the chain of `epoch` is broken, if it is; cheap if not.
    pub(crate) fn broken_in(&self, epoch: Epoch) -> Option<String> {
        self.breakage.borrow().reason_in(epoch)
    }

    /// Waits until the chain of `epoch` is broken or the epoch has passed, and says which.
    pub(crate) async fn end_of(&self, epoch: Epoch) -> String {
        let (mut breaks, mut epochs) = (self.breakage.subscribe(), self.epoch.subscribe());
        let passed = || format!("{epoch} has passed");
        // Neither ends, since `self` holds both senders.
        tokio::select! {
            broken = breaks.wait_for(|breakage| breakage.reason_in(epoch).is_some()) => {
                broken.ok().and_then(|breakage| breakage.reason_in(epoch)).unwrap_or_else(passed)
            }
            _ = epochs.wait_for(|now| *now != epoch) => passed(),
        }
    }

    pub(crate) fn count_steps(&self, steps: usize) {
        self.steps.fetch_add(steps as u64, Ordering::Relaxed);
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// What the steps took. Written by the inference thread alone.
    pub(crate) fn observed(&self) -> &Observed {
        &self.observed
    }

    pub(crate) fn set_engine(&self, status: EngineStatus) {
        *lock(&self.engine) = Some(status);
    }

    pub(crate) fn engine(&self) -> Option<EngineStatus> {
        *lock(&self.engine)
    }

    /// Makes the inference thread look at what has changed.
    pub(crate) fn ring(&self) {
        self.bell.notify_one();
    }

    /// Waits for [`ring`](Self::ring); one that came before counts. For the inference thread alone.
    pub(crate) async fn rung(&self) {
        self.bell.notified().await;
    }
}

/// Every change is a single assignment, so what a panicking thread leaves behind is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_of_the_newest_epoch_is_the_one_that_counts() {
        let shared = Shared::new();
        shared.prepare_epoch(Epoch(2));
        shared.report_break(Epoch(1), || unreachable!("an old epoch's fault"));
        assert_eq!(shared.broken(), None);
        shared.report_break(Epoch(2), || "first".to_owned());
        shared.report_break(Epoch(2), || unreachable!("a later fault"));
        assert_eq!(shared.broken_in(Epoch(2)).as_deref(), Some("first"));
        assert_eq!(shared.broken_in(Epoch(1)), None);
        shared.prepare_epoch(Epoch(3));
        assert_eq!(shared.broken(), None);
    }

    #[tokio::test]
    async fn the_end_of_an_epoch_is_its_break_or_its_passing() {
        let shared = Shared::new();
        for epoch in [Epoch(1), Epoch(2)] {
            shared.prepare_epoch(epoch);
            shared.enter_epoch(epoch);
        }
        assert_eq!(shared.end_of(Epoch(1)).await, "epoch 1 has passed");
        let ((), reason) = tokio::join!(
            async { shared.report_break(Epoch(2), || "it broke".to_owned()) },
            shared.end_of(Epoch(2))
        );
        assert_eq!(reason, "it broke");
    }

    #[test]
    fn the_outcome_of_loading_replaces_its_progress() {
        let shared = Shared::new();
        shared.set_progress(0.25);
        assert_eq!(shared.load_state(), LoadState::Loading(0.25));
        shared.set_outcome(Err("no such file".to_owned()));
        shared.set_progress(0.5);
        assert_eq!(shared.load_state(), LoadState::Failed("no such file".to_owned()));
    }
}
