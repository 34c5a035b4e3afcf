//! From several measurements of a link to what is believed of it. No I/O, no clock.
//!
//! Two that agree are believed, also if they agree that there is no link. Where two do not, a third decides: the two that
//! agree, or, on a link that varies, the middle of all three.

use cluster::{BytesPerSecond, LinkQuality, Millis};
use protocol::node::{Address, FrameTime, LinkMeasurement};

use super::{quantile, sorted};

/// Times that a link is measured at most.
pub(super) const MOST: usize = 3;

/// Rates that differ by less, as a share, are the same: twice the spread of a stream that counts as steady. Of streams
/// that were not, half their spread, up to a limit: nothing better can be had of them.
const SAME_RATE: f64 = 0.12;
const SAME_UNSTEADY_RATE: f64 = 0.3;

/// Round trips that differ by less, as a share or in milliseconds, are the same: scheduling on a busy host takes as much.
const SAME_ROUND_TRIP: f64 = 0.25;
const SAME_ROUND_TRIP_MS: f64 = 0.3;

/// What is believed of a link.
#[derive(Debug, Clone, PartialEq)]
pub struct SettledLink {
    /// At which the sender reached the peer.
    pub address: Address,
    /// For the planner: the rate that one warm stream sustains, and half a round trip.
    pub quality: LinkQuality,
    /// Of an empty frame and its receipt.
    pub round_trip: Millis,
    /// The larger of the measurements'.
    pub round_trip_p99: Millis,
    /// How much the pieces of a stream differ, at worst: (largest − smallest) / middle.
    pub bandwidth_spread: f64,
    /// Frames of the sizes that stages send, as last measured.
    pub frames: Vec<FrameTime>,
    /// Measurements that this rests on.
    pub measurements: usize,
}

/// What follows from the measurements so far.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verdict {
    /// It is known.
    Settled(Box<SettledLink>),
    /// It must be measured again.
    Again,
    /// It cannot be known, and why.
    Failed(String),
}

/// Looks at all attempts to measure a link.
pub(super) fn settle(attempts: &[Result<LinkMeasurement, String>]) -> Verdict {
    let good: Vec<&LinkMeasurement> = attempts.iter().filter_map(|attempt| attempt.as_ref().ok()).collect();
    if let Some(pair) = agreeing(&good) {
        return Verdict::Settled(Box::new(combine(&pair)));
    }
    let lost = attempts.iter().rev().find_map(|attempt| attempt.as_ref().err());
    match (good.len(), attempts.len() - good.len(), lost) {
        (1, 2.., Some(reason)) => {
            Verdict::Failed(format!("only one of {MOST} measurements succeeded: {reason}"))
        }
        (0, 2.., Some(reason)) => Verdict::Failed(reason.clone()),
        _ if attempts.len() < MOST => Verdict::Again,
        _ => Verdict::Settled(Box::new(combine(&good))),
    }
}

/// The two whose rates are closest, of those that agree.
fn agreeing<'a>(good: &[&'a LinkMeasurement]) -> Option<[&'a LinkMeasurement; 2]> {
    let pairs = good.iter().enumerate().flat_map(|(i, &a)| good[i + 1..].iter().map(move |&b| [a, b]));
    pairs.filter(|[a, b]| agree(a, b)).min_by(|[a, b], [c, d]| apart(a, b).total_cmp(&apart(c, d)))
}

fn agree(a: &LinkMeasurement, b: &LinkMeasurement) -> bool {
    let (fast, slow) = (a.round_trip.0.max(b.round_trip.0), a.round_trip.0.min(b.round_trip.0));
    let spread = a.bandwidth_spread.max(b.bandwidth_spread);
    let same_rate = apart(a, b) <= SAME_RATE.max((spread / 2.0).min(SAME_UNSTEADY_RATE));
    same_rate && fast - slow <= SAME_ROUND_TRIP_MS.max(fast * SAME_ROUND_TRIP)
}

fn apart(a: &LinkMeasurement, b: &LinkMeasurement) -> f64 {
    let (a, b) = (a.bandwidth.0, b.bandwidth.0);
    (a - b).abs() / a.max(b)
}

