//! `shoal bench planner`: the planner's objectives against each other, on a suite of planning problems.
//!
//! Nothing is run but the planner and its simulator, so it takes no model and no device.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::{Table, presets};
use planner::DecodeReading;
use planner::suite::{
    ByObjective, Evaluation, Event, Measured, SEEDS, Suite, chart, markdown, outcome, suite,
};
use planner::testbed::Testbed;
use serde::Serialize;

use super::testbed::SECTION;
use crate::commands::model;
use crate::commands::planning::write_file;
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::ProgressView;

/// Arguments of `shoal bench planner`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench planner                            longest waits under four objectives, as a table
  shoal bench planner --suite e2llm36 --json
  shoal bench planner --markdown evaluation.md --svg evaluation.svg

docs/evaluation.md is what it writes.")]
pub(crate) struct PlannerArgs {
    /// What is planned.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = SuiteArg::E2llm36)]
    suite: SuiteArg,
    /// Write a page with tables.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Where and when planning is timed, for the page.
    #[arg(long, value_name = "TEXT", requires = "markdown", default_value = "this machine")]
    measured_on: String,
    /// Write a chart of the longest waits.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteArg {
    /// The 36 configurations of the E2LLM paper on its test bed.
    E2llm36,
}

#[derive(Serialize)]
struct Report<'a> {
    suite: &'static str,
    /// Seeds of the workloads that plans are compared on.
    seeds: [u64; SEEDS.len()],
    #[serde(flatten)]
    evaluation: &'a Evaluation,
}

/// Plans, compares and prints.
pub(crate) fn run(args: &PlannerArgs) -> Result<()> {
    let SuiteArg::E2llm36 = args.suite;
    let interrupt = Interrupt::listen()?;
    let bed = Testbed::e2llm()?;
    let evaluation = Evaluation {
        batched: measure(&bed, DecodeReading::Batched, &interrupt)?,
        serial: measure(&bed, DecodeReading::Serial, &interrupt)?,
    };
    if let Some(path) = &args.markdown {
        write_page(path, &markdown(&evaluation, &args.measured_on))?;
    }
    if let Some(path) = &args.svg {
        write_file(path, &chart(&evaluation.batched.suite))?;
    }
    if args.json {
        output::print_json(&Report { suite: "e2llm36", seeds: SEEDS, evaluation: &evaluation })?
    } else {
        output::print(&text(&evaluation))?
    }
    Ok(())
}

/// Writes the page; the section that `shoal bench testbed` has added to it stays.
fn write_page(path: &Path, page: &str) -> Result<()> {
    let old = if path.exists() {
        fs::read_to_string(path).context("reading the page as it is")?
    } else {
        String::new()
    };
    match old.split_once(SECTION) {
        Some((_, section)) => write_file(path, &format!("{}\n\n{SECTION}{section}", page.trim_end())),
        None => write_file(path, page),
    }
}

fn measure(bed: &Testbed, reading: DecodeReading, interrupt: &Interrupt) -> Result<Measured> {
    let mut view = ProgressView::new();
    let configurations = bed.configurations();
    let mut planning_s = ByObjective::default();
    let mut slowest_plan_s = ByObjective::default();
    let mut outcomes = Vec::new();
    for (done, configuration) in configurations.iter().enumerate() {
        model::go_on(interrupt)?;
        view.show_share(&format!("{reading:?} decode"), done as u64, configurations.len() as u64);
        let mut start = Instant::now();
        outcomes.push(outcome(bed, configuration, reading, &mut |event| match event {
            Event::Planning(_) => start = Instant::now(),
            Event::Planned(kind) => {
                let seconds = start.elapsed().as_secs_f64();
                *planning_s.of(kind) += seconds;
                let slowest: &mut f64 = slowest_plan_s.of(kind);
                *slowest = slowest.max(seconds);
            }
        })?);
    }
    view.finish();
    Ok(Measured { suite: suite(outcomes), planning_s, slowest_plan_s })
}

fn text(evaluation: &Evaluation) -> String {
    let readings = [("batched", &evaluation.batched), ("serial", &evaluation.serial)];
    let texts = readings.map(|(name, measured)| {
        let times = measured.planning_s.all().map(|seconds| format!("{seconds:.2}")).join(", ");
        format!(
            "{name} decode: longest wait in seconds\n{}\n{}\nplanning took {times} s",
            waits(&measured.suite),
            ratios(&measured.suite)
        )
    });
    texts.join("\n\n")
}

fn waits(suite: &Suite) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["configuration", "els", "ft", "splitwise", "queue"]);
    for outcome in &suite.configurations {
        let waits = outcome.max_wait_s.all().map(|wait| format!("{wait:.2}"));
        table.add_row([std::slice::from_ref(&outcome.name), &waits[..]].concat());
    }
    table
}

fn ratios(suite: &Suite) -> String {
    let all = [
        ("els", suite.ratio_to_queue.els),
        ("ft", suite.ratio_to_queue.ft),
        ("splitwise", suite.ratio_to_queue.splitwise),
    ];
    let ratios = all.map(|(name, ratio)| {
        format!("{name} {:.2} (largest {:.1}, lost {})", ratio.geometric_mean, ratio.largest, ratio.lost)
    });
    format!(
        "{} of {} congested; times the wait under queue: {}",
        suite.congested,
        suite.configurations.len(),
        ratios.join(", ")
    )
}
