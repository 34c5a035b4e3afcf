//! What a device's profile is off by while it serves. A profile is measured with nothing else going on; a running stage
//! shares its host with other stages, idles between its steps, and heats up.
//!
//! # The estimator
//!
//! For each phase and bucket of rows one ratio of observed to predicted time is kept, starting at 1. Every report of a stage, a
//! few times a second, gives each bucket it has steps in one sample: the mean time of those steps over what the profile says for
//! a step of their mean rows, depth and idle time. Depths are pooled, since the prediction has taken them into account.
//!
//! - A sample that is no number, or not above zero, is ignored.
//! - A sample is first brought within a factor of [`MOST_SURPRISE`] of the ratio, so that one cold or disturbed step
//!   among few does not count for more than its direction.
//! - The ratio then moves towards it, in logarithms, by a share that grows with the steps behind the sample and is
//!   [`MOST_SHARE`] at most. Old samples thus fade exponentially, and **one sample changes a ratio by a factor of at most
//!   `MOST_SURPRISE ^ MOST_SHARE`, about 1.11**.
//! - It stays between 1 / [`LIMIT`] and [`LIMIT`]: beyond, the device must be profiled anew rather than corrected.
//! - It is used once [`ENOUGH_STEPS`] steps were seen; a bucket without enough takes that of the nearest one of its phase.

use crate::{DeviceProfile, Millis, Phase, ProcessorProfile, StepBucket, StepTotals, Surface};

/// The largest factor between a sample and the ratio that is believed.
const MOST_SURPRISE: f64 = 1.5;

/// The largest share of the way to a sample that a ratio goes.
const MOST_SHARE: f64 = 0.25;

/// Ratios lie between this and its inverse.
const LIMIT: f64 = 4.0;

/// Steps before a ratio is used.
const ENOUGH_STEPS: u64 = 50;

/// Steps in a sample that take a ratio 1 − 1/e of [`MOST_SHARE`] of the way: about what a stage does in a second.
const STEPS_OF_A_SAMPLE: f64 = 32.0;

/// Buckets by rows of each phase.
const ROWS: usize = 7;

#[derive(Debug, Clone, Copy, PartialEq)]
struct Ratio {
    value: f64,
    steps: u64,
}

/// Ratios of observed to predicted times of one stage's device.
#[derive(Debug, Clone, PartialEq)]
pub struct Correction {
    decode: [Ratio; ROWS],
    prefill: [Ratio; ROWS],
}

impl Default for Correction {
    fn default() -> Self {
        let none = [Ratio { value: 1.0, steps: 0 }; ROWS];
        Self { decode: none, prefill: none }
    }
}

impl Correction {
    /// Takes note of steps, with what the profile says that their mean takes.
    pub fn observe(&mut self, bucket: StepBucket, seen: StepTotals, predicted: Millis) {
        let sample = seen.time.0 / seen.steps as f64 / predicted.0;
        if seen.steps == 0 || !sample.is_finite() || sample <= 0.0 {
            return;
        }
        let ratio = &mut self.of_mut(bucket.phase)[bucket.rows_place()];
        let surprise = (sample / ratio.value).clamp(1.0 / MOST_SURPRISE, MOST_SURPRISE);
        let share = MOST_SHARE * (1.0 - (-(seen.steps as f64) / STEPS_OF_A_SAMPLE).exp());
        ratio.value = (ratio.value * surprise.powf(share)).clamp(1.0 / LIMIT, LIMIT);
        ratio.steps = ratio.steps.saturating_add(seen.steps);
    }

    /// What times of a phase with so many rows are to be multiplied with; none before enough was seen of the phase.
    pub fn ratio(&self, phase: Phase, rows: u32) -> Option<f64> {
        let place = StepBucket::of(phase, rows, 0).rows_place();
        let known = self.of(phase).iter().enumerate().filter(|(_, ratio)| ratio.steps >= ENOUGH_STEPS);
        known.min_by_key(|(other, _)| other.abs_diff(place)).map(|(_, ratio)| ratio.value)
    }

    /// The profile as it seems to be while the device serves. A call's fixed cost and the head are decode's more than
    /// prefill's, and follow it; embedding look-ups, hops and idle gaps are left as they are.
    pub fn corrected(&self, profile: &DeviceProfile) -> DeviceProfile {
        let correct = |processor: &ProcessorProfile| {
            let scaled = |surface: &Surface, phase| {
                surface.scaled_by_rows(|rows| self.ratio(phase, rows).unwrap_or(1.0))
            };
            let mut corrected = processor.clone();
            for (block, before) in corrected.blocks.iter_mut().zip(&processor.blocks) {
                block.decode = scaled(&before.decode, Phase::Decode);
                block.prefill = scaled(&before.prefill, Phase::Prefill);
            }
            corrected.head = scaled(&processor.head, Phase::Decode);
            corrected.call = processor.call.as_ref().map(|call| scaled(call, Phase::Decode));
            corrected
        };
        DeviceProfile {
            gpu: profile.gpu.as_ref().map(correct),
            cpu: profile.cpu.as_ref().map(correct),
            ..profile.clone()
        }
    }

    fn of(&self, phase: Phase) -> &[Ratio; ROWS] {
        match phase {
            Phase::Decode => &self.decode,
            Phase::Prefill => &self.prefill,
        }
    }

