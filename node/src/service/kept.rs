//! Workers whose streams of orders broke, and who takes them over. Knows nothing of processes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use protocol::node::StageOrder;
use protocol::v1;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

/// Who ordered a worker.
pub(super) struct Client {
    pub(super) orders: Streaming<v1::WorkerOrder>,
    pub(super) news: mpsc::Sender<Result<v1::WorkerEvent, Status>>,
    /// Cancelled when the news are not wanted any more.
    pub(super) wanted: CancellationToken,
}

/// Workers that wait to be ordered again.
pub(super) type Kept = Waiting<Client>;

/// Who waits, by what was ordered.
pub(super) struct Waiting<T>(Mutex<Vec<(StageOrder, oneshot::Sender<T>)>>);

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Waiting<T> {
    /// Waits for who orders the same. An error if nobody will.
    pub(super) fn wait(&self, order: &StageOrder) -> oneshot::Receiver<T> {
        let (heir, taken) = oneshot::channel();
        self.lock().push((order.clone(), heir));
        taken
    }

    /// Hands a worker that was ordered so to whoever orders it now; gives them back if there is none.
    pub(super) fn hand_over(&self, order: &StageOrder, mut heir: T) -> Option<T> {
        let mut waiting = self.lock();
        waiting.retain(|(_, waits)| !waits.is_closed());
        while let Some(at) = waiting.iter().position(|(kept, _)| is_same_stage(kept, order)) {
            match waiting.swap_remove(at).1.send(heir) {
                Ok(()) => return None,
                // It has ended meanwhile.
                Err(back) => heir = back,
            }
        }
        Some(heir)
    }

    /// Lets nobody wait any longer. Whether anybody did.
    pub(super) fn end_all(&self) -> bool {
        let ended = std::mem::take(&mut *self.lock());
        ended.iter().any(|(_, waits)| !waits.is_closed())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(StageOrder, oneshot::Sender<T>)>> {
        // The list is whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a worker that was started for one order is what the other asks for. Where its slices came from makes no difference to it.
fn is_same_stage(kept: &StageOrder, order: &StageOrder) -> bool {
    let without_supply = |order: &StageOrder| StageOrder { supply: None, ..order.clone() };
    without_supply(kept) == without_supply(order)
}

#[cfg(test)]
mod tests {
    use cluster::{LayerRange, ModelHash};

    use super::*;

    fn order(slots: u32) -> StageOrder {
        StageOrder {
            model: "tiny".into(),
            model_hash: ModelHash([1; 32]),
            stage: 0,
            n_stages: 1,
            layers: LayerRange::new(0, 4).unwrap(),
            gpu_layers: 0,
            slots,
            n_ctx: 64,
            n_batch: 16,
            threads: None,
            stages_here: 2,
            micro_batches: 1,
            queue_limit: 1,
            prefill_chunk: 16,
            step_deadline_secs: 120,
            allow_uncertified: false,
            ignore_memory: false,
            supply: None,
            keep_secs: 60,
        }
    }

    #[test]
    fn a_kept_worker_goes_to_who_orders_the_very_same_once() {
        let waiting = Waiting::default();
        let mut kept = waiting.wait(&order(1));
        assert_eq!(waiting.hand_over(&order(2), "another"), Some("another"));
        assert_eq!(waiting.hand_over(&order(1), "heir"), None);
        assert_eq!(kept.try_recv(), Ok("heir"));
        assert_eq!(waiting.hand_over(&order(1), "late"), Some("late"));
    }

    #[test]
    fn one_that_ended_meanwhile_is_handed_to_nobody_and_all_can_be_ended() {
        let waiting = Waiting::default();
        drop(waiting.wait(&order(1)));
        let mut second = waiting.wait(&order(1));
        assert_eq!(waiting.hand_over(&order(1), 1), None);
        assert_eq!(second.try_recv(), Ok(1));
        let mut third = waiting.wait(&order(1));
        assert!(waiting.end_all());
        assert!(third.try_recv().is_err());
        assert!(!waiting.end_all());
    }
}
