//! What the commands that plan have in common: reading a problem from files, the choices that a user has, and showing how
//! far a search is.

use std::fmt::Write as _;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use cluster::{Arrivals, DeviceProfile, LinkEncoding, ModelShape, Workload};
use planner::{
    EncodingRule, KvLayout, ObjectiveKind, PlanError, Problem, Progress, Settings, SlotRule, Watch,
};
use protocol::plan_files::{
    ClusterFile, ModelShapeFile, PlannerFile, ProfilesFile, WorkloadFile, read_trace,
};
use protocol::rows::RowEncoding;

use crate::cli::Globals;
use crate::commands::model;
use crate::exit::Usage;
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::ProgressView;

/// How a planned replica's stages send their rows.
pub(crate) fn row_encoding(planned: LinkEncoding) -> Result<RowEncoding> {
    match planned {
        LinkEncoding::F32 => Ok(RowEncoding::F32),
        LinkEncoding::F16 => Ok(RowEncoding::F16),
        LinkEncoding::Q8_0 => Err(anyhow!("hidden rows cannot be sent as q8_0")),
    }
    .context("starting a replica")
}

/// The files that a problem is made of.
#[derive(Debug, Args)]
#[command(next_help_heading = "The problem")]
pub(crate) struct ProblemArgs {
    /// Nodes, devices, their memory, and links (docs/schema/cluster.schema.json).
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// A .gguf file, the start of the name of one in the models folder, or a description of a model that is not here: a
    /// .json file as `shoal slice info --json` prints it.
    #[arg(short, long, value_name = "MODEL")]
    model: String,
    /// When requests come, how long they are, how fast answers must be (docs/schema/workload.schema.json).
    #[arg(long, value_name = "FILE")]
    workload: PathBuf,
    /// What was measured on the devices for the model, in one file or several (docs/schema/profile.schema.json).
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    profiles: Vec<PathBuf>,
    /// Prompt tokens computed at once, as `serve` is told.
    #[arg(long, env = "SHOAL_PREFILL_CHUNK", value_name = "TOKENS", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    prefill_chunk: u32,
    /// Plan without this node; may be given more than once.
    #[arg(long, value_name = "NODE")]
    exclude: Vec<String>,
}

/// A problem, read.
pub(crate) struct Inputs {
    pub(crate) problem: Problem,
    /// What the model is called.
    pub(crate) model: String,
    /// What the user should know about the files, though they can be planned with.
    pub(crate) notes: Vec<String>,
}

impl ProblemArgs {
    /// How to plan by an objective.
    pub(crate) fn settings(&self, objective: ObjectiveKind) -> Settings {
        settings(objective, self.prefill_chunk)
    }

    /// Reads all files.
    pub(crate) fn read(&self, globals: &Globals, interrupt: &Interrupt) -> Result<Inputs> {
        let file: ClusterFile = read_file(&self.cluster)?;
        let mut devices = file.devices();
        for name in &self.exclude {
            let known: Vec<&str> = file.nodes.iter().map(|node| node.name.as_str()).collect();
            if !known.contains(&name.as_str()) {
                let known = known.join(", ");
                bail!(Usage(format!(
                    "there is no node {name} in {}: it has {known}",
                    self.cluster.display()
                )));
            }
            devices.retain(|device| device.node.0 != *name);
        }
        let mut profiles = Vec::new();
        for path in &self.profiles {
            let of_file: ProfilesFile = read_file(path)?;
            profiles.extend(of_file.profiles().with_context(|| format!("reading {}", path.display()))?);
        }
        let mut notes = Vec::new();
        let measured = profiles.first().map(|profile| profile.model.clone()).unwrap_or_default();
        let (model, shape) = self.read_model(&measured, (globals, interrupt), &mut notes)?;
        if let Some(note) = unused(&profiles, &file) {
            notes.push(note);
        }
        let workload = Workload::from(&read_file::<WorkloadFile>(&self.workload)?);
        Ok(Inputs {
            problem: Problem { model: shape, devices, profiles, links: file.links(), workload },
            model,
            notes,
        })
    }

