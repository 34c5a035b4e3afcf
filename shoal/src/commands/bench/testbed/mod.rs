//! `shoal bench testbed`: whether plans do what the planner's simulator says of them.
//!
//! For each configuration of the E2LLM paper's test bed the planner makes a plan; its replicas are started, with emulated devices
//! and network in which time runs faster, and the configuration's requests are sent to the orchestrator over them. What clients see
//! is set beside the simulation of the same plan with the same requests (docs/adr/0017-test-bed.md).

mod bed;
mod compare;
mod drive;
mod report;
mod trial;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use planner::ObjectiveKind;
use planner::testbed::{Configuration, Testbed};

use crate::cli::Globals;
use crate::commands::{model, stage_worker};
use crate::output;
use crate::progress::ProgressView;

use bed::{Bed, Ground};
use compare::{Comparison, Figures};
use drive::{Server, drive};
pub(super) use report::SECTION;
use report::{Report, Run};
use trial::{Trial, Workload};

/// Arguments of `shoal bench testbed`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench testbed --output testbed.json      all twelve configurations under two plans: some half an hour
  shoal bench testbed --output testbed.json      again: goes on with what is not in the file yet
  shoal bench testbed --config 8,9 --plans els   two of them, under one
  shoal bench testbed --config 5 --requests 20 --time-scale 0.05 --json
  shoal bench testbed --output testbed.json --markdown docs/evaluation.md

A run agrees with its simulation if longest wait, mean time to first token and mean time per token are within 10 %, or waits
below a second within 0.2 s. Ctrl-C stops all devices; finished runs are in the file.")]
pub(crate) struct TestbedArgs {
    /// Whose configurations are run: of the suite, those of eight devices.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = SuiteArg::E2llm36)]
    suite: SuiteArg,
    /// Numbers of the configurations, from 1 in the order in which they are listed [default: all].
    #[arg(long = "config", value_name = "N,N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=12))]
    configurations: Vec<u32>,
    /// By which objectives plans are chosen.
    #[arg(
        long,
        value_enum,
        value_name = "OBJECTIVE,...",
        value_delimiter = ',',
        default_value = "queue,els"
    )]
    plans: Vec<PlanArg>,
    /// Model whose vocabulary the API uses: a .gguf file, or the start of the name of one in the models folder.
    #[arg(short, long, value_name = "MODEL", default_value = "SmolLM2")]
    model: String,
    /// Seconds that a second of the devices takes here. What HTTP and hand-offs really take here, some milliseconds, counts as so much
    /// more of the devices' time.
    #[arg(long, value_name = "X", default_value_t = 0.2, value_parser = time_scale)]
    time_scale: f64,
    /// Of the requests' lengths; plans are chosen with seeds 1, 2 and 3.
    #[arg(long, value_name = "N", default_value_t = 101)]
    seed: u64,
    /// Requests of each run [default: 100, as in the suite].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    requests: Option<u32>,
    /// File of the results, to which each run is added when it has ended; what is in it already is not run again.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Page whose section about the test bed is written, at its end.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Where and when was measured, for the page.
    #[arg(long, value_name = "TEXT", requires = "markdown", default_value = "this machine")]
    measured_on: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteArg {
    /// The configurations of the E2LLM paper on its test bed.
    E2llm36,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PlanArg {
    /// Shoal's: simulated waiting, time to first token and generation speed.
    Queue,
    /// The E2LLM paper's congestion model.
    Els,
}

impl From<PlanArg> for ObjectiveKind {
    fn from(plan: PlanArg) -> Self {
        match plan {
            PlanArg::Queue => Self::Queue,
            PlanArg::Els => Self::Els,
        }
    }
}

fn time_scale(text: &str) -> Result<f64, String> {
    let scale = text.trim().parse().ok().filter(|scale: &f64| *scale >= 0.001 && *scale <= 10.0);
    scale.ok_or_else(|| format!("{text:?} is not a number from 0.001 to 10"))
}

/// Measures and prints.
pub(crate) fn run(args: &TestbedArgs, globals: &Globals) -> Result<()> {
    let SuiteArg::E2llm36 = args.suite;
    let (bed, ground) = (Testbed::e2llm()?, ground(args, globals)?);
    let workload = Workload { seed: args.seed, requests: args.requests };
    let mut report = Report::open(args.output.as_deref(), args.time_scale, workload)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.context("starting the async runtime")?;
    let mut view = ProgressView::new();
    for (number, configuration) in chosen(&bed, &args.configurations) {
        for objective in args.plans.iter().copied().map(ObjectiveKind::from) {
            let trial = Trial::new(&bed, &configuration, objective, workload)?;
            if report.knows(&trial, simulated(&trial)?) {
                continue;
            }
            let comparison = runtime.block_on(async {
                tokio::select! {
                    comparison = measure(&trial, &ground, (number, &mut view)) => comparison,
                    pressed = tokio::signal::ctrl_c() => {
                        pressed.context("listening for Ctrl-C")?;
                        bail!("interrupted")
                    }
                }
            });
            report.add(Run::new((number, &trial), comparison?), args.output.as_deref())?;
        }
    }
    view.finish();
    if let Some(path) = &args.markdown {
        report.write_section(path, &args.measured_on)?;
    }
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&report.table())?
    }
    Ok(())
}

fn ground(args: &TestbedArgs, globals: &Globals) -> Result<Ground> {
    Ok(Ground {
        command: stage_worker::command(globals)?,
        vocabulary: model::open(&args.model, &model::folders(globals)?)?,
        time_scale: args.time_scale,
    })
}

/// The configurations of eight devices, with their numbers.
fn chosen(bed: &Testbed, numbers: &[u32]) -> Vec<(u32, Configuration)> {
    let all = bed.configurations().into_iter().filter(|configuration| configuration.devices == "8");
    (1..).zip(all).filter(|(number, _)| numbers.is_empty() || numbers.contains(number)).collect()
}

async fn measure(
    trial: &Trial,
    ground: &Ground,
    (number, view): (u32, &mut ProgressView),
) -> Result<Comparison> {
    let what = format!("{number}: {}, {}", trial.name, trial.objective.name());
    view.show_share(&what, 0, trial.requests.len() as u64);
    let bed = Bed::start(trial, ground).await?;
    let n_vocab = ground.vocabulary.shape().n_vocab;
    let server = Server { api: bed.api, n_vocab, time_scale: ground.time_scale };
    let mut show = |done| view.show_share(&what, done, trial.requests.len() as u64);
    let seen = drive(server, &trial.requests, &mut show).await;
    bed.stop().await;
    let measured = Figures::measured(&seen?, &trial.prompts(), &trial.cluster);
    Ok(Comparison { simulated: simulated(trial)?, measured })
}

fn simulated(trial: &Trial) -> Result<Figures> {
    Ok(Figures::simulated(&trial.simulate()?, &trial.prompts(), &trial.cluster))
}
