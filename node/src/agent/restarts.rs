//! When a lost worker is started again, and when no more.
//!
//! The first restart comes almost at once, because most losses are one-off; the pause doubles so that a worker that
//! cannot run does not eat the host. A worker that served for a while starts afresh. A load that the worker itself
//! reports as failed (a damaged file, no memory) rarely mends by itself, so it is tried only a few times. A node that is
//! out of reach is waited for without end: hosts are restarted and cables pulled, and nothing is wrong with the stage.

use std::time::Duration;

/// Before the first restart.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Before a node that was out of reach is tried again: its return should be noticed soon, and a try costs nothing.
const UNREACHABLE_PAUSE: Duration = Duration::from_secs(1);

/// A worker that served this long was sound: what happened before no longer counts.
const SOUND_AFTER: Duration = Duration::from_secs(30);

/// Crashes in a row after which a stage is given up: more than a minute of trying.
const MOST_CRASHES: u32 = 10;

/// Failed loads in a row after which a stage is given up.
const MOST_FAILED_LOADS: u32 = 3;

/// How a worker was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// It died, or did not answer in time.
    Crash,
    /// It said that it cannot load its slices.
    Load,
    /// The node that is to run it cannot be reached.
    Unreachable,
}

/// What to do about a lost worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Start another after a pause.
    RestartAfter(Duration),
    /// Start no other; so many were tried.
    GiveUp(u32),
}

/// The losses of one stage's workers.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    in_a_row: u32,
    failed_loads: u32,
}

impl Restarts {
    /// Counts a loss of a worker that had served for `served`, and decides.
    pub(super) fn lost(&mut self, failure: Failure, served: Duration) -> Verdict {
        if served >= SOUND_AFTER {
            *self = Self::default();
        }
        if failure == Failure::Unreachable {
            return Verdict::RestartAfter(UNREACHABLE_PAUSE);
        }
        self.in_a_row += 1;
        self.failed_loads = if failure == Failure::Load { self.failed_loads + 1 } else { 0 };
        if self.in_a_row >= MOST_CRASHES || self.failed_loads >= MOST_FAILED_LOADS {
            return Verdict::GiveUp(self.in_a_row);
        }
        // Ten crashes at most: the shift cannot overflow.
        Verdict::RestartAfter(LONGEST_PAUSE.min(FIRST_PAUSE * (1 << (self.in_a_row - 1))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::ZERO;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut restarts = Restarts::default();
        let pauses: Vec<Verdict> = (0..8).map(|_| restarts.lost(Failure::Crash, AT_ONCE)).collect();
        assert_eq!(pauses[0], Verdict::RestartAfter(Duration::from_millis(200)));
        assert_eq!(pauses[1], Verdict::RestartAfter(Duration::from_millis(400)));
        assert_eq!(pauses[7], Verdict::RestartAfter(LONGEST_PAUSE));
    }

    #[test]
    fn a_worker_that_served_for_a_while_starts_afresh() {
        let mut restarts = Restarts::default();
        for _ in 0..5 {
            restarts.lost(Failure::Crash, AT_ONCE);
        }
        assert_eq!(restarts.lost(Failure::Crash, SOUND_AFTER), Verdict::RestartAfter(FIRST_PAUSE));
    }

    #[test]
    fn a_crash_loop_is_given_up() {
        let mut restarts = Restarts::default();
        let verdicts: Vec<Verdict> =
            (0..MOST_CRASHES).map(|_| restarts.lost(Failure::Crash, AT_ONCE)).collect();
        assert_eq!(verdicts.last(), Some(&Verdict::GiveUp(MOST_CRASHES)));
        assert!(verdicts[..9].iter().all(|verdict| matches!(verdict, Verdict::RestartAfter(_))));
    }

    #[test]
    fn a_node_out_of_reach_is_waited_for_without_end() {
        let mut restarts = Restarts::default();
        for _ in 0..1000 {
            let verdict = restarts.lost(Failure::Unreachable, AT_ONCE);
            assert_eq!(verdict, Verdict::RestartAfter(UNREACHABLE_PAUSE));
        }
        assert_eq!(restarts.lost(Failure::Crash, AT_ONCE), Verdict::RestartAfter(FIRST_PAUSE));
    }

    #[test]
    fn a_load_that_fails_is_given_up_sooner() {
        let mut restarts = Restarts::default();
        restarts.lost(Failure::Load, AT_ONCE);
        restarts.lost(Failure::Load, AT_ONCE);
        assert_eq!(restarts.lost(Failure::Load, AT_ONCE), Verdict::GiveUp(3));
    }
}
