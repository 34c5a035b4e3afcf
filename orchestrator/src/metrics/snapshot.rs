//! What others say of themselves at the moment of a scrape: the engine and the stages.

use std::fmt;

use cluster::{ForetoldHops, ObservedSteps, StageObservation, StepBucket, hop_time};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use protocol::v1;

/// Values of one scrape.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// Whether a chat would be answered.
    pub(crate) is_ready: bool,
    /// Requests that are open here.
    pub(crate) open_requests: usize,
    /// What the engine says, if it answered in time.
    pub(crate) engine: Option<v1::EngineStatusReply>,
    /// What the agent sees of the stages.
    pub(crate) stages: Vec<StageObservation>,
    /// What the links foretell, where they are watched.
    pub(crate) hops: Option<ForetoldHops>,
}

/// A metric that is told of, with a value for each of some labels.
struct Told<'a> {
    name: &'a str,
    help: &'a str,
    unit: Option<Unit>,
}

/// Labels and the value that goes with them.
type Samples<L, V> = Vec<(L, V)>;

impl Told<'_> {
    fn gauges<L: EncodeLabelSet, V: EncodeGaugeValue>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        samples: Samples<L, V>,
    ) -> fmt::Result {
        if samples.is_empty() {
            return Ok(());
        }
        let unit = self.unit.as_ref();
        let mut metric = encoder.encode_descriptor(self.name, self.help, unit, MetricType::Gauge)?;
        samples.iter().try_for_each(|(labels, value)| metric.encode_family(labels)?.encode_gauge(value))
    }

    fn counters<L: EncodeLabelSet, V: EncodeCounterValue>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        samples: Samples<L, V>,
    ) -> fmt::Result {
        if samples.is_empty() {
            return Ok(());
        }
        let unit = self.unit.as_ref();
        let mut metric = encoder.encode_descriptor(self.name, self.help, unit, MetricType::Counter)?;
        samples.iter().try_for_each(|(labels, value)| {
            metric.encode_family(labels)?.encode_counter::<NoLabelSet, V, u64>(value, None)
        })
    }
}

const fn told<'a>(name: &'a str, help: &'a str) -> Told<'a> {
    Told { name, help, unit: None }
}

const fn seconds<'a>(name: &'a str, help: &'a str) -> Told<'a> {
    Told { name, help, unit: Some(Unit::Seconds) }
}

/// No labels.
const NONE: [(&str, &str); 0] = [];

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        told("ready", "Whether a chat would be answered now")
            .gauges(encoder, vec![(NONE, u32::from(self.is_ready))])?;
        told("open_requests", "Requests that generate or wait, as counted here")
            .gauges(encoder, vec![(NONE, self.open_requests)])?;
        if let Some(engine) = &self.engine {
            encode_engine(encoder, engine)?;
        }
        self.encode_steps(encoder)?;
        self.encode_stages(encoder)
    }
}

fn encode_engine(encoder: &mut DescriptorEncoder<'_>, engine: &v1::EngineStatusReply) -> fmt::Result {
    for (name, help, value) in [
        ("slots", "Requests that can generate at once", engine.slots),
        ("active_slots", "Requests that generate now", engine.active),
        ("queued_requests", "Requests that wait for a slot", engine.queued),
        ("queue_limit", "Requests that may wait for a slot", engine.queue_limit),
    ] {
        told(name, help).gauges(encoder, vec![(NONE, value)])?;
    }
    for (name, help, value) in [
        ("engine_generated_tokens", "Tokens drawn by the master since it began", engine.generated_tokens),
        ("engine_prefilled_tokens", "Prompt tokens computed since the master began", engine.prefilled_tokens),
    ] {
        told(name, help).counters(encoder, vec![(NONE, value)])?;
    }
    Ok(())
}

