//! The whole of a profile: every processor measured in turn, each in child processes, and what came of it as a file.
//!
//! The driver never runs llama.cpp itself. What a process was measuring when it died is recorded, and the rest goes on.

use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use cluster::{Bytes, ColdCall, MemoryCosts, Millis, ModelHash, ProcessorProfile};
use node::ModelFile;
use node::agent::WorkerCommand;
use protocol::node::{DeviceFacts, DeviceKind};
use protocol::plan_files::{FailureEntry, KvEntry, ProfilesFile};
use thiserror::Error;

use crate::agenda::{Files, Ground, LeftOut, Planned};
use crate::curves::{self, CurvesError, Medians};
use crate::entry;
use crate::host::{Host, last_level_cache};
use crate::idle_gap::COLD_CALL_ROWS;
use crate::memory;
use crate::reduction::Reduction;
use crate::sampling::{Item, LEAST, Point, sample};
use crate::session::{Session, SessionError};
use crate::statistics::median;
use crate::store::{ProfileStore, Saved};
use crate::wire::{self, Processor};

/// Memory that a measuring process may take beside its slices: caches, buffers, and what is streamed between runs.
const BESIDE_SLICES: Bytes = Bytes::from_mib(112);

/// … and at least this, or next to nothing could be measured of a small model.
const BESIDE_SLICES_AT_LEAST: Bytes = Bytes::from_mib(64);

/// Why there is no profile.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// A processor that is not there.
    #[error("there is no processor {asked:?} on this host: it has {}", there.join(", "))]
    NoSuchProcessor {
        /// As asked for.
        asked: String,
        /// Those that there are.
        there: Vec<String>,
    },
    /// Not even the smallest part of the model can be loaded.
    #[error(
        "the model's smallest part, {blocks} of its blocks, does not fit {processor}: its weights are {weights}, a \
         process to measure it needs {needed}, and {available} are available ({reserve} kept in reserve); take a smaller \
         quantisation, or close other programs"
    )]
    DoesNotFit {
        /// On which processor.
        processor: String,
        /// How many blocks.
        blocks: u32,
        /// Their weights.
        weights: Bytes,
        /// What a process needs.
        needed: Bytes,
        /// What there is.
        available: Bytes,
        /// What the user wants kept free.
        reserve: Bytes,
    },
    /// Too little could be measured.
    #[error("{processor}: {source}{}", list(failures))]
    Curves {
        /// On which processor.
        processor: String,
        /// What is missing.
        source: CurvesError,
        /// What went wrong before.
        failures: Vec<String>,
    },
    /// The user stopped it.
    #[error("interrupted; what was measured is kept in {}, and the next run goes on from there", kept.display())]
    Interrupted {
        /// Where.
        kept: PathBuf,
    },
    /// The samples or the profile could not be kept.
    #[error("writing {}: {source}", path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

fn list(failures: &[String]) -> String {
    failures.iter().take(4).map(|failure| format!("; {failure}")).collect()
}

/// How far a profile is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What is being measured.
    pub what: String,
    /// Done so far.
    pub done: u64,
    /// All there is to do of it.
    pub total: u64,
}

/// Told often how far it is; `Break` stops, and what was measured is kept.
pub type Observer<'a> = dyn FnMut(&Step) -> ControlFlow<()> + 'a;

/// What to measure, and with what.
pub struct Request<'a> {
    /// The model.
    pub model: &'a ModelFile,
    /// Its hash.
    pub hash: ModelHash,
    /// Which parts stand for it.
    pub reduction: &'a Reduction,
    /// These parts as files.
    pub files: &'a Files,
    /// This program as a worker.
    pub command: &'a WorkerCommand,
    /// The host.
    pub host: &'a Host,
    /// Processors to measure: some of the host's.
    pub processors: &'a [DeviceFacts],
    /// How everything is run.
    pub settings: &'a Settings,
    /// Where the profile is kept.
    pub store: &'a ProfileStore,
}

/// How everything is run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// CPU threads.
    pub threads: u32,
    /// Tokens per slot.
    pub n_ctx: u32,
    /// Memory that is kept free, of RAM and of each GPU.
    pub reserve: Bytes,
    /// Time for each processor, roughly: what must be measured is, even if it takes longer.
    pub budget: Duration,
    /// What llama.cpp was built with.
    pub features: Vec<String>,
}

/// Points and the milliseconds of each of their runs.
pub(crate) type Samples = Vec<(Point, Vec<f64>)>;

/// What came of one processor.
pub(crate) struct Outcome {
    pub(crate) facts: DeviceFacts,
    pub(crate) profile: ProcessorProfile,
    pub(crate) costs: MemoryCosts,
    pub(crate) kv: Vec<KvEntry>,
    pub(crate) cold_call: Option<ColdCall>,
    pub(crate) samples: Samples,
    pub(crate) failures: Vec<FailureEntry>,
    pub(crate) peak: u64,
}

