//! Numbers for incarnations of replicas. Stages refuse frames of any other than theirs, so no number is given twice: not by an agent,
//! and where nodes keep stages over a restart of who directs them, not after it either.

use std::fmt;
use std::sync::Arc;

use cluster::Epoch;
use tokio::sync::Mutex;

/// Numbers taken at once from where they are kept: one write to the disk for so many.
const BATCH: u64 = 64;

/// Gives numbers. Clones give from the same.
#[derive(Clone, Default)]
pub struct Epochs(Arc<Mutex<Numbers>>);

#[derive(Default)]
struct Numbers {
    given: u64,
    /// From where more are had; else they are counted from 1.
    kept: Option<Kept>,
}

struct Kept {
    /// The last of those that were taken.
    last: u64,
    take: Arc<dyn Fn(u64) -> Result<u64, String> + Send + Sync>,
}

impl Epochs {
    /// Numbers of which `take` takes so many, for good, and gives the first. It may wait for the disk.
    pub fn kept(take: impl Fn(u64) -> Result<u64, String> + Send + Sync + 'static) -> Self {
        let kept = Kept { last: 0, take: Arc::new(take) };
        Self(Arc::new(Mutex::new(Numbers { given: 0, kept: Some(kept) })))
    }

    /// The next one.
    pub(super) async fn next(&self) -> Result<Epoch, String> {
        let mut numbers = self.0.lock().await;
        let Numbers { given, kept } = &mut *numbers;
        if let Some(kept) = kept.as_mut().filter(|kept| kept.last == *given) {
            let take = Arc::clone(&kept.take);
            let first = tokio::task::spawn_blocking(move || take(BATCH)).await;
            let first = first.unwrap_or_else(|error| Err(error.to_string()))?;
            (*given, kept.last) = (first - 1, first - 1 + BATCH);
        }
        *given += 1;
        Ok(Epoch(*given))
    }
}

impl fmt::Debug for Epochs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epochs").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[tokio::test]
    async fn epochs_count_up_over_restarts_and_are_taken_in_batches() {
        let disk = Arc::new(AtomicU64::new(0));
        let open = || {
            let disk = Arc::clone(&disk);
            Epochs::kept(move |count| Ok(disk.fetch_add(count, Ordering::Relaxed) + 1))
        };
        let (first, mut last) = (open(), 0);
        for _ in 0..BATCH + 2 {
            let Epoch(next) = first.clone().next().await.unwrap();
            assert_eq!(next, last + 1);
            last = next;
        }
        assert_eq!(disk.load(Ordering::Relaxed), 2 * BATCH);
        assert!(open().next().await.unwrap().0 > last);
        assert_eq!(Epochs::default().next().await.unwrap(), Epoch(1));
        assert_eq!(Epochs::kept(|_| Err("full".into())).next().await, Err("full".into()));
    }
}
