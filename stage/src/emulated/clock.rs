//! The time of emulated devices: what takes them so long ends so long after it began, and the next thing begins then, however late
//! the system woke whoever slept for it, and however long this program took in between. So errors do not add up, from step to step or
//! from stage to stage, and what a hop really takes is hidden in the time of the next device. The only file here that knows a clock.
//!
//! A frame brings along when it comes by that time (`due_ns`). All stages of a replica must run on hosts whose clocks agree: to the
//! microsecond if its steps are to, as those of one host do.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// More than so much that was lost is not made up for: that is a host that was suspended or has too much to do, not one that is late.
const MOST_OWED: Duration = Duration::from_millis(20);

/// Clocks that are further apart are of different hosts, and say nothing.
const SAME_CLOCK: Duration = Duration::from_secs(1);

/// A device's time.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// When the last work was over.
    free: Option<Instant>,
}

impl Clock {
    /// Returns when work is over that came at `arrived` and takes `time`, begun after all earlier work; says when it was by the device's
    /// time.
    pub(super) fn work(&mut self, arrived: Instant, time: Duration) -> Instant {
        let end = self.occupy(arrived, time, Instant::now());
        sleep_until(end);
        end
    }

    /// The same without waiting for it.
    pub(super) fn occupy(&mut self, arrived: Instant, time: Duration, now: Instant) -> Instant {
        let due = self.free.map_or(arrived, |free| free.max(arrived));
        let end = due.max(earliest(now)) + time;
        self.free = Some(end);
        end
    }
}

fn earliest(now: Instant) -> Instant {
    now.checked_sub(MOST_OWED).unwrap_or(now)
}

pub(super) fn sleep_until(deadline: Instant) {
    // Too late by some 60 µs, which is made up for.
    std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
}

/// For a frame that comes at `at`.
pub(crate) fn due_ns(at: Instant) -> u64 {
    let (now, clock) = (Instant::now(), SystemTime::now());
    let then = clock + at.saturating_duration_since(now) - now.saturating_duration_since(at);
    then.duration_since(UNIX_EPOCH).ok().and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}

/// When a frame came: by what it says, or now.
pub(crate) fn came_at(due_ns: u64) -> Instant {
    came(due_ns, Instant::now(), SystemTime::now())
}

fn came(due_ns: u64, now: Instant, clock: SystemTime) -> Instant {
    let due = UNIX_EPOCH + Duration::from_nanos(due_ns);
    match clock.duration_since(due) {
        Ok(ago) if due_ns > 0 && ago <= SAME_CLOCK => now.checked_sub(ago.min(MOST_OWED)).unwrap_or(now),
        _ => now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LATE: Duration = Duration::from_micros(300);

    #[test]
    fn being_late_each_time_does_not_add_up() {
        let start = Instant::now();
        let mut clocks = [Clock::default(), Clock::default()];
        let mut arrived = start;
        for step in 0..1000 {
            // Each frame is really there somewhat after it was due.
            arrived = clocks[step % 2].occupy(arrived, MS, arrived + LATE);
        }
        assert_eq!(arrived - start, 1000 * MS);
    }

    #[test]
    fn work_that_waits_begins_when_the_work_before_ends() {
        let start = Instant::now();
        let mut clock = Clock::default();
        assert_eq!(clock.occupy(start, 5 * MS, start), start + 5 * MS);
        assert_eq!(clock.occupy(start + MS, 5 * MS, start + 5 * MS + LATE), start + 10 * MS);
        assert_eq!(clock.occupy(start + 20 * MS, MS, start + 20 * MS + LATE), start + 21 * MS);
    }

    #[test]
    fn a_suspended_host_does_not_run_ahead_afterwards() {
        let start = Instant::now();
        let mut clock = Clock::default();
        let woken = start + 1000 * MS;
        assert_eq!(clock.occupy(start, MS, woken), woken - MOST_OWED + MS);
    }

    #[test]
    fn work_is_never_over_too_early() {
        let mut clock = Clock::default();
        for micros in [0, 10, 90, 200, 1500] {
            let time = Duration::from_micros(micros);
            let end = clock.work(Instant::now(), time);
            assert!(Instant::now() >= end);
        }
    }

    #[test]
    fn a_frame_came_when_it_says_unless_that_cannot_be() {
        let (now, clock) = (Instant::now(), SystemTime::now());
        let ns = |at: SystemTime| u64::try_from(at.duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap();
        assert_eq!(came(ns(clock - 3 * MS), now, clock), now - 3 * MS);
        assert_eq!(came(ns(clock - 300 * MS), now, clock), now - MOST_OWED);
        for unbelievable in [0, ns(clock + MS), ns(clock - 5000 * MS)] {
            assert_eq!(came(unbelievable, now, clock), now);
        }
        let at = Instant::now() - 2 * MS;
        let told = came_at(due_ns(at));
        assert!(told.saturating_duration_since(at) < MOST_OWED && told <= Instant::now());
    }
}
