//! What a link is to be like: its goodput and its round trip.

use std::time::Duration;

use cluster::BytesPerSecond;

/// Bytes of a full frame as `tc` counts them: an Ethernet header and 1500 bytes of payload.
const FRAME: f64 = 1514.0;

/// What TCP carries in a full frame: 1500 bytes less the headers of IPv4 and TCP and TCP's time stamps.
const SEGMENT: f64 = 1448.0;

/// A link between two hosts, the same in both directions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkShape {
    /// What one TCP stream gets through, without headers (IPv4; over IPv6 it is 1.4 % less).
    pub goodput: BytesPerSecond,
    /// From sending a small message to receipt of its echo; half of it is spent in each direction.
    pub round_trip: Duration,
}

impl LinkShape {
    /// The LAN that E2LLM was measured on (`papers/e2llm.md`): Gigabit Ethernet through one switch.
    pub const E2LLM: Self = Self::new(920.0, Duration::from_micros(300));

    /// From the unit in which networks are sold.
    pub const fn new(megabits_per_second: f64, round_trip: Duration) -> Self {
        Self { goodput: BytesPerSecond::from_mbit(megabits_per_second), round_trip }
    }
}

/// The rate of frames, headers included, at which TCP gets `goodput` through.
pub(super) fn line_rate(goodput: BytesPerSecond) -> BytesPerSecond {
    BytesPerSecond(goodput.0 * FRAME / SEGMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_added_to_the_goodput() {
        let rate = line_rate(LinkShape::E2LLM.goodput).mbit();
        assert!((rate - 961.9).abs() < 0.1, "{rate}");
    }
}