    /// The model's name and description. `measured` is what the profiles call the model that they are of.
    fn read_model(
        &self,
        measured: &str,
        (globals, interrupt): (&Globals, &Interrupt),
        notes: &mut Vec<String>,
    ) -> Result<(String, ModelShape)> {
        let path = Path::new(&self.model);
        let (name, shape) = if path.extension().is_some_and(|extension| extension == "json") {
            let file: ModelShapeFile = read_file(path)?;
            let shape = file.shape().with_context(|| format!("reading {}", path.display()))?;
            (file.model, shape)
        } else {
            let folders = model::folders(globals)?;
            let file = model::open(&self.model, &folders)?;
            if is_hash(measured) {
                let mut view = ProgressView::new();
                let hash = node::model_hash(file.parts(), &folders.model_hashes(), &mut |progress| {
                    view.show(&progress);
                    interrupt.check()
                })?;
                if hash.to_string() != measured {
                    bail!(
                        "the profiles are of model {measured}, but {} is {hash}: measure the devices with it",
                        file.name()
                    );
                }
                return Ok((file.name(), file.shape().clone()));
            }
            (file.name(), file.shape().clone())
        };
        if !measured.is_empty() && !measured.eq_ignore_ascii_case(&name) && !is_hash(measured) {
            notes.push(format!("the profiles call their model {measured:?}, and {name:?} is planned for"));
        }
        Ok((name, shape))
    }
}

/// Whether profiles name their model by its SHA-256.
fn is_hash(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Profiles of devices that the cluster does not have: perhaps a misspelt name.
fn unused(profiles: &[DeviceProfile], cluster: &ClusterFile) -> Option<String> {
    let known = cluster.devices();
    let strange = profiles.iter().filter(|profile| known.iter().all(|device| device.id != profile.device));
    let names: Vec<&str> = strange.map(|profile| profile.device.0.as_str()).collect();
    (!names.is_empty())
        .then(|| format!("not in the cluster, so their profiles are not used: {}", names.join(", ")))
}

/// Reads a file of the planner: TOML by its extension, else JSON.
pub(crate) fn read_file<F: PlannerFile>(path: &Path) -> Result<F> {
    let text = read_text(path)?;
    let is_toml = path.extension().is_some_and(|extension| extension == "toml");
    let file = if is_toml { F::from_toml(&text) } else { F::from_json(&text) };
    file.with_context(|| format!("reading {}", path.display()))
}

/// Has a workload's requests come as they were recorded.
pub(crate) fn use_trace(workload: &mut Workload, path: &Path) -> Result<()> {
    let entries = read_trace(&read_text(path)?).with_context(|| format!("reading {}", path.display()))?;
    workload.arrivals = Arrivals::Trace(entries);
    Ok(())
}

fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// Writes a file that a user asked for.
pub(crate) fn write_file(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// By what plans are judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectiveArg {
    /// Shoal's: simulated waiting, time to first token and generation speed.
    Queue,
    /// The E2LLM paper's congestion model.
    Els,
    /// Finishing time, after HexGen-2.
    Ft,
    /// The strongest replicas prefill, after Splitwise.
    Splitwise,
}

impl ObjectiveArg {
    pub(crate) fn kind(self) -> ObjectiveKind {
        match self {
            Self::Queue => ObjectiveKind::Queue,
            Self::Els => ObjectiveKind::Els,
            Self::Ft => ObjectiveKind::Ft,
            Self::Splitwise => ObjectiveKind::Splitwise,
        }
    }
}

/// How Shoal plans by an objective, with prompts computed in chunks of so many tokens.
pub(crate) fn settings(objective: ObjectiveKind, prefill_chunk: u32) -> Settings {
    Settings {
        objective,
        prefill_chunk,
        kv_layout: KvLayout::PerSlot { n_ubatch: prefill_chunk },
        // The simulator can tell which number of slots is better; the paper's objectives look at rates alone.
        slots: if objective == ObjectiveKind::Queue { SlotRule::Either } else { SlotRule::MostTokens },
        encoding: EncodingRule::WhereItBinds,
        ..Settings::default()
    }
}

/// Shows a search and lets Ctrl-C end it.
pub(crate) struct Shown<'a> {
    view: Mutex<ProgressView>,
    interrupt: &'a Interrupt,
}

impl<'a> Shown<'a> {
    pub(crate) fn new(interrupt: &'a Interrupt) -> Self {
        Self { view: Mutex::new(ProgressView::new()), interrupt }
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        self.view.lock().unwrap_or_else(PoisonError::into_inner).finish();
    }
}

impl Watch for Shown<'_> {
    fn progress(&self, progress: Progress) -> ControlFlow<()> {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        view.show_share(&progress.work.to_string(), progress.done, progress.total);
        self.interrupt.check()
    }
}

/// What a search that found no plan says, one fault a line where there are several.
pub(crate) fn explained(error: PlanError) -> anyhow::Error {
    match error {
        PlanError::Problem(faults) if faults.len() > 1 => {
            let mut text = format!("the problem has {} faults", faults.len());
            for fault in faults {
                let _ = write!(text, "\n  {fault}");
            }
            anyhow::anyhow!(text)
        }
        PlanError::Stopped => anyhow::anyhow!("interrupted"),
        error => error.into(),
    }
}

