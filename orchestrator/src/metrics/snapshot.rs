//! What others say of themselves at the moment of a scrape: the queue, the engines and the stages.

use std::fmt;

use cluster::{DemandLevel, ForetoldHops, ObservedSteps, StageObservation, StepBucket, Tally, hop_time};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use protocol::v1;

use crate::desk::Load;

/// Values of one scrape.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// Whether a chat would be answered.
    pub(crate) is_ready: bool,
    /// Requests that are open here.
    pub(crate) open_requests: usize,
    /// Requests that wait for a slot.
    pub(crate) queued: usize,
    /// Requests that may.
    pub(crate) queue_limit: usize,
    /// Requests that wait for a slot to be decoded in, with their first tokens.
    pub(crate) queued_to_decode: usize,
    /// What was decided about it, and how often.
    pub(crate) decisions: Vec<(&'static str, u64)>,
    /// What is asked for of late.
    pub(crate) demand: DemandLevel,
    /// Of each replica.
    pub(crate) replicas: Vec<ReplicaSnapshot>,
}

/// Values of one replica.
#[derive(Debug)]
pub(crate) struct ReplicaSnapshot {
    /// Under which it is known.
    pub(crate) number: usize,
    /// Whether it would take a request.
    pub(crate) is_ready: bool,
    /// What it is used for, and what it does.
    pub(crate) load: Load,
    /// What its engine says, if it answered in time.
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
        told("queued_requests", "Requests that wait for a slot")
            .gauges(encoder, vec![(NONE, self.queued)])?;
        told("queue_limit", "Requests that may wait for a slot")
            .gauges(encoder, vec![(NONE, self.queue_limit)])?;
        told(
            "decode_queued_requests",
            "Requests with their first token that wait for another replica's slot",
        )
        .gauges(encoder, vec![(NONE, self.queued_to_decode)])?;
        self.encode_demand(encoder)?;
        self.encode_replicas(encoder)?;
        self.encode_engines(encoder)?;
        self.encode_steps(encoder)?;
        self.encode_stages(encoder)
    }
}

impl Snapshot {
    fn encode_demand(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let DemandLevel { requests_per_second, prompt_tokens, answer_tokens } = self.demand;
        let of = [
            ("demand_requests_per_second", "Requests that came in the last minutes", requests_per_second),
            ("demand_prompt_tokens", "Mean length of their prompts", prompt_tokens),
            ("demand_answer_tokens", "Mean length of the answers of the last minutes", answer_tokens),
        ];
        let decisions = self.decisions.iter().map(|(what, times)| ([("decision", *what)], *times));
        told("adaptations", "Decisions about what is asked for, by what they were")
            .counters(encoder, decisions.collect())?;
        of.into_iter()
            .try_for_each(|(name, help, value)| told(name, help).gauges(encoder, vec![(NONE, value)]))
    }

