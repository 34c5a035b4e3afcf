//! Passes the time of an emulated device: sleeps until a deadline, and takes off the next one what it slept too long, so that
//! errors do not add up. The only file here that knows a clock.

use std::time::{Duration, Instant};

/// What a hop takes between two workers of this program on one host, from the end of a batch until the next stage has the frame in
/// its hands: copying, encrypting, and wake-ups of threads and cores that sleep between steps. A real device's measured hop
/// contains it too, so it is taken off the profile's. Measured on two cores of a server: 0.22 to 0.3 ms with steps of 10 ms, of
/// which 0.09 ms remain where no core goes to sleep (`bare_hop_ms` of `shoal bench emulation`).
pub(super) const TRANSIT: Duration = Duration::from_micros(250);

/// Shortly before a deadline the thread does not go to sleep again but looks at the clock: waking it takes the system about so
/// long (measured: 70 to 90 µs on Linux, of which 50 are the timer slack of a thread).
const WAKE_UP: Duration = Duration::from_micros(80);

/// More than so much that was slept too long is not made up for: that is a host that was suspended, not one that is late.
const MOST_OWED: Duration = Duration::from_millis(20);

/// A device's time.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// When the last work was really over.
    ended: Option<Instant>,
    /// By how much that was too late.
    owed: Duration,
}

impl Clock {
    /// Returns when work is over that came at `arrived` and takes `time`, begun after all earlier work; says how long it took.
    pub(super) fn work(&mut self, arrived: Instant, time: Duration) -> Duration {
        let begin = self.begin(arrived);
        let deadline = begin + time;
        wait_until(deadline);
        let now = Instant::now();
        self.done(deadline, now);
        now.saturating_duration_since(begin)
    }

    /// When the work begins in the device's time: once it is there and the work before is over, less what is owed.
    fn begin(&self, arrived: Instant) -> Instant {
        let free = self.ended.map_or(arrived, |ended| ended.max(arrived));
        free.checked_sub(self.owed).unwrap_or(free)
    }

    fn done(&mut self, deadline: Instant, now: Instant) {
        self.ended = Some(now);
        self.owed = now.saturating_duration_since(deadline).min(MOST_OWED);
    }
}

fn wait_until(deadline: Instant) {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if left > WAKE_UP {
            std::thread::sleep(left - WAKE_UP);
        } else {
            std::hint::spin_loop();
        }
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
        let mut clock = Clock::default();
        let mut arrived = start;
        for _ in 0..1000 {
            // A frame comes as soon as the one before has gone, as in a chain with one request.
            let deadline = clock.begin(arrived) + MS;
            arrived = deadline + LATE;
            clock.done(deadline, arrived);
        }
        assert_eq!(arrived - start, 1000 * MS + LATE);
    }

    #[test]
    fn work_that_waits_begins_when_the_work_before_should_have_ended() {
        let start = Instant::now();
        let mut clock = Clock::default();
        clock.done(start + 5 * MS, start + 5 * MS + LATE);
        assert_eq!(clock.begin(start + MS), start + 5 * MS);
        assert_eq!(clock.begin(start + 9 * MS), start + 9 * MS - LATE);
    }

    #[test]
    fn a_suspended_host_does_not_run_ahead_afterwards() {
        let start = Instant::now();
        let mut clock = Clock::default();
        let woken = start + 1000 * MS;
        clock.done(start, woken);
        assert_eq!(clock.begin(woken), woken - MOST_OWED);
    }

    #[test]
    fn work_is_never_over_too_early() {
        let mut clock = Clock::default();
        for micros in [0, 10, 90, 200, 1500] {
            let arrived = Instant::now();
            let (owed, time) = (clock.owed, Duration::from_micros(micros));
            clock.work(arrived, time);
            assert!(arrived.elapsed() + owed >= time);
        }
    }
}
