//! `shoal profile`: what this host's processors can do for a model.

mod remote;
mod table;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use cluster::{Bytes, ModelHash};
use node::{DEFAULT_CONTEXT, Folders, ModelFile, default_threads, model_hash};
use profiler::{Files, Host, Key, ProfileError, ProfileStore, Reduction, Request, Settings, Step};
use protocol::node::{Address, DeviceFacts};
use protocol::plan_files::ProfilesFile;
use serde::Serialize;

use crate::cli::Globals;
use crate::commands::model::{self, BorrowedSlices};
use crate::commands::node::ask_for_devices;
use crate::commands::nodes::node_address;
use crate::interrupt::Interrupt;
use crate::output;
use crate::programs::this_program;
use crate::progress::ProgressView;
use crate::sizes::parse_bytes;

/// Share of a model's weights that the slices may have: what more of them would tell is little.
const SLICES_SHARE: f64 = 0.15;

/// … and no more than this.
const SLICES_AT_MOST: Bytes = Bytes::from_mib(512);

/// Arguments of `shoal profile`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal profile -m SmolLM2                      every processor of this host, as a table
  shoal profile -m SmolLM2 -o desk.json         the profile as a file, for `shoal plan --profiles`
  shoal profile -m big.gguf --device cpu --reserve 4GiB --json
  shoal profile -m SmolLM2 --identity me.json --node desk -o desk.json    measured by a node

Only a few blocks of the model are loaded. A profile is kept and printed again until something that it depends on changes; one that
was interrupted goes on where it stopped.")]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    model: model::ModelArg,
    /// Processors to measure, by their names, such as cpu,CUDA0 [default: all].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    device: Vec<String>,
    /// File for the profile.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the profile as JSON.
    #[arg(long)]
    json: bool,
    /// Measure everything again, whatever is kept.
    #[arg(long)]
    fresh: bool,
    /// CPU threads [default: the physical cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Memory to keep free, of RAM and of each GPU, such as 500MiB or 2GiB.
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    reserve: Bytes,
    /// Tokens per slot that curves reach to [default: 4096, as `serve` has, or what the model was trained for if that is less].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    ctx: Option<u32>,
    /// Seconds for each processor, roughly: what must be measured is, even if it takes longer.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Let the node at this address measure, on its own processors, its own copy of the model.
    #[arg(long, value_name = "ADDRESS", value_parser = node_address, requires = "identity",
          conflicts_with_all = ["fresh", "threads", "reserve", "ctx"])]
    node: Option<Address>,
    /// File with this member's identity, from `shoal identity issue`, to direct a node.
    #[arg(long, env = "SHOAL_IDENTITY", value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Say how far it is as lines of JSON on stderr, for programs.
    #[arg(long, hide = true)]
    progress_json: bool,
}

/// Measures and prints.
pub(crate) fn run(args: &ProfileArgs, globals: &Globals) -> Result<()> {
    if let Some(profiles) = remote::measure(args)? {
        return args.print(&profiles, None);
    }
    let folders = model::folders(globals)?;
    let file = args.model.open(&folders)?;
    let interrupt = Interrupt::listen()?;
    let command = this_program(globals, "profile-worker")?;
    let host = Host::here(ask_for_devices()?);
    let processors = profiler::choose_processors(&host, &args.device)?;
    let mut view = View::new(args.progress_json);
    let hash = model_hash(file.parts(), &folders.model_hashes(), &mut |progress| {
        view.bar.show(&progress);
        interrupt.check()
    })?;
    let settings = args.settings(&file);
    let store = ProfileStore::new(&folders.profiles(), &key(&host, &processors, hash, &settings));
    if args.fresh {
        store.forget();
    }
    let profiles = match store.finished() {
        Some(kept) => kept,
        None => {
            let reduction = Reduction::of(file.shape(), slices_budget(&file))?;
            let ground =
                Ground { file: &file, folders: &folders, interrupt: &interrupt, reduction: &reduction };
            let slices = ground.cut()?;
            let request = Request {
                model: &file,
                hash,
                reduction: &reduction,
                files: &files(&reduction, &slices),
                command: &command,
                host: &host,
                processors: &processors,
                settings: &settings,
                store: &store,
            };
            profiler::profile(&request, &mut |step| {
                view.show(step);
                interrupt.check()
            })?
        }
    };
    view.bar.finish();
    args.print(&profiles, Some(store.path()))
}

