//! Compares what a stage's steps take with what its device's profile says. No I/O, no clock.

use std::collections::BTreeMap;

use cluster::{
    BlockKind, Bytes, Correction, DeviceProfile, Millis, ModelShape, ObservedSteps, Phase, StageBatch,
    StageIndex, StageObservation, StageParts, StepBucket, StepTotals,
};
use protocol::node::StageOrder;
use protocol::observation;
use protocol::v1::StatusReply;

/// A stage to be observed.
pub(super) struct Observed<'a> {
    pub(super) shape: &'a ModelShape,
    pub(super) order: &'a StageOrder,
    /// Of the devices that it may run on.
    pub(super) profiles: Vec<&'a DeviceProfile>,
}

/// What is known of one stage's steps.
pub(super) struct Observer {
    stage: StageIndex,
    predictor: Option<Predictor>,
    /// What the stage's present process has said, and what should have been.
    seen: BTreeMap<StepBucket, (StepTotals, Option<Millis>)>,
    correction: Correction,
}

struct Predictor {
    profile: DeviceProfile,
    parts: StageParts,
}

impl Observer {
    pub(super) fn new(observed: &Observed<'_>) -> Self {
        Self {
            stage: StageIndex(observed.order.stage),
            predictor: Predictor::new(observed),
            seen: BTreeMap::new(),
            correction: Correction::default(),
        }
    }

    /// The worker is another, and counts from nothing.
    pub(super) fn restart(&mut self) {
        self.seen.clear();
    }

    /// Takes in what the worker says.
    pub(super) fn take(&mut self, status: &StatusReply) -> StageObservation {
        for (bucket, totals) in observation::steps(&status.step_times) {
            let (before, predicted) = self.seen.get(&bucket).copied().unwrap_or_default();
            let new = totals.since(before);
            let each = new
                .mean_batch(bucket.phase)
                .and_then(|batch| self.predictor.as_ref().and_then(|predictor| predictor.time(&batch)));
            if let Some(each) = each {
                self.correction.observe(bucket, new, each);
            }
            let on_top = each.map(|each| each.0 * new.steps as f64);
            let predicted = match (predicted, on_top) {
                (Some(before), on_top) => Some(Millis(before.0 + on_top.unwrap_or(0.0))),
                (None, on_top) => on_top.map(Millis),
            };
            self.seen.insert(bucket, (totals, predicted));
        }
        let steps = self.seen.iter();
        StageObservation {
            stage: self.stage,
            resident: Bytes(status.memory.as_ref().map_or(0, |memory| memory.resident)),
            steps: steps
                .map(|(&bucket, &(totals, predicted))| ObservedSteps { bucket, totals, predicted })
                .collect(),
            visits: observation::tally(status.visits.as_ref()),
            round_trips: observation::tally(status.round_trips.as_ref()),
            correction: self.correction.clone(),
        }
    }
}

impl Predictor {
    /// The first profile that can tell the times of the stage.
    fn new(observed: &Observed<'_>) -> Option<Self> {
        let StageOrder { stage, n_stages, layers, gpu_layers, .. } = *observed.order;
        let range = layers.start() as usize..layers.end() as usize;
        let kinds: Vec<BlockKind> =
            observed.shape.blocks.get(range)?.iter().map(|block| block.kind).collect();
        let (embeds, in_chain) = (stage == 0, n_stages > 1);
        let parts = StageParts { embeds, in_chain, ..StageParts::split(&kinds, gpu_layers) };
        let outputs = if stage + 1 == n_stages { 1.0 } else { 0.0 };
        let batch =
            StageBatch { phase: Phase::Decode, rows: 1.0, depth: 0.0, outputs, idle: Millis::default() };
        let profile =
            observed.profiles.iter().find(|profile| profile.compute_time(&parts, &batch).is_ok())?;
        Some(Self { profile: (*profile).clone(), parts })
    }

    fn time(&self, batch: &StageBatch) -> Option<Millis> {
        self.profile.compute_time(&self.parts, batch).ok()
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Attention, BlockCurves, DeviceId, FeedForward, ProcessorProfile, Surface};
    use protocol::v1;

    use super::*;

    const KIND: BlockKind = BlockKind { attention: Attention::Full, feed_forward: FeedForward::Dense };

    /// Two blocks of 1 ms on the CPU.
    fn observer() -> Observer {
        let flat = |ms| Surface::flat(vec![1], vec![Millis(ms)]).unwrap();
        let curves = BlockCurves { kind: KIND, decode: flat(1.0), prefill: flat(10.0) };
        let profile = DeviceProfile {
            device: DeviceId("desk".to_owned()),
            model: "m".to_owned(),
            runtime: "r".to_owned(),
            gpu: None,
            cpu: Some(ProcessorProfile { blocks: vec![curves], head: flat(1.0), call: None }),
            hop_overhead: Millis(0.1),
            buffers: Default::default(),
            embedding: None,
            cold_call: None,
            memory: None,
        };
        Observer {
            stage: StageIndex(1),
            predictor: Some(Predictor { profile, parts: StageParts::split(&[KIND; 2], 0) }),
            seen: BTreeMap::new(),
            correction: Correction::default(),
        }
    }

    fn status(steps: u64, ms_each: f64) -> StatusReply {
        let time = Millis(ms_each * steps as f64);
        let totals = StepTotals { steps, rows: steps, time, ..Default::default() };
        let bucket = StepBucket::of(Phase::Decode, 1, 0);
        StatusReply {
            step_times: vec![v1::StepTimes::from((bucket, totals))],
            memory: Some(v1::MemoryReport { resident: 77, ..Default::default() }),
            ..Default::default()
        }
    }

    #[test]
    fn steps_are_set_against_what_the_profile_says() {
        let mut observer = observer();
        observer.take(&status(10, 3.0));
        let seen = observer.take(&status(200, 3.0));
        assert_eq!((seen.stage, seen.resident), (StageIndex(1), Bytes(77)));
        let [steps] = &seen.steps[..] else { panic!("{seen:?}") };
        assert_eq!((steps.totals.steps, steps.predicted), (200, Some(Millis(400.0))));
        let ratio = seen.correction.ratio(Phase::Decode, 1).unwrap();
        assert!(ratio > 1.1 && ratio <= 1.5, "{ratio}");
    }

    #[test]
    fn a_new_process_counts_from_nothing_and_the_correction_stays() {
        let mut observer = observer();
        let before = observer.take(&status(200, 3.0)).correction;
        observer.restart();
        let seen = observer.take(&status(0, 3.0));
        assert!(seen.steps.is_empty());
        assert_eq!(seen.correction, before);
        let seen = observer.take(&status(5, 3.0));
        assert_eq!((seen.steps[0].totals.steps, seen.steps[0].predicted), (5, Some(Millis(10.0))));
    }

    #[test]
    fn without_a_profile_steps_are_told_and_nothing_is_corrected() {
        let mut observer = Observer { predictor: None, ..observer() };
        let seen = observer.take(&status(200, 3.0));
        assert_eq!((seen.steps[0].totals.steps, seen.steps[0].predicted), (200, None));
        assert_eq!(seen.correction, Correction::default());
    }
}
