//! When requests come in an open loop. Pure: the same schedule and seed give the same times.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Requests per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate(f64);

/// More than this no single client could send.
const MAX_RATE: f64 = 1e6;

/// What is not a rate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{0:?} is not a rate: a number of requests per second above 0 and up to 1000000 is expected")]
pub struct RateError(String);

impl Rate {
    /// Per second.
    pub fn per_second(self) -> f64 {
        self.0
    }
}

impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Self, RateError> {
        let rate = text.trim().parse().ok().filter(|rate| *rate > 0.0 && *rate <= MAX_RATE);
        rate.map(Self).ok_or_else(|| RateError(text.to_owned()))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requests/s", self.0)
    }
}

/// A schedule.
#[derive(Debug, Clone)]
pub enum Arrivals {
    /// One after every equal interval.
    Fixed(Rate),
    /// Independent of each other: exponentially distributed intervals.
    Poisson {
        /// On average.
        rate: Rate,
        /// The same seed gives the same intervals.
        seed: u64,
    },
    /// As recorded. Rising.
    At(Arc<[Duration]>),
}

impl Arrivals {
    /// The times from the start of a run, rising. Only those of a trace end.
    pub fn times(&self) -> Box<dyn Iterator<Item = Duration> + Send> {
        match self.clone() {
            Self::Fixed(rate) => Box::new((0_u64..).map(move |i| Duration::from_secs_f64(i as f64 / rate.0))),
            Self::Poisson { rate, seed } => {
                let mut rng = StdRng::seed_from_u64(seed);
                let mut at = 0.0;
                Box::new(std::iter::repeat_with(move || {
                    // 1 − u lies in (0, 1], whose logarithm is finite.
                    at -= (1.0 - rng.random::<f64>()).ln() / rate.0;
                    Duration::from_secs_f64(at)
                }))
            }
            Self::At(times) => Box::new((0..times.len()).map(move |i| times[i])),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rate(text: &str) -> Rate {
        text.parse().unwrap()
    }

    #[test]
    fn a_rate_is_a_finite_number_above_zero() {
        assert_eq!(rate(" 2.5 ").per_second(), 2.5);
        for bad in ["0", "-1", "inf", "nan", "1e7", "", "fast"] {
            let error = bad.parse::<Rate>().unwrap_err();
            assert!(error.to_string().contains("not a rate"), "{bad}");
        }
    }

    #[test]
    fn a_fixed_schedule_does_not_drift() {
        let arrivals = Arrivals::Fixed(rate("3"));
        assert_eq!(arrivals.times().next(), Some(Duration::ZERO));
        assert_eq!(arrivals.times().nth(3_000_000), Some(Duration::from_secs(1_000_000)));
    }

    #[test]
    fn a_poisson_schedule_is_the_same_for_the_same_seed_and_only_for_it() {
        let first = |seed| Arrivals::Poisson { rate: rate("5"), seed }.times().take(50).collect::<Vec<_>>();
        assert_eq!(first(7), first(7));
        assert_ne!(first(7), first(8));
    }

    #[test]
    fn poisson_intervals_have_the_mean_and_the_spread_of_an_exponential_distribution() {
        let n = 20_000;
        let times: Vec<f64> =
            Arrivals::Poisson { rate: rate("4"), seed: 1 }.times().take(n).map(|t| t.as_secs_f64()).collect();
        let intervals: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = intervals.iter().sum::<f64>() / intervals.len() as f64;
        let variance = intervals.iter().map(|i| (i - mean).powi(2)).sum::<f64>() / intervals.len() as f64;
        assert!((mean - 0.25).abs() < 0.01, "{mean}");
        assert!((variance.sqrt() - 0.25).abs() < 0.01, "{variance}");
    }

    #[test]
    fn a_trace_ends() {
        let times: Arc<[Duration]> = [1, 5].map(Duration::from_secs).into();
        assert_eq!(Arrivals::At(times).times().collect::<Vec<_>>(), [1, 5].map(Duration::from_secs));
    }

    proptest! {
        #[test]
        fn times_never_fall(per_second in 0.01..1e6_f64, seed: u64) {
            let rate = Rate(per_second);
            for arrivals in [Arrivals::Fixed(rate), Arrivals::Poisson { rate, seed }] {
                let times: Vec<Duration> = arrivals.times().take(200).collect();
                prop_assert!(times.is_sorted());
            }
        }
    }
}