impl ProfileArgs {
    fn settings(&self, file: &ModelFile) -> Settings {
        let trained = file.shape().n_ctx_train;
        let default = if trained == 0 { DEFAULT_CONTEXT } else { DEFAULT_CONTEXT.min(trained) };
        Settings {
            threads: self.threads.unwrap_or_else(|| default_threads(1)),
            n_ctx: self.ctx.unwrap_or(default),
            reserve: self.reserve,
            budget: Duration::from_secs(self.seconds.into()),
            features: features(),
        }
    }

    fn print(&self, profiles: &ProfilesFile, kept: Option<&Path>) -> Result<()> {
        if let Some(path) = &self.output {
            let text = serde_json::to_string_pretty(profiles)?;
            std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
        }
        if self.json {
            output::print_json(profiles)?;
        } else {
            output::print(&table::text(profiles)?)?;
            if let Some(kept) = kept {
                output::print(&format!("kept in {}", kept.display()))?;
            }
        }
        Ok(())
    }
}

/// What slices may weigh together.
pub(crate) fn slices_budget(file: &ModelFile) -> Bytes {
    let whole: Bytes = file.gguf().tensors().iter().map(|tensor| Bytes(tensor.bytes)).sum();
    Bytes((whole.0 as f64 * SLICES_SHARE) as u64).min(SLICES_AT_MOST)
}

/// What slices are cut from, and how.
pub(crate) struct Ground<'a> {
    pub(crate) file: &'a ModelFile,
    pub(crate) folders: &'a Folders,
    pub(crate) interrupt: &'a Interrupt,
    pub(crate) reduction: &'a Reduction,
}

impl Ground<'_> {
    /// Cuts the slices that stand for the model.
    pub(crate) fn cut(&self) -> Result<BorrowedSlices> {
        BorrowedSlices::cut(self.file, &self.reduction.ranges(), self.folders, self.interrupt)
    }
}

/// The slices by their blocks.
pub(crate) fn files(reduction: &Reduction, slices: &BorrowedSlices) -> Files {
    let stored = slices.files();
    let paths = stored.slices.iter().map(|file| file.path.clone());
    Files {
        slices: reduction.ranges().into_iter().zip(paths).collect(),
        embedding: stored.embedding.path.clone(),
    }
}

/// What llama.cpp was built with.
pub(crate) fn features() -> Vec<String> {
    let all = [
        ("cuda", cfg!(feature = "cuda")),
        ("metal", cfg!(any(feature = "metal", target_os = "macos"))),
        ("vulkan", cfg!(feature = "vulkan")),
        ("native", cfg!(feature = "native")),
    ];
    all.into_iter().filter(|(_, is_on)| *is_on).map(|(name, _)| name.to_owned()).collect()
}

fn key(host: &Host, processors: &[DeviceFacts], hash: ModelHash, settings: &Settings) -> Key {
    let names = processors.iter().map(|device| (device.name.clone(), device.description.clone()));
    Key {
        host: host.name.clone(),
        processors: names.collect(),
        model: hash.to_string(),
        runtime: llama::version().to_owned(),
        features: settings.features.clone(),
        threads: settings.threads,
        n_ctx: settings.n_ctx,
    }
}

/// A bar for people, or lines for programs.
struct View {
    bar: ProgressView,
    is_for_programs: bool,
}

#[derive(Serialize)]
struct ProgressLine<'a> {
    what: &'a str,
    done: u64,
    total: u64,
}

impl View {
    fn new(is_for_programs: bool) -> Self {
        Self { bar: ProgressView::new(), is_for_programs }
    }

    fn show(&mut self, step: &Step) {
        let Step { what, done, total } = step;
        if !self.is_for_programs {
            self.bar.show_share(what, *done, *total);
            return;
        }
        // Progress that cannot be written is not worth a failure.
        if let Ok(line) = serde_json::to_string(&ProgressLine { what, done: *done, total: *total }) {
            let _ = output::note(&line);
        }
    }
}

/// Whether a profile failed because it was asked for something that is not there.
pub(crate) fn is_usage(error: &ProfileError) -> bool {
    matches!(error, ProfileError::NoSuchProcessor { .. })
}