/// The processors of these names (`cpu` in any case, or as ggml has them); all, without names.
pub fn choose_processors(host: &Host, names: &[String]) -> Result<Vec<DeviceFacts>, ProfileError> {
    if names.is_empty() {
        return Ok(host.processors.clone());
    }
    let find = |asked: &String| {
        let found = host.processors.iter().find(|device| device.name.eq_ignore_ascii_case(asked));
        found.cloned().ok_or_else(|| ProfileError::NoSuchProcessor {
            asked: asked.clone(),
            there: host.processors.iter().map(|device| device.name.clone()).collect(),
        })
    };
    names.iter().map(find).collect()
}

/// Measures, and keeps the profile.
pub fn profile(request: &Request<'_>, observer: &mut Observer<'_>) -> Result<ProfilesFile, ProfileError> {
    let mut saved = request.store.partial();
    let mut outcomes = Vec::with_capacity(request.processors.len());
    for facts in request.processors {
        let run = Run { request, facts, saved: &mut saved };
        outcomes.push(run.measure(observer)?);
    }
    let file = entry::file(request, &outcomes);
    let failed = |source| ProfileError::Store { path: request.store.path().to_owned(), source };
    request.store.finish(&file).map_err(failed)?;
    Ok(file)
}

/// One processor's part.
struct Run<'a, 'b> {
    request: &'a Request<'b>,
    facts: &'a DeviceFacts,
    saved: &'a mut Vec<Saved>,
}

