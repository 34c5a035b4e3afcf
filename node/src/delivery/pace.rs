//! A limit on the rate of all transfers in one direction together.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cluster::BytesPerSecond;
use tokio::time::Instant;

/// A rate that is kept. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Pace(Option<Arc<Kept>>);

#[derive(Debug)]
struct Kept {
    rate: BytesPerSecond,
    /// When what was let through so far is paid for.
    free_at: Mutex<Instant>,
}

impl Pace {
    /// At most so fast, or as fast as it goes.
    pub(crate) fn new(rate: Option<BytesPerSecond>) -> Self {
        Self(rate.map(|rate| Arc::new(Kept { rate, free_at: Mutex::new(Instant::now()) })))
    }

    /// Waits until so many bytes may pass. Whoever asks first goes first.
    pub(crate) async fn take(&self, bytes: usize) {
        let Some(kept) = &self.0 else { return };
        let time = Duration::from_secs_f64(bytes as f64 / kept.rate.0.max(1.0));
        let at = {
            // One assignment: what a panicking thread leaves is whole.
            let mut free_at = kept.free_at.lock().unwrap_or_else(PoisonError::into_inner);
            let at = (*free_at).max(Instant::now());
            *free_at = at + time;
            at
        };
        tokio::time::sleep_until(at).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn all_transfers_together_keep_the_rate() {
        let pace = Pace::new(Some(BytesPerSecond(1000.0)));
        let start = Instant::now();
        let transfer = |pace: Pace| async move {
            for _ in 0..10 {
                pace.take(100).await;
            }
        };
        tokio::join!(transfer(pace.clone()), transfer(pace.clone()));
        // The first goes at once, and the last of 2000 bytes is not waited for.
        assert_eq!(start.elapsed().as_millis(), 1900);
        // Time in which nobody asked is not saved up.
        tokio::time::sleep(Duration::from_secs(60)).await;
        let start = Instant::now();
        transfer(pace).await;
        assert_eq!(start.elapsed().as_millis(), 900);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_nothing_waits() {
        let start = Instant::now();
        Pace::new(None).take(usize::MAX).await;
        assert!(start.elapsed().is_zero());
    }
}
