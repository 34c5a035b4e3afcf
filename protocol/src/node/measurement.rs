//! The messages of a link's measurement: what is asked for, each receipt, and the outcome.

use cluster::{BytesPerSecond, Millis};

use super::{Address, BadMessage, Peer};
use crate::listen::FrameSizes;
use crate::v1;

/// Rows of a prefill frame, the largest that is measured.
pub const PREFILL_ROWS: u32 = 512;

/// Widest hidden row that is measured; the widest models that we know of have 16384.
pub const MAX_N_EMBD: u32 = 16_384;

/// Sizes of frames in one measurement.
const MOST_SIZES: usize = 16;

/// Longest time that anything in a measurement can have taken: a day.
const LONGEST_MS: f64 = 86_400_000.0;

/// Message and window sizes of everything that probes: those of a stage of the widest model, whose window is as large as
/// HTTP/2 has room for in any event.
pub fn probe_sizes() -> FrameSizes {
    FrameSizes::for_rows(PREFILL_ROWS, MAX_N_EMBD)
}

/// A measurement that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkRequest {
    /// The far end.
    pub peer: Peer,
    /// Elements of a hidden row.
    pub n_embd: u32,
}

/// What one measurement of a link found.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkMeasurement {
    /// At which the peer was reached.
    pub address: Address,
    /// Of an empty frame and its receipt, the middle one.
    pub round_trip: Millis,
    /// All but one in a hundred took no longer.
    pub round_trip_p99: Millis,
    /// What one warm stream gets through.
    pub bandwidth: BytesPerSecond,
    /// How much the pieces that make up `bandwidth` differ: (largest − smallest) / median.
    pub bandwidth_spread: f64,
    /// Frames of some sizes, one at a time.
    pub frames: Vec<FrameTime>,
}

/// How long frames of one size took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrameTime {
    /// Their rows.
    pub rows: u32,
    /// From the send to the arrival of the last byte, the middle one.
    pub one_way: Millis,
    /// All but one in a hundred took no longer.
    pub one_way_p99: Millis,
}

/// What the far end says of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// Bytes of this and all earlier frames.
    pub bytes: u64,
    /// Microseconds since the first arrived, by the far end's clock.
    pub elapsed_us: u64,
}

impl LinkRequest {
    /// Checks a received request.
    pub fn check(request: v1::MeasureLinkRequest) -> Result<Self, BadMessage> {
        let n_embd = request.n_embd;
        if !(1..=MAX_N_EMBD).contains(&n_embd) {
            return Err(BadMessage::Number {
                what: "a measurement",
                field: "n_embd",
                got: f64::from(n_embd),
                wanted: "between 1 and 16384",
            });
        }
        Ok(Self { peer: Peer::check(request.peer)?, n_embd })
    }
}

impl From<LinkRequest> for v1::MeasureLinkRequest {
    fn from(LinkRequest { peer, n_embd }: LinkRequest) -> Self {
        Self { peer: Some(peer.into()), n_embd }
    }
}

impl Receipt {
    /// Checks the receipt of frame `number`, after which the far end has `bytes`; time does not run backwards.
    pub fn check(
        receipt: v1::ProbeReceipt,
        number: u64,
        bytes: u64,
        before: Option<Self>,
    ) -> Result<Self, BadMessage> {
        let bad = |reason| Err(BadMessage::Other { what: "a probe's receipt", reason });
        if receipt.number != number || receipt.bytes != bytes {
            return bad(format!(
                "it is for frame {} and {} bytes in all, but frame {number} made {bytes}",
                receipt.number, receipt.bytes
            ));
        }
        let elapsed_us = receipt.elapsed_us;
        if before.is_some_and(|before| elapsed_us < before.elapsed_us) || elapsed_us as f64 > LONGEST_MS * 1e3
        {
            return bad(format!("its time of {elapsed_us} µs cannot be"));
        }
        Ok(Self { bytes, elapsed_us })
    }
}