impl<'a> Run<'a, '_> {
    fn measure(mut self, observer: &mut Observer<'_>) -> Result<Outcome, ProfileError> {
        let mut ground = self.ground()?;
        self.say(observer, "memory", 0, 1)?;
        let mut failures = Vec::new();
        let (mut kv, mut peak) = (Vec::new(), 0);
        match memory::measure(self.request.command, &ground) {
            Ok(measured) => {
                ground.costs = measured.costs;
                ground.limit = self.limit(&ground);
                (kv, peak) = (measured.kv, measured.peak);
                tracing::debug!(costs = ?ground.costs, peak, "weighed");
            }
            Err(error) => failures.push(failure("memory", &error)),
        }
        let mut samples = Vec::new();
        for planned in ground.agenda() {
            let (items, of_session) = self.session(planned, observer, &mut failures)?;
            peak = peak.max(of_session);
            samples.extend(items);
        }
        self.say(observer, "idling", 0, 1)?;
        let cold_call =
            self.cold_call(&ground).map_err(|error| failures.push(failure("idling", &error))).ok();
        let medians: Vec<(Point, f64)> = samples.iter().map(|(point, ms)| (*point, median(ms))).collect();
        let profile = self.curves(&medians, &failures)?;
        Ok(Outcome {
            facts: self.facts.clone(),
            profile,
            costs: ground.costs,
            kv,
            cold_call,
            samples,
            failures,
            peak,
        })
    }

    fn curves(&self, medians: &Medians, failures: &[FailureEntry]) -> Result<ProcessorProfile, ProfileError> {
        let Request { model, reduction, .. } = self.request;
        curves::processor_profile(model.shape(), reduction, medians).map_err(|source| ProfileError::Curves {
            processor: self.facts.name.clone(),
            source,
            failures: failures
                .iter()
                .map(|failure| format!("{}: {}", failure.what, failure.reason))
                .collect(),
        })
    }

    /// What idling adds to a call of the smallest slice, which is next to the fixed cost of a call.
    fn cold_call(&self, ground: &Ground<'_>) -> Result<ColdCall, SessionError> {
        let Some((spec, command)) = ground.idling(COLD_CALL_ROWS) else {
            return Err(SessionError::Unable("there is no slice to let idle".to_owned()));
        };
        let reply = Session::new(self.request.command, spec).ask(&command)?;
        let wire::Outcome::Cold { gaps_ms, extra_ms } = reply.outcome else {
            return Err(SessionError::Unable("the measuring process gave no correction".to_owned()));
        };
        let millis = |of: Vec<f64>| of.into_iter().map(Millis).collect();
        ColdCall::new(millis(gaps_ms), millis(extra_ms))
            .map_err(|error| SessionError::Unable(error.to_string()))
    }

    /// Runs a session, and gives its samples and its peak of memory. What is there from an interrupted run is not repeated.
    fn session(
        &mut self,
        planned: Planned,
        observer: &mut Observer<'_>,
        failures: &mut Vec<FailureEntry>,
    ) -> Result<(Samples, u64), ProfileError> {
        failures.extend(planned.left_out.iter().map(left_out));
        let (known, mut items): (Vec<Item>, Vec<Item>) = planned
            .items
            .into_iter()
            .map(|item| self.recall(item))
            .partition(|item| item.samples.len() >= LEAST);
        let mut results: Samples = known.into_iter().map(|item| (item.point, item.samples)).collect();
        if items.is_empty() {
            return Ok((results, 0));
        }
        let expected = planned.expected;
        let mut sessions = [Session::new(self.request.command, planned.spec)];
        let budget = self.request.settings.budget.mul_f64(planned.share);
        let what = items.first().map(|item| describe(&item.point)).unwrap_or_default();
        let flow = sample(&mut sessions, &mut items, budget, &mut |done, total| {
            observer(&Step { what: format!("{}: {what}", self.facts.name), done, total })
        });
        let peak = sessions.iter().map(Session::peak).max().unwrap_or(0);
        tracing::debug!(%expected, peak = %Bytes(peak), session = what, "measured");
        for item in items {
            if let Some(reason) = &item.failure {
                failures.push(FailureEntry { what: item.point.to_string(), reason: reason.clone() });
            }
            if item.samples.len() >= LEAST {
                self.saved.push(self.keep(&item));
                results.push((item.point, item.samples));
            }
        }
        self.save()?;
        if flow.is_break() {
            return Err(self.interrupted());
        }
        Ok((results, peak))
    }

    fn recall(&self, mut item: Item) -> Item {
        let is_it = |saved: &&Saved| saved.processor == self.facts.name && saved.point == item.point;
        if let Some(saved) = self.saved.iter().find(is_it) {
            item.samples.clone_from(&saved.samples_ms);
        }
        item
    }

    fn keep(&self, item: &Item) -> Saved {
        Saved { processor: self.facts.name.clone(), point: item.point, samples_ms: item.samples.clone() }
    }

    fn save(&self) -> Result<(), ProfileError> {
        let store = self.request.store;
        let failed = |source| ProfileError::Store { path: store.partial_path().to_owned(), source };
        store.save_partial(self.saved).map_err(failed)
    }

    fn interrupted(&self) -> ProfileError {
        ProfileError::Interrupted { kept: self.request.store.partial_path().to_owned() }
    }

    fn say(
        &self,
        observer: &mut Observer<'_>,
        what: &str,
        done: u64,
        total: u64,
    ) -> Result<(), ProfileError> {
        let step = Step { what: format!("{}: {what}", self.facts.name), done, total };
        if observer(&step).is_break() { Err(self.interrupted()) } else { Ok(()) }
    }

    /// What measuring stands on, unless there is no room for it.
    fn ground(&self) -> Result<Ground<'a>, ProfileError> {
        let Request { model, reduction, files, settings, .. } = self.request;
        let processor = match self.facts.kind {
            DeviceKind::Cpu => Processor::Cpu,
            DeviceKind::Gpu | DeviceKind::IntegratedGpu => Processor::Gpu(self.facts.name.clone()),
        };
        let mut ground = Ground {
            shape: model.shape(),
            reduction,
            files,
            processor,
            threads: settings.threads,
            n_ctx: settings.n_ctx,
            costs: MemoryCosts::assumed(model.shape()),
            limit: Bytes::ZERO,
            last_level_cache: last_level_cache(),
        };
        self.check_room(&ground)?;
        ground.limit = self.limit(&ground);
        Ok(ground)
    }

    /// What a measuring process may hold. A GPU's memory is there to be used; what processes hold of the host's is kept small, but
    /// for what they take by themselves, which drivers of GPUs make much of.
    fn limit(&self, ground: &Ground<'_>) -> Bytes {
        if self.facts.kind != DeviceKind::Cpu {
            return self.available();
        }
        let slices = ground.bytes_of(&ground.reduction.slices);
        let whole: Bytes = self.request.model.gguf().tensors().iter().map(|tensor| Bytes(tensor.bytes)).sum();
        let little = Bytes(whole.0 / 10 * 11).min(slices + BESIDE_SLICES);
        little.max(slices + ground.costs.runtime + BESIDE_SLICES_AT_LEAST).min(self.available())
    }

    fn available(&self) -> Bytes {
        let there = match self.facts.kind {
            DeviceKind::Cpu => self.request.host.available,
            DeviceKind::Gpu | DeviceKind::IntegratedGpu => self.facts.memory_free,
        };
        there.saturating_sub(self.request.settings.reserve)
    }

    fn check_room(&self, ground: &Ground<'_>) -> Result<(), ProfileError> {
        let slices = ground.bytes_of(&ground.reduction.slices);
        let (needed, available) = (slices + ground.costs.runtime, self.available());
        if needed <= available {
            return Ok(());
        }
        Err(ProfileError::DoesNotFit {
            processor: self.facts.name.clone(),
            blocks: self.request.reduction.slices.iter().map(|range| range.len()).sum(),
            weights: slices,
            needed,
            available,
            reserve: self.request.settings.reserve,
        })
    }
}

/// What a session measures, for people.
fn describe(point: &Point) -> String {
    use protocol::plan_files::MeasuredPartEntry as Part;
    match point.part {
        Part::Decode => format!("decode at depth {}", point.depth),
        Part::Prefill => format!("prefill at depth {}", point.depth),
        Part::Head | Part::WithoutHead => "head".to_owned(),
        Part::Embedding | Part::Hop => "embeddings and hops".to_owned(),
    }
}

fn failure(what: &str, error: &SessionError) -> FailureEntry {
    FailureEntry { what: what.to_owned(), reason: error.to_string() }
}

fn left_out(left_out: &LeftOut) -> FailureEntry {
    let LeftOut { what, needed, limit } = left_out;
    FailureEntry {
        what: what.clone(),
        reason: format!(
            "left out: it would take {needed} ({} B) of memory, and measuring keeps to {limit}",
            needed.0
        ),
    }
}
