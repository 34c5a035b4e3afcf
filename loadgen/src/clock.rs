//! Time since a run began, and threads that keep it better than an async runtime's timers do, which count in
//! whole milliseconds.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

/// How long a sleeping thread takes at most to see that nobody waits for it any more.
const NOTICE: Duration = Duration::from_millis(50);

/// How many due times may wait to be read. What is not read in time is late, and the run says so.
const AHEAD: usize = 1024;

/// Counts from the start of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now(self) -> Duration {
        self.0.elapsed()
    }
}

/// Tells times as they come.
pub(crate) struct Pacer {
    due: mpsc::Receiver<Duration>,
    thread: Option<JoinHandle<()>>,
}

impl Pacer {
    /// Tells each of `times`, which rise, when it has come.
    pub(crate) fn start(clock: Clock, times: impl Iterator<Item = Duration> + Send + 'static) -> Self {
        let (tell, due) = mpsc::channel(AHEAD);
        let thread = thread::spawn(move || {
            for time in times {
                while let Some(rest) = time.checked_sub(clock.now()).filter(|rest| !rest.is_zero()) {
                    thread::sleep(rest.min(NOTICE));
                    if tell.is_closed() {
                        return;
                    }
                }
                if tell.blocking_send(time).is_err() {
                    return;
                }
            }
        });
        Self { due, thread: Some(thread) }
    }

    /// The next time that has come; `None` after the last.
    pub(crate) async fn next(&mut self) -> Option<Duration> {
        self.due.recv().await
    }
}

impl Drop for Pacer {
    fn drop(&mut self) {
        self.due.close();
        if let Some(thread) = self.thread.take() {
            // It does not panic, and if it did there would be nothing to do about it.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn times_are_told_in_order_and_never_before_they_have_come() {
        let clock = Clock::start();
        let times = [0, 1, 1, 4].map(Duration::from_millis);
        let mut pacer = Pacer::start(clock, times.into_iter());
        for time in times {
            assert_eq!(pacer.next().await, Some(time));
            assert!(clock.now() >= time);
        }
        assert_eq!(pacer.next().await, None);
    }

    #[test]
    fn a_pacer_that_is_dropped_does_not_sleep_to_its_next_time() {
        let pacer = Pacer::start(Clock::start(), [Duration::from_secs(3600)].into_iter());
        drop(pacer);
    }
}