    fn of_mut(&mut self, phase: Phase) -> &mut [Ratio; ROWS] {
        match phase {
            Phase::Decode => &mut self.decode,
            Phase::Prefill => &mut self.prefill,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Attention, BlockCurves, BlockKind, DeviceId, FeedForward, StageBatch, StageParts};

    fn seen(steps: u64, ms_each: f64) -> StepTotals {
        StepTotals { steps, time: Millis(ms_each * steps as f64), ..Default::default() }
    }

    const ONE_ROW: fn() -> StepBucket = || StepBucket::of(Phase::Decode, 1, 0);

    fn raw(correction: &Correction) -> f64 {
        correction.decode[0].value
    }

    #[test]
    fn nothing_is_corrected_before_enough_was_seen() {
        let mut correction = Correction::default();
        correction.observe(ONE_ROW(), seen(ENOUGH_STEPS - 1, 2.0), Millis(1.0));
        assert_eq!(correction.ratio(Phase::Decode, 1), None);
        correction.observe(ONE_ROW(), seen(1, 2.0), Millis(1.0));
        assert!(correction.ratio(Phase::Decode, 1).unwrap() > 1.0);
        assert_eq!(correction.ratio(Phase::Decode, 32), correction.ratio(Phase::Decode, 1), "the nearest");
        assert_eq!(correction.ratio(Phase::Prefill, 1), None);
    }

    #[test]
    fn a_corrected_profile_predicts_what_was_seen() {
        let kind = BlockKind { attention: Attention::Full, feed_forward: FeedForward::Dense };
        let flat = |time| Surface::flat(vec![1, 8], vec![Millis(time), Millis(2.0 * time)]).unwrap();
        let processor = ProcessorProfile {
            blocks: vec![BlockCurves { kind, decode: flat(1.0), prefill: flat(3.0) }],
            head: flat(0.5),
            call: Some(flat(0.25)),
        };
        let profile = DeviceProfile {
            device: DeviceId("desk".to_owned()),
            model: "m".to_owned(),
            runtime: "r".to_owned(),
            gpu: None,
            cpu: Some(processor),
            hop_overhead: Millis(0.5),
            buffers: Default::default(),
            embedding: None,
            cold_call: None,
            memory: None,
        };
        let parts = StageParts::split(&[kind; 4], 0);
        let batch =
            StageBatch { phase: Phase::Decode, rows: 1.0, depth: 0.0, outputs: 1.0, idle: Millis(0.0) };
        let predicted = profile.compute_time(&parts, &batch).unwrap();
        let mut correction = Correction::default();
        for _ in 0..100 {
            correction.observe(ONE_ROW(), seen(100, predicted.0 * 1.75), predicted);
        }
        let corrected = correction.corrected(&profile);
        let after = corrected.compute_time(&parts, &batch).unwrap().0 / predicted.0;
        assert!((after - 1.75).abs() < 1e-3, "{after}");
        let prefill = StageBatch { phase: Phase::Prefill, outputs: 0.0, ..batch };
        let block = |profile: &DeviceProfile| profile.cpu.as_ref().unwrap().blocks[0].prefill.clone();
        assert_eq!(block(&corrected), block(&profile), "no prefill was seen");
        assert!(corrected.compute_time(&parts, &prefill).is_ok());
    }

    fn any_sample() -> impl Strategy<Value = (u64, f64)> {
        let times = prop_oneof![
            8 => 1e-3..1e3,
            1 => Just(f64::NAN),
            1 => Just(f64::INFINITY),
            1 => Just(-1.0),
            1 => Just(0.0),
        ];
        (0..500_u64, times)
    }

    proptest! {
        #[test]
        fn a_ratio_stays_within_its_limits(samples in proptest::collection::vec(any_sample(), 0..200)) {
            let mut correction = Correction::default();
            for (steps, ms) in samples {
                correction.observe(ONE_ROW(), seen(steps, ms), Millis(1.0));
                prop_assert!((1.0 / LIMIT..=LIMIT).contains(&raw(&correction)));
            }
        }

        #[test]
        fn a_constant_ratio_is_found(truth in 1.0 / LIMIT..LIMIT, steps in 5..500_u64, predicted in 0.01..1e3) {
            let mut correction = Correction::default();
            for _ in 0..400 {
                correction.observe(ONE_ROW(), seen(steps, truth * predicted), Millis(predicted));
            }
            let found = correction.ratio(Phase::Decode, 1).unwrap();
            prop_assert!((found / truth - 1.0).abs() < 0.01, "{found} for {truth}");
        }

        #[test]
        fn one_sample_moves_a_ratio_by_little(start in 0.3..3.0, steps in 1..10_000_u64, outlier in 1e-6..1e6) {
            let mut correction = Correction::default();
            for _ in 0..100 {
                correction.observe(ONE_ROW(), seen(100, start), Millis(1.0));
            }
            let before = raw(&correction);
            correction.observe(ONE_ROW(), seen(steps, outlier), Millis(1.0));
            let moved = (raw(&correction) / before).ln().abs();
            prop_assert!(moved <= MOST_SURPRISE.ln() * MOST_SHARE + 1e-9, "{moved}");
        }

        #[test]
        fn what_is_no_time_is_ignored(
            steps in 0..100_u64,
            bad in prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(0.0), -1e6..0.0],
            in_prediction in any::<bool>(),
        ) {
            let mut correction = Correction::default();
            correction.observe(ONE_ROW(), seen(100, 1.5), Millis(1.0));
            let before = correction.clone();
            let (ms, predicted) = if in_prediction { (1.0, bad) } else { (bad, 1.0) };
            // An infinite prediction is not one that any time falls short of.
            correction.observe(ONE_ROW(), seen(steps, ms), Millis(predicted));
            prop_assert_eq!(correction, before);
        }
    }
}