impl LinkMeasurement {
    /// Checks a received measurement.
    pub fn check(measured: v1::LinkMeasurement) -> Result<Self, BadMessage> {
        let got = measured.frames.len();
        if got > MOST_SIZES {
            return Err(BadMessage::TooMany { what: WHAT, field: "sizes of frames", got, limit: MOST_SIZES });
        }
        let frame = |frame: &v1::FrameTime| {
            Ok(FrameTime {
                rows: frame.rows,
                one_way: millis("a frame's median", frame.one_way_median_ms)?,
                one_way_p99: millis("a frame's 99th percentile", frame.one_way_p99_ms)?,
            })
        };
        Ok(Self {
            address: Address::parse(&measured.address)?,
            round_trip: millis("round_trip_median_ms", measured.round_trip_median_ms)?,
            round_trip_p99: millis("round_trip_p99_ms", measured.round_trip_p99_ms)?,
            bandwidth: BytesPerSecond(number(
                "bandwidth",
                measured.bandwidth,
                measured.bandwidth > 0.0,
                "above 0",
            )?),
            bandwidth_spread: number(
                "bandwidth_spread",
                measured.bandwidth_spread,
                measured.bandwidth_spread >= 0.0,
                "at least 0",
            )?,
            frames: measured.frames.iter().map(frame).collect::<Result<_, BadMessage>>()?,
        })
    }
}

const WHAT: &str = "a link's measurement";

fn millis(field: &'static str, got: f64) -> Result<Millis, BadMessage> {
    number(field, got, (0.0..=LONGEST_MS).contains(&got), "between 0 and a day").map(Millis)
}

fn number(field: &'static str, got: f64, good: bool, wanted: &'static str) -> Result<f64, BadMessage> {
    if good && got.is_finite() { Ok(got) } else { Err(BadMessage::Number { what: WHAT, field, got, wanted }) }
}

impl From<LinkMeasurement> for v1::LinkMeasurement {
    fn from(measured: LinkMeasurement) -> Self {
        let frame = |frame: &FrameTime| v1::FrameTime {
            rows: frame.rows,
            one_way_median_ms: frame.one_way.0,
            one_way_p99_ms: frame.one_way_p99.0,
        };
        Self {
            address: measured.address.to_string(),
            round_trip_median_ms: measured.round_trip.0,
            round_trip_p99_ms: measured.round_trip_p99.0,
            bandwidth: measured.bandwidth.0,
            bandwidth_spread: measured.bandwidth_spread,
            frames: measured.frames.iter().map(frame).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn measured() -> LinkMeasurement {
        LinkMeasurement {
            address: Address::parse("desk:1").unwrap(),
            round_trip: Millis(0.3),
            round_trip_p99: Millis(0.9),
            bandwidth: BytesPerSecond(1e8),
            bandwidth_spread: 0.02,
            frames: vec![FrameTime { rows: 1, one_way: Millis(0.2), one_way_p99: Millis(0.5) }],
        }
    }

    #[test]
    fn a_measurement_survives_the_wire() {
        assert_eq!(LinkMeasurement::check(measured().into()).unwrap(), measured());
    }

    #[test]
    fn numbers_that_no_link_has_are_refused() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            let wire = v1::LinkMeasurement { bandwidth: bad, ..measured().into() };
            assert!(LinkMeasurement::check(wire).unwrap_err().to_string().contains("bandwidth"), "{bad}");
        }
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e9] {
            let wire = v1::LinkMeasurement { round_trip_median_ms: bad, ..measured().into() };
            assert!(LinkMeasurement::check(wire).unwrap_err().to_string().contains("round_trip"), "{bad}");
        }
        for n_embd in [0, MAX_N_EMBD + 1] {
            assert!(LinkRequest::check(v1::MeasureLinkRequest { peer: None, n_embd }).is_err());
        }
    }

    #[test]
    fn receipts_come_in_order_and_their_time_does_not_run_backwards() {
        let wire = |number, bytes, elapsed_us| v1::ProbeReceipt { number, bytes, elapsed_us };
        let first = Receipt::check(wire(0, 10, 5), 0, 10, None).unwrap();
        assert!(Receipt::check(wire(1, 20, 5), 1, 20, Some(first)).is_ok());
        assert!(Receipt::check(wire(2, 20, 5), 1, 20, Some(first)).is_err());
        assert!(Receipt::check(wire(1, 21, 5), 1, 20, Some(first)).is_err());
        assert!(Receipt::check(wire(1, 20, 4), 1, 20, Some(first)).is_err());
        assert!(Receipt::check(wire(1, 20, u64::MAX), 1, 20, Some(first)).is_err());
    }

    proptest! {
        #[test]
        fn garbled_measurements_are_refused_or_make_sense(
            garble in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = v1::LinkMeasurement::from(measured()).encode_to_vec();
            for (at, byte) in garble {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(Ok(measured)) = v1::LinkMeasurement::decode(&bytes[..]).map(LinkMeasurement::check) {
                prop_assert!(measured.bandwidth.0 > 0.0 && measured.round_trip.0.is_finite());
            }
        }
    }
}