impl Snapshot {
    /// Of every bucket of every stage.
    fn of_steps<V>(
        &self,
        value: impl Fn(&ObservedSteps) -> Option<V>,
    ) -> Samples<[(&'static str, String); 4], V> {
        let steps = self.stages.iter().flat_map(|stage| stage.steps.iter().map(move |steps| (stage, steps)));
        steps.filter_map(|(stage, steps)| Some((step_labels(stage, steps.bucket), value(steps)?))).collect()
    }

    fn of_stages<V>(
        &self,
        value: impl Fn(&StageObservation) -> V,
    ) -> Samples<[(&'static str, String); 1], V> {
        self.stages.iter().map(|stage| ([stage_label(stage)], value(stage))).collect()
    }

    fn encode_steps(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        told("stage_steps", "Steps of a stage, by phase, rows and depth of the cache")
            .counters(encoder, self.of_steps(|steps| Some(steps.totals.steps)))?;
        seconds("stage_compute", "Time that a stage computed in these steps")
            .counters(encoder, self.of_steps(|steps| Some(steps.totals.time.0 / 1e3)))?;
        seconds("stage_predicted_compute", "Time that these steps should have taken by the device's profile")
            .counters(encoder, self.of_steps(|steps| steps.predicted.map(|time| time.0 / 1e3)))?;
        told(
            "stage_correction_ratio",
            "What the profile's times are multiplied with to get those seen of late",
        )
        .gauges(encoder, self.corrections())
    }

    fn corrections(&self) -> Samples<[(&'static str, String); 3], f64> {
        let mut samples = Vec::new();
        for stage in &self.stages {
            let mut seen: Vec<StepBucket> = stage.steps.iter().map(|steps| steps.bucket).collect();
            seen.dedup_by_key(|bucket| (bucket.phase, bucket.rows()));
            for bucket in seen {
                if let Some(ratio) = stage.correction.ratio(bucket.phase, bucket.rows().0) {
                    let [stage, phase, rows, _] = step_labels(stage, bucket);
                    samples.push(([stage, phase, rows], ratio));
                }
            }
        }
        samples
    }

    fn encode_stages(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        Told {
            name: "stage_resident_memory",
            help: "Resident memory of a stage's process",
            unit: Some(Unit::Bytes),
        }
        .gauges(encoder, self.of_stages(|stage| stage.resident.0))?;
        told("stage_visits", "Decode frames that a stage has passed on")
            .counters(encoder, self.of_stages(|stage| stage.visits.count))?;
        seconds("stage_visit", "Time between such a frame's arrival and the departure of its results")
            .counters(encoder, self.of_stages(|stage| stage.visits.time.0 / 1e3))?;
        let Some(master) = self.stages.last() else { return Ok(()) };
        told("round_trips", "Decode steps that came back to the master")
            .counters(encoder, vec![(NONE, master.round_trips.count)])?;
        seconds("round_trip", "Time between such a step's departure and the drawing of its tokens")
            .counters(encoder, vec![(NONE, master.round_trips.time.0 / 1e3)])?;
        let hops = hop_time(&self.stages).map(|time| (NONE, time.0 / 1e3));
        seconds("step_hops", "Mean time that a decode step spends between stages, the way back included")
            .gauges(encoder, hops.into_iter().collect())?;
        self.encode_foretold(encoder)
    }

    fn encode_foretold(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(ForetoldHops { observed, predicted }) = self.hops else { return Ok(()) };
        seconds("step_hops_recent", "The same, of the decode steps last looked at")
            .gauges(encoder, vec![(NONE, observed.0 / 1e3)])?;
        seconds("step_hops_predicted", "What the links foretell for these, by their last measurement")
            .gauges(encoder, vec![(NONE, predicted.0 / 1e3)])
    }
}

fn stage_label(stage: &StageObservation) -> (&'static str, String) {
    ("stage", stage.stage.0.to_string())
}

fn step_labels(stage: &StageObservation, bucket: StepBucket) -> [(&'static str, String); 4] {
    let range = |(least, most): (u32, Option<u32>)| match most {
        Some(most) if most == least => least.to_string(),
        Some(most) => format!("{least}-{most}"),
        None => format!("{least}+"),
    };
    [
        stage_label(stage),
        ("phase", bucket.phase.to_string()),
        ("rows", range(bucket.rows())),
        ("depth", range(bucket.depths())),
    ]
}