/// Says what the user should know beside the plan.
pub(crate) fn print_notes(notes: &[String]) -> Result<()> {
    for note in notes {
        output::note(&format!("note: {note}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use planner::solve;
    use proptest::prelude::*;

    use super::*;

    fn example(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples").join(name)
    }

    fn example_text(name: &str) -> String {
        read_text(&example(name)).unwrap()
    }

    /// A problem of the texts of four files, if they are files of their kinds.
    fn problem_of([cluster, model, profiles, workload]: [&str; 4]) -> Option<Problem> {
        let cluster = ClusterFile::from_json(cluster).ok()?;
        Some(Problem {
            model: ModelShapeFile::from_json(model).ok()?.shape().ok()?,
            devices: cluster.devices(),
            profiles: ProfilesFile::from_json(profiles).ok()?.profiles().ok()?,
            links: cluster.links(),
            workload: Workload::from(&WorkloadFile::from_toml(workload).ok()?),
        })
    }

    fn example_texts() -> [String; 4] {
        ["cluster.json", "model.json", "profiles.json", "workload.toml"].map(example_text)
    }

    /// Numbers that a file should not have, or hardly ever has.
    const ODD: [&str; 11] = [
        "0",
        "1",
        "-1",
        "1e-300",
        "1e300",
        "4294967295",
        "18446744073709551615",
        "0.5",
        "1e12",
        "1000",
        "1e-9",
    ];

    /// With one seed, since many problems are planned.
    fn quick(objective: ObjectiveKind) -> Settings {
        Settings { simulated_seeds: vec![1], ..settings(objective, 256) }
    }

    /// `text` with its `nth` number replaced.
    fn with_number(text: &str, nth: usize, value: &str) -> String {
        let is_number = |at: usize| {
            let before = at.checked_sub(1).map_or(b' ', |b| text.as_bytes()[b]);
            text.as_bytes()[at].is_ascii_digit()
                && !before.is_ascii_alphanumeric()
                && !b"._-/".contains(&before)
        };
        let starts: Vec<usize> = (0..text.len()).filter(|&at| is_number(at)).collect();
        let start = starts[nth % starts.len()];
        let end =
            text[start..].find(|c: char| !c.is_ascii_digit() && c != '.').map_or(text.len(), |e| start + e);
        format!("{}{value}{}", &text[..start], &text[end..])
    }

    #[test]
    fn the_published_plan_is_what_the_published_examples_give() {
        let texts = example_texts();
        let problem = problem_of(texts.each_ref().map(String::as_str)).unwrap();
        let plan = solve(&problem, &settings(ObjectiveKind::Queue, 256)).unwrap().plan;
        let published: protocol::plan_files::PlanFile = read_file(&example("plan.json")).unwrap();
        let in_short = |plan: &cluster::Plan| planner::table::in_short(plan);
        assert_eq!(
            in_short(&plan),
            in_short(&published.plan().unwrap()),
            "write docs/examples/plan.json anew"
        );
    }

    #[test]
    fn a_profile_of_nobody_is_pointed_out() {
        let file = ClusterFile::from_json(&example_text("cluster.json")).unwrap();
        let mut profiles =
            ProfilesFile::from_json(&example_text("profiles.json")).unwrap().profiles().unwrap();
        assert_eq!(unused(&profiles, &file), None);
        profiles[0].device.0 = "workstation/gup".into();
        assert!(unused(&profiles, &file).unwrap().contains("workstation/gup"));
    }

    #[test]
    fn faults_are_listed_one_a_line() {
        let texts = example_texts()
            .map(|text| text.replace("420", "-420").replace("poisson_ms = 2500", "poisson_ms = 0"));
        let problem = problem_of(texts.each_ref().map(String::as_str)).unwrap();
        let error = explained(solve(&problem, &settings(ObjectiveKind::Els, 256)).unwrap_err()).to_string();
        assert!(error.starts_with("the problem has 11 faults\n  "), "{error}");
    }

    #[test]
    fn the_published_files_are_a_problem_with_a_plan() {
        let problem = problem_of(example_texts().each_ref().map(String::as_str)).unwrap();
        assert!(!solve(&problem, &quick(ObjectiveKind::Els)).unwrap().plan.replicas.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn whatever_numbers_are_in_the_files_there_is_a_plan_or_a_reason(
            changes in prop::collection::vec((0_usize..4, any::<usize>(), 0..ODD.len()), 1..4), objective in 0_usize..4
        ) {
            let mut texts = example_texts();
            for &(file, nth, value) in &changes {
                texts[file] = with_number(&texts[file], nth, ODD[value]);
            }
            let Some(problem) = problem_of(texts.each_ref().map(String::as_str)) else { return Ok(()) };
            match solve(&problem, &quick(ObjectiveKind::ALL[objective])) {
                Ok(solution) => prop_assert!(!solution.plan.replicas.is_empty()),
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }
    }
}
