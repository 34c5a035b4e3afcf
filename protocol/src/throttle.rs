//! Lets one event through per period and counts the rest, so that a flood of bad input becomes one log line a second.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One event per period.
#[derive(Debug)]
pub struct Throttle {
    period: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    held: u64,
}

impl Throttle {
    /// At most one event per `period`.
    pub const fn new(period: Duration) -> Self {
        Self { period, state: Mutex::new(State { last: None, held: 0 }) }
    }

    /// Whether an event at `now` passes; then with the number of events held back since the last that did.
    pub fn pass(&self, now: Instant) -> Option<u64> {
        // The state is whole after every statement, so a panic elsewhere while it was locked does no harm.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.last.is_some_and(|last| now.saturating_duration_since(last) < self.period) {
            state.held += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_passes_per_period_and_the_rest_are_counted() {
        let throttle = Throttle::new(Duration::from_secs(1));
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(throttle.pass(at(0)), Some(0));
        for ms in [0, 10, 999] {
            assert_eq!(throttle.pass(at(ms)), None);
        }
        assert_eq!(throttle.pass(at(1000)), Some(3));
        assert_eq!(throttle.pass(at(1500)), None);
        assert_eq!(throttle.pass(at(5000)), Some(1));
    }
}
