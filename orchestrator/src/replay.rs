//! How often a request is sent again after its replica was lost.
//!
//! A request that loses its replica is sent to another one with the tokens it has, and its client sees a pause. But a request
//! may be the cause: one that makes a stage crash would be carried from replica to replica until none is left. What tells it from an
//! innocent one is that it gets nowhere: after the crash it gets no token more. So a request may be sent again **four times in a
//! row without a token in between**; from the second time on it is kept apart from others of this kind, so that each of them either gets
//! on or is alone to blame. Twice were too few: where stages die a second after another on a busy host, an innocent prompt may be
//! hit three times before its first token. A stage is given up after ten crashes, so one guilty request leaves it half of them. And it
//! may be sent again **eight times in all**: of faults that come at random, minutes apart, that
//! many hit no request; a request that wears replicas out more slowly is stopped by it.
//!
//! Pure: knows nothing of replicas, tokens or time.

use crate::desk::Company;

/// Times in a row that a request is sent again without getting a token in between.
const MOST_IN_VAIN: u32 = 4;

/// From this time in a row on it is kept apart.
const APART_FROM: u32 = 2;

/// Times in all.
const MOST_REPLAYS: u32 = 8;

/// How often a request was sent again.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Trials {
    replays: u32,
    in_vain: u32,
}

impl Trials {
    /// It got a token.
    pub(crate) fn progressed(&mut self) {
        self.in_vain = 0;
    }

    /// It lost its replica. Beside whom it may be sent again; none if it may not.
    pub(crate) fn lost(&mut self) -> Option<Company> {
        if self.in_vain == MOST_IN_VAIN || self.replays == MOST_REPLAYS {
            return None;
        }
        self.in_vain += 1;
        self.replays += 1;
        Some(if self.in_vain >= APART_FROM { Company::Apart } else { Company::Any })
    }

    /// Times it was sent again.
    pub(crate) fn replays(self) -> u32 {
        self.replays
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_gets_nowhere_is_sent_again_four_times_from_the_second_on_apart() {
        let mut trials = Trials::default();
        assert_eq!(trials.lost(), Some(Company::Any));
        for _ in APART_FROM..=MOST_IN_VAIN {
            assert_eq!(trials.lost(), Some(Company::Apart));
        }
        assert_eq!(trials.lost(), None);
        assert_eq!(trials.replays(), 4);
    }

    #[test]
    fn a_token_in_between_is_progress() {
        let mut trials = Trials::default();
        for _ in 0..MOST_REPLAYS {
            assert_eq!(trials.lost(), Some(Company::Any));
            trials.progressed();
        }
        assert_eq!(trials.lost(), None, "but not for ever");
    }
}
