//! What is to be planned, and what is wrong with it. Everything that comes from outside is checked here, once, and
//! every fault is reported; behind this door numbers are finite and positive.

use cluster::{Arrivals, Device, DeviceId, DeviceProfile, Lengths, Links, ModelShape, Spread, Workload};
use thiserror::Error;

/// A cluster, a model, what was measured, and what is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// The model.
    pub model: ModelShape,
    /// The devices that may be used.
    pub devices: Vec<Device>,
    /// One profile for each device.
    pub profiles: Vec<DeviceProfile>,
    /// Links between the devices' hosts.
    pub links: Links,
    /// What is asked for.
    pub workload: Workload,
}

/// One thing that makes a problem impossible to plan.
#[derive(Debug, Clone, PartialEq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum ProblemError {
    #[error("there are no devices to plan for: list at least one")]
    NoDevices,
    #[error("two devices are called {0}: give each a name of its own")]
    TwiceNamed(DeviceId),
    #[error("the model has no blocks")]
    NoBlocks,
    #[error("device {0} has no profile: measure it with `shoal profile`")]
    NoProfile(DeviceId),
    #[error("device {0} has more than one profile")]
    TwiceProfiled(DeviceId),
    #[error(
        "the profile of {device} is for model {found}, others are for {expected}: measure all devices with one model"
    )]
    MixedModels { device: DeviceId, expected: String, found: String },
    #[error(
        "the profile of {device} was measured with {found}, others with {expected}: measure all devices with one \
         version"
    )]
    MixedRuntimes { device: DeviceId, expected: String, found: String },
    #[error("the profile of {device} has no curve for {what}: measure it again with this model")]
    MissingCurve { device: DeviceId, what: &'static str },
    #[error("the profile of {device} has a hop overhead of {millis} ms: it must be finite and not negative")]
    BadOverhead { device: DeviceId, millis: f64 },
    #[error(
        "the link from {from} to {to} has {what}: measure it again, or leave the pair out if it cannot talk"
    )]
    BadLink { from: String, to: String, what: &'static str },
    #[error("there are {found} {what}: at most {most} can be planned")]
    TooMany { what: &'static str, found: u64, most: u64 },
    #[error("the workload's {what} is {value}: it must be {must}")]
    BadWorkload { what: &'static str, value: f64, must: &'static str },
    #[error("entry {index} of the trace {what}")]
    BadTrace { index: usize, what: &'static str },
    #[error("entry {index} of the trace has {tokens} tokens: a slot has room for {context}")]
    TraceTooLong { index: usize, tokens: u64, context: u32 },
}

/// What can be planned in bounded memory and time: more than any cluster in an office has, and what llama.cpp can run
/// (`LLAMA_MAX_LAYERS` in llama.cpp's `src/llama-hparams.h`, `LLAMA_MAX_SEQ` in `src/llama-cparams.h`).
const MOST_DEVICES: u64 = 2048;
const MOST_BLOCKS: u64 = 512;
const MOST_SLOTS: u64 = 256;
const MOST_REQUESTS: u64 = 1_000_000;
const MOST_TOKENS: u64 = 1 << 24;

impl Problem {
    /// Everything that is wrong with it.
    pub fn check(&self) -> Vec<ProblemError> {
        let mut errors = Vec::new();
        if self.devices.is_empty() {
            errors.push(ProblemError::NoDevices);
        }
        if self.model.blocks.is_empty() {
            errors.push(ProblemError::NoBlocks);
        }
        self.check_sizes(&mut errors);
        self.check_names(&mut errors);
        self.check_profiles(&mut errors);
        self.check_links(&mut errors);
        check_workload(&self.workload, &mut errors);
        errors
    }

    /// The profile of a device.
    pub fn profile(&self, device: &DeviceId) -> Option<&DeviceProfile> {
        self.profiles.iter().find(|profile| profile.device == *device)
    }

    fn check_sizes(&self, errors: &mut Vec<ProblemError>) {
        let workload = &self.workload;
        let sizes = [
            ("devices", self.devices.len() as u64, MOST_DEVICES),
            ("blocks", self.model.blocks.len() as u64, MOST_BLOCKS),
            ("slots allowed", u64::from(workload.max_slots), MOST_SLOTS),
            ("requests", workload.n_requests() as u64, MOST_REQUESTS),
            ("tokens to a slot", u64::from(workload.slot_context), MOST_TOKENS),
        ];
        let too_many = sizes.into_iter().filter(|(_, found, most)| found > most);
        errors.extend(too_many.map(|(what, found, most)| ProblemError::TooMany { what, found, most }));
    }

    fn check_names(&self, errors: &mut Vec<ProblemError>) {
        let mut names: Vec<&DeviceId> = self.devices.iter().map(|device| &device.id).collect();
        names.sort();
        let twice = names.windows(2).filter(|pair| pair[0] == pair[1]);
        errors.extend(twice.map(|pair| ProblemError::TwiceNamed(pair[0].clone())));
    }

    fn check_profiles(&self, errors: &mut Vec<ProblemError>) {
        let mut first: Option<&DeviceProfile> = None;
        for device in &self.devices {
            let mut of_device = self.profiles.iter().filter(|profile| profile.device == device.id);
            let Some(profile) = of_device.next() else {
                errors.push(ProblemError::NoProfile(device.id.clone()));
                continue;
            };
            if of_device.next().is_some() {
                errors.push(ProblemError::TwiceProfiled(device.id.clone()));
            }
            let expected = *first.get_or_insert(profile);
            if profile.model != expected.model {
                errors.push(ProblemError::MixedModels {
                    device: device.id.clone(),
                    expected: expected.model.clone(),
                    found: profile.model.clone(),
                });
            }
            if profile.runtime != expected.runtime {
                errors.push(ProblemError::MixedRuntimes {
                    device: device.id.clone(),
                    expected: expected.runtime.clone(),
                    found: profile.runtime.clone(),
                });
            }
            self.check_curves(profile, errors);
        }
    }

    fn check_curves(&self, profile: &DeviceProfile, errors: &mut Vec<ProblemError>) {
        let device = || profile.device.clone();
        if profile.gpu.is_none() && profile.cpu.is_none() {
            errors.push(ProblemError::MissingCurve { device: device(), what: "any processor" });
        }
        let overhead = profile.hop_overhead.0;
        if !(overhead.is_finite() && overhead >= 0.0) {
            errors.push(ProblemError::BadOverhead { device: device(), millis: overhead });
        }
        let processors =
            [(&profile.gpu, "a type of block on the GPU"), (&profile.cpu, "a type of block on the CPU")];
        for (processor, what) in processors {
            let Some(processor) = processor else { continue };
            if self.model.blocks.iter().any(|block| processor.block(block.kind).is_none()) {
                errors.push(ProblemError::MissingCurve { device: device(), what });
            }
        }
    }

    fn check_links(&self, errors: &mut Vec<ProblemError>) {
        let otherwise = self.links.otherwise.map(|quality| ("any host", "any other", quality));
        let measured =
            self.links.measured.iter().map(|link| (link.from.0.as_str(), link.to.0.as_str(), link.quality));
        for (from, to, quality) in measured.chain(otherwise) {
            let mut bad = |what| {
                errors.push(ProblemError::BadLink { from: from.to_owned(), to: to.to_owned(), what });
            };
            if !(quality.bandwidth.0.is_finite() && quality.bandwidth.0 > 0.0) {
                bad("a bandwidth that is not above zero");
            }
            if !(quality.one_way_latency.0.is_finite() && quality.one_way_latency.0 >= 0.0) {
                bad("a negative or infinite latency");
            }
        }
    }
}

fn check_workload(workload: &Workload, errors: &mut Vec<ProblemError>) {
    let mut positive = |what, value: f64| {
        if !(value.is_finite() && value > 0.0) {
            errors.push(ProblemError::BadWorkload { what, value, must: "finite and above zero" });
        }
    };
    positive("minimum generation rate", workload.min_rate.0);
    positive("slot context", f64::from(workload.slot_context));
    positive("largest number of slots", f64::from(workload.max_slots));
    positive("number of requests", f64::from(workload.requests));
    positive("mean prompt length", workload.prompt.mean);
    positive("mean output length", workload.output.mean);
    match &workload.arrivals {
        Arrivals::Every(interval) | Arrivals::Poisson(interval) => {
            positive("mean time between requests in milliseconds", interval.0);
        }
        Arrivals::Trace(entries) if entries.is_empty() => {
            errors.push(ProblemError::BadTrace { index: 0, what: "is missing: the trace is empty" });
        }
        Arrivals::Trace(entries) => {
            let mut last = 0.0;
            for (index, entry) in entries.iter().enumerate() {
                if !entry.at.0.is_finite() || entry.at.0 < last {
                    errors.push(ProblemError::BadTrace { index, what: "comes before the one before it" });
                } else {
                    last = entry.at.0;
                }
                let (tokens, context) =
                    (u64::from(entry.prompt) + u64::from(entry.output), workload.slot_context);
                if tokens > u64::from(context) {
                    errors.push(ProblemError::TraceTooLong { index, tokens, context });
                }
                if entry.prompt == 0 || entry.output == 0 {
                    errors.push(ProblemError::BadTrace { index, what: "has no prompt or no output" });
                }
            }
        }
    }
    for (what, lengths) in [("spread of prompts", workload.prompt), ("spread of outputs", workload.output)] {
        check_spread(what, lengths, errors);
    }
    let longest = workload.prompt.mean + workload.output.mean;
    let traced = matches!(workload.arrivals, Arrivals::Trace(_));
    if !traced && longest > f64::from(workload.slot_context) {
        errors.push(ProblemError::BadWorkload {
            what: "mean prompt and output together",
            value: longest,
            must: "no longer than the slot context",
        });
    }
}

fn check_spread(what: &'static str, lengths: Lengths, errors: &mut Vec<ProblemError>) {
    if let Spread::LogNormal(cv) = lengths.spread
        && !(0.0..=10.0).contains(&cv)
    {
        errors.push(ProblemError::BadWorkload { what, value: cv, must: "between 0 and 10" });
    }
}