/// The middle of each number; of two, their mean. `of` is not empty, and in the order of time.
fn combine(of: &[&LinkMeasurement]) -> SettledLink {
    let middle = |number: fn(&LinkMeasurement) -> f64| {
        let numbers = sorted(of.iter().map(|measured| number(measured)).collect());
        let (below, above) = (numbers.len().saturating_sub(1) / 2, numbers.len() / 2);
        f64::midpoint(numbers[below], numbers[above])
    };
    let largest = |number: fn(&LinkMeasurement) -> f64| {
        quantile(&sorted(of.iter().map(|measured| number(measured)).collect()), 1.0)
    };
    let round_trip = middle(|measured| measured.round_trip.0);
    let latest = of[of.len() - 1];
    SettledLink {
        address: latest.address.clone(),
        quality: LinkQuality {
            bandwidth: BytesPerSecond(middle(|measured| measured.bandwidth.0)),
            one_way_latency: Millis(round_trip / 2.0),
        },
        round_trip: Millis(round_trip),
        round_trip_p99: Millis(largest(|measured| measured.round_trip_p99.0)),
        bandwidth_spread: largest(|measured| measured.bandwidth_spread),
        frames: latest.frames.clone(),
        measurements: of.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(mbit: f64, round_trip: f64) -> Result<LinkMeasurement, String> {
        Ok(LinkMeasurement {
            address: Address::parse("b:1").unwrap(),
            round_trip: Millis(round_trip),
            round_trip_p99: Millis(round_trip * 3.0),
            bandwidth: BytesPerSecond::from_mbit(mbit),
            bandwidth_spread: 0.01,
            frames: Vec::new(),
        })
    }

    fn lost() -> Result<LinkMeasurement, String> {
        Err("cut off".into())
    }

    fn settled(attempts: &[Result<LinkMeasurement, String>]) -> SettledLink {
        let Verdict::Settled(link) = settle(attempts) else { panic!("{:?}", settle(attempts)) };
        *link
    }

    #[test]
    fn two_that_agree_are_believed() {
        let link = settled(&[measured(900.0, 0.3), measured(920.0, 0.5)]);
        assert!((link.quality.bandwidth.0 - BytesPerSecond::from_mbit(910.0).0).abs() < 1.0);
        assert_eq!((link.quality.one_way_latency, link.round_trip_p99), (Millis(0.2), Millis(1.5)));
        assert_eq!(link.measurements, 2);
    }

    // Field case 28.
    #[test]
    fn a_first_measurement_through_a_cold_path_does_not_decide() {
        for cold in [measured(100.0, 0.3), measured(900.0, 40.0), lost()] {
            assert_eq!(settle(std::slice::from_ref(&cold)), Verdict::Again);
            assert_eq!(settle(&[cold.clone(), measured(900.0, 0.3)]), Verdict::Again);
            let link = settled(&[cold, measured(900.0, 0.3), measured(900.0, 0.3)]);
            assert_eq!(link.quality.bandwidth, BytesPerSecond::from_mbit(900.0));
            assert_eq!(link.round_trip, Millis(0.3));
        }
    }

    #[test]
    fn of_three_that_differ_the_middle_counts() {
        let link = settled(&[measured(100.0, 1.0), measured(400.0, 1.0), measured(200.0, 1.0)]);
        assert_eq!(link.quality.bandwidth, BytesPerSecond::from_mbit(200.0));
        assert_eq!(link.measurements, 3);
    }

    #[test]
    fn streams_that_were_not_steady_agree_within_their_spread_and_no_further() {
        let unsteady = |mbit| measured(mbit, 0.3).map(|of| LinkMeasurement { bandwidth_spread: 2.0, ..of });
        assert_eq!(settled(&[unsteady(4000.0), unsteady(5000.0)]).measurements, 2);
        assert_eq!(settle(&[unsteady(4000.0), unsteady(8000.0)]), Verdict::Again);
    }

    #[test]
    fn a_link_that_is_lost_again_and_again_fails_with_the_reason() {
        assert_eq!(settle(&[lost()]), Verdict::Again);
        assert_eq!(settle(&[lost(), lost()]), Verdict::Failed("cut off".into()));
        let Verdict::Failed(reason) = settle(&[lost(), measured(900.0, 0.3), lost()]) else { panic!() };
        assert!(reason.contains("only one") && reason.contains("cut off"), "{reason}");
    }

    #[test]
    fn a_link_that_varies_is_settled_by_two_if_the_third_was_lost() {
        let link = settled(&[measured(100.0, 1.0), measured(400.0, 1.0), lost()]);
        assert_eq!(link.quality.bandwidth, BytesPerSecond::from_mbit(250.0));
    }
}
