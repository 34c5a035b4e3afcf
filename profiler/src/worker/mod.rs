//! A worker: measures on one processor, in a process of its own, because native code can end the process it runs in. It
//! knows neither why something is measured nor what becomes of it; the driver decides that, command by command.

mod cold;
mod resident;
mod subject;

use std::io::{self, BufRead, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use llama::{EmbeddingTable, ExtraBuffers, Gpus, MemoryMap, MemoryPlace, Model, ModelParams};
use thiserror::Error;

use crate::hop::{HopError, Link};
use crate::idle_gap::IdleGapError;
use crate::wire::{BufferUse, Command, ContextSpec, Outcome, Processor, Reply, Setup};
use cold::Cold;
use resident::Resident;
use subject::{Input, Subject};

/// How long the process may take to run its exit handlers, some of which belong to GPU drivers.
const EXIT_GRACE: Duration = Duration::from_secs(2);

/// Why a worker ended.
#[derive(Debug, Error)]
pub enum WorkerError {
    /// The operating system refused stdin or stdout.
    #[error("talking to the profiler failed")]
    Stdio(#[from] io::Error),
    /// A line is no command.
    #[error("the profiler sent a line that is no command: {0}")]
    Line(#[from] serde_json::Error),
    /// llama.cpp refused what every command needs.
    #[error(transparent)]
    Llama(#[from] llama::Error),
}

/// Why a command failed; the next may succeed.
#[derive(Debug, Error)]
enum CommandError {
    #[error(transparent)]
    Llama(#[from] llama::Error),
    #[error(transparent)]
    Hop(#[from] HopError),
    #[error(transparent)]
    IdleGap(#[from] IdleGapError),
    #[error("there is no {what} number {number}")]
    Unknown { what: &'static str, number: usize },
    #[error("there are no token embeddings to look up")]
    NoEmbedding,
}

/// Runs a worker in this process: commands from stdin, answers to stdout. The end of stdin ends the process.
pub fn run_worker() -> Result<(), WorkerError> {
    llama::init_logging();
    let lines = listen()?;
    let Ok(first) = lines.recv() else { return Ok(()) };
    let mut worker = Worker::new(serde_json::from_str(&first)?)?;
    let mut stdout = io::stdout().lock();
    while let Ok(line) = lines.recv() {
        let reply = worker.obey(&serde_json::from_str(&line)?);
        writeln!(stdout, "{}", serde_json::to_string(&reply)?)?;
        stdout.flush()?;
    }
    Ok(())
}

/// Reads lines on a thread of its own, so that the end of stdin is noticed in the middle of a command too. It ends the process
/// then: nobody is left to tidy up for.
fn listen() -> Result<mpsc::Receiver<String>, io::Error> {
    let (send, lines) = mpsc::channel();
    thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
        thread::spawn(|| {
            thread::sleep(EXIT_GRACE);
            std::process::abort();
        });
        std::process::exit(0);
    })?;
    Ok(lines)
}

struct Worker {
    setup: Setup,
    cold: Cold,
    input: Input,
    slices: Vec<Model>,
    subjects: Vec<Option<Subject>>,
    link: Option<Link>,
    resident: Resident,
}

impl Worker {
    fn new(setup: Setup) -> Result<Self, WorkerError> {
        let embedding = setup.embedding.as_deref().map(EmbeddingTable::open).transpose()?;
        Ok(Self {
            cold: Cold::new(setup.cold_bytes, setup.threads),
            input: Input::new(embedding, setup.n_embd),
            slices: Vec::new(),
            subjects: Vec::new(),
            link: None,
            resident: Resident::default(),
            setup,
        })
    }

    fn obey(&mut self, command: &Command) -> Reply {
        let outcome =
            self.carry_out(command).unwrap_or_else(|error| Outcome::Failed { reason: error.to_string() });
        let (resident_bytes, peak_bytes) = self.resident.look();
        Reply { resident_bytes, peak_bytes, outcome }
    }

    fn carry_out(&mut self, command: &Command) -> Result<Outcome, CommandError> {
        let took = |time: Duration| Outcome::Took { ms: time.as_secs_f64() * 1e3 };
        match command {
            Command::Load { path } => self.load(path),
            Command::Context(spec) => self.make(*spec),
            Command::Drop { context } => {
                self.subjects.get_mut(*context).map(Option::take);
                Ok(Outcome::Done)
            }
            Command::Decode { context, rows } => {
                let (subject, input, cold) = self.subject(*context)?;
                Ok(took(subject.decode(*rows, input, cold)?))
            }
            Command::Prefill { context, rows } => {
                let (subject, input, cold) = self.subject(*context)?;
                Ok(took(subject.prefill(*rows, input, cold)?))
            }
            Command::ColdCall { context } => {
                let (subject, input, _) = self.subject(*context)?;
                let cold = subject.cold_call(input)?;
                let numbers = |of: &[cluster::Millis]| of.iter().map(|time| time.0).collect();
                Ok(Outcome::Cold { gaps_ms: numbers(cold.gaps()), extra_ms: numbers(cold.extra()) })
            }
            Command::Embed { rows } => Ok(took(self.embed(*rows)?)),
            Command::Hop { rows } => {
                let link = match &mut self.link {
                    Some(link) => link,
                    None => self.link.insert(Link::new(self.setup.n_embd)?),
                };
                Ok(took(link.send(*rows)?))
            }
            Command::Look => Ok(Outcome::Done),
        }
    }

    /// Loads as a stage worker does (stage/src/load.rs).
    fn load(&mut self, path: &Path) -> Result<Outcome, CommandError> {
        let (before, _) = self.resident.look();
        // Vocabulary and metadata are there when the first weight is about to be read.
        let besides = Arc::new(AtomicU64::new(0));
        let told = Arc::clone(&besides);
        let mut is_first = true;
        let (gpu_layers, gpus) = match &self.setup.processor {
            Processor::Cpu => (0, Gpus::All),
            Processor::Gpu(name) => (u32::MAX - 1, Gpus::Only(name.clone())),
        };
        let params = ModelParams {
            gpu_layers,
            gpus,
            memory_map: if cfg!(target_os = "macos") { MemoryMap::Mapped } else { MemoryMap::Read },
            extra_buffers: ExtraBuffers::Repacked,
            progress: Some(Box::new(move |_| {
                if std::mem::take(&mut is_first) {
                    let (now, _) = Resident::default().look();
                    told.store(now.saturating_sub(before), Ordering::Relaxed);
                }
                ControlFlow::Continue(())
            })),
            ..ModelParams::default()
        };
        self.slices.push(Model::load(path, params)?);
        Ok(Outcome::Loaded { besides_weights_bytes: besides.load(Ordering::Relaxed) })
    }

    fn make(&mut self, spec: ContextSpec) -> Result<Outcome, CommandError> {
        let unknown = CommandError::Unknown { what: "slice", number: spec.slice };
        let model = self.slices.get(spec.slice).ok_or(unknown)?;
        if self.subjects.len() <= spec.context {
            self.subjects.resize_with(spec.context + 1, || None);
        }
        // The old one goes first: there may not be room for both.
        self.subjects[spec.context] = None;
        let subject = Subject::new(model, spec, self.setup.threads)?;
        let uses = subject.context().memory()?.uses.into_iter().map(|entry| BufferUse {
            on_host: entry.place == MemoryPlace::Host,
            weights: entry.model,
            cache: entry.context,
            compute: entry.compute,
        });
        let uses = uses.collect();
        self.subjects[spec.context] = Some(subject);
        Ok(Outcome::Made { uses })
    }

    fn subject(&mut self, number: usize) -> Result<(&mut Subject, &mut Input, &Cold), CommandError> {
        let unknown = CommandError::Unknown { what: "context", number };
        let subject = self.subjects.get_mut(number).and_then(Option::as_mut).ok_or(unknown)?;
        Ok((subject, &mut self.input, &self.cold))
    }

    fn embed(&mut self, rows: u32) -> Result<Duration, CommandError> {
        if self.input.embedding.is_none() {
            return Err(CommandError::NoEmbedding);
        }
        self.input.draw_widely(rows);
        self.cold.stream();
        let start = Instant::now();
        self.input.look_up()?;
        Ok(start.elapsed())
    }
}