    /// Of every replica that has the value.
    fn of_replicas<V>(
        &self,
        value: impl Fn(&ReplicaSnapshot) -> Option<V>,
    ) -> Samples<[(&'static str, String); 1], V> {
        let sample = |replica: &ReplicaSnapshot| Some(([replica_label(replica.number)], value(replica)?));
        self.replicas.iter().filter_map(sample).collect()
    }

    fn stages(&self) -> impl Iterator<Item = (usize, &StageObservation)> {
        self.replicas
            .iter()
            .flat_map(|replica| replica.stages.iter().map(move |stage| (replica.number, stage)))
    }

    /// Of every bucket of every stage.
    fn of_steps<V>(
        &self,
        value: impl Fn(&ObservedSteps) -> Option<V>,
    ) -> Samples<[(&'static str, String); 5], V> {
        let steps = self
            .stages()
            .flat_map(|(replica, stage)| stage.steps.iter().map(move |steps| (replica, stage, steps)));
        let sample = |(replica, stage, steps): (usize, &StageObservation, &ObservedSteps)| {
            Some((step_labels(replica, stage, steps.bucket), value(steps)?))
        };
        steps.filter_map(sample).collect()
    }

    fn of_stages<V>(
        &self,
        value: impl Fn(&StageObservation) -> V,
    ) -> Samples<[(&'static str, String); 2], V> {
        let stages = self.stages();
        stages.map(|(number, stage)| ([stage_label(stage), replica_label(number)], value(stage))).collect()
    }

    fn encode_replicas(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        told("replica_ready", "Whether a replica would take a request now")
            .gauges(encoder, self.of_replicas(|replica| Some(u32::from(replica.is_ready))))?;
        told("replica_queued_requests", "Requests that wait for a slot of a replica, of those in the queue")
            .gauges(encoder, self.of_replicas(|replica| Some(replica.load.waiting)))?;
        told("replica_role", "What a replica is used for; 1 for its role").gauges(encoder, self.roles())
    }

    fn roles(&self) -> Samples<[(&'static str, String); 2], u32> {
        let sample = |replica: &ReplicaSnapshot| {
            ([("role", replica.load.role.to_string()), replica_label(replica.number)], 1)
        };
        self.replicas.iter().map(sample).collect()
    }

    fn encode_engines(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let of_engines = |value: fn(&v1::EngineStatusReply) -> u32| {
            self.of_replicas(|replica| replica.engine.as_ref().map(value))
        };
        told("slots", "Requests that a replica can generate at once")
            .gauges(encoder, of_engines(|engine| engine.slots))?;
        told("active_slots", "Requests that a replica generates now")
            .gauges(encoder, of_engines(|engine| engine.active))?;
        told("held_slots", "Slots that a replica keeps for another one to take over")
            .gauges(encoder, of_engines(|engine| engine.held))?;
        told(
            "engine_queued_requests",
            "Requests that a master holds until one that left gives its slot back",
        )
        .gauges(encoder, of_engines(|engine| engine.queued))?;
        let counted = |value: fn(&v1::EngineStatusReply) -> u64| {
            self.of_replicas(|replica| replica.engine.as_ref().map(value))
        };
        told("engine_generated_tokens", "Tokens drawn by a master since it began")
            .counters(encoder, counted(|engine| engine.generated_tokens))?;
        told("engine_prefilled_tokens", "Prompt tokens computed since a master began")
            .counters(encoder, counted(|engine| engine.prefilled_tokens))
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

    fn corrections(&self) -> Samples<[(&'static str, String); 4], f64> {
        let mut samples = Vec::new();
        for (replica, stage) in self.stages() {
            let mut seen: Vec<StepBucket> = stage.steps.iter().map(|steps| steps.bucket).collect();
            seen.dedup_by_key(|bucket| (bucket.phase, bucket.rows()));
            for bucket in seen {
                if let Some(ratio) = stage.correction.ratio(bucket.phase, bucket.rows().0) {
                    let [stage, phase, rows, _, replica] = step_labels(replica, stage, bucket);
                    samples.push(([stage, phase, rows, replica], ratio));
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
        let of_masters = |value: fn(Tally) -> f64| {
            self.of_replicas(|replica| replica.stages.last().map(|master| value(master.round_trips)))
        };
        let count = self.of_replicas(|replica| replica.stages.last().map(|master| master.round_trips.count));
        told("round_trips", "Decode steps that came back to the master").counters(encoder, count)?;
        seconds("round_trip", "Time between such a step's departure and the drawing of its tokens")
            .counters(encoder, of_masters(|trips| trips.time.0 / 1e3))?;
        seconds("step_hops", "Mean time that a decode step spends between stages, the way back included")
            .gauges(
                encoder,
                self.of_replicas(|replica| hop_time(&replica.stages).map(|time| time.0 / 1e3)),
            )?;
        self.encode_foretold(encoder)
    }

    fn encode_foretold(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        seconds("step_hops_recent", "The same, of the decode steps last looked at")
            .gauges(encoder, self.of_replicas(|replica| replica.hops.map(|hops| hops.observed.0 / 1e3)))?;
        seconds("step_hops_predicted", "What the links foretell for these, by their last measurement")
            .gauges(encoder, self.of_replicas(|replica| replica.hops.map(|hops| hops.predicted.0 / 1e3)))
    }
}

fn replica_label(number: usize) -> (&'static str, String) {
    ("replica", number.to_string())
}

fn stage_label(stage: &StageObservation) -> (&'static str, String) {
    ("stage", stage.stage.0.to_string())
}

fn step_labels(replica: usize, stage: &StageObservation, bucket: StepBucket) -> [(&'static str, String); 5] {
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
        replica_label(replica),
    ]
}
