//! `shoal bench emulation`: whether emulated devices take as long as their profiles say.
//!
//! A replica of emulated stages, each a process of its own, generates; the time between two tokens of a request is compared with
//! the sum of its stages' profiled times. Everything but the computing is real, on this host's loopback.

mod devices;
mod replica;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use cluster::{DeviceProfile, LayerRange, Millis, ModelShape, Phase, StageBatch, StageParts};
use comfy_table::{Table, presets};
use profiler::statistics::{median, quantile};
use protocol::plan_files::{PlannerFile, ProfilesFile};
use serde::Serialize;

use crate::cli::Globals;
use crate::commands::model;
use crate::output;
use crate::progress::ProgressView;

use replica::{Replica, Step};

/// Arguments of `shoal bench emulation`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench emulation                               two built-in devices, 500 steps at 1, 4 and 8 rows
  shoal bench emulation --stages 8 --batch 4          eight stages, whatever the number of cores
  shoal bench emulation --profiles profiles.json -m SmolLM2 --json

An error of 0.01 says that a step took 1 % longer or shorter than the profiles say; `drift` is that of all steps together.")]
pub(crate) struct EmulationArgs {
    /// Profiles of devices, as the planner reads them; each stage stands for one, in turn [default: two built-in ones].
    #[arg(long, value_name = "FILE", requires = "model")]
    profiles: Option<PathBuf>,
    /// The model that was profiled, of which only the description is read [default: a built-in one].
    #[arg(short, long, value_name = "MODEL", requires = "profiles")]
    model: Option<String>,
    /// Stages, each a process.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    stages: u32,
    /// Decode steps at each number of rows.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    steps: u32,
    /// Rows of a step, which are requests that run at once.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1,4,8",
          value_parser = clap::value_parser!(u32).range(1..=256))]
    batch: Vec<u32>,
    /// Seconds that a second of the devices takes here.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    time_scale: f64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    devices: Vec<String>,
    stages: Vec<LayerRange>,
    time_scale: f64,
    /// What each visit of a stage takes where devices need no time at all: the real cost of a hop on this host.
    bare_hop_ms: f64,
    results: Vec<Measured>,
    /// Over all steps.
    median_error: f64,
    p95_error: f64,
    worst_error: f64,
    /// The largest, over the numbers of rows.
    worst_drift: f64,
}

#[derive(Serialize)]
struct Measured {
    rows: u32,
    steps: usize,
    /// Medians.
    predicted_ms: f64,
    measured_ms: f64,
    /// |measured − predicted| / predicted, of single steps.
    median_error: f64,
    p95_error: f64,
    worst_error: f64,
    /// (Σ measured − Σ predicted) / Σ predicted.
    drift: f64,
}

/// What is emulated.
pub(super) struct Setup {
    profiles: Vec<DeviceProfile>,
    shape: ModelShape,
    /// Blocks of each stage.
    ranges: Vec<LayerRange>,
    time_scale: f64,
}

impl Setup {
    fn new(args: &EmulationArgs, globals: &Globals) -> Result<Self> {
        let (devices, shape) = match (&args.profiles, &args.model) {
            (Some(path), Some(model)) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("reading the profiles {}", path.display()))?;
                let shape = model::open(model, &model::folders(globals)?)?.shape().clone();
                (ProfilesFile::from_json(&text)?.profiles()?, shape)
            }
            _ => (devices::profiles()?, devices::model()),
        };
        anyhow::ensure!(!devices.is_empty(), "the file has no profile");
        let profiles = devices.iter().cycle().take(args.stages as usize).cloned().collect();
        let ranges = shape.split(args.stages)?;
        Ok(Self { profiles, shape, ranges, time_scale: args.time_scale })
    }

    /// The same replica of devices that take no time.
    fn bare(&self) -> Result<Self> {
        let profiles = self.profiles.iter().map(devices::without_time).collect::<Result<_>>()?;
        Ok(Self { profiles, shape: self.shape.clone(), ranges: self.ranges.clone(), ..*self })
    }

    /// Blocks of a stage on the GPU: all, where the device has one.
    fn gpu_blocks(&self, stage: usize) -> u32 {
        if self.profiles[stage].gpu.is_some() { self.ranges[stage].len() } else { 0 }
    }

    fn parts(&self, stage: usize) -> StageParts {
        let range = self.ranges[stage];
        let kinds: Vec<_> =
            self.shape.blocks[range.start() as usize..range.end() as usize].iter().map(|b| b.kind).collect();
        let in_chain = self.ranges.len() > 1;
        StageParts { embeds: stage == 0, in_chain, ..StageParts::split(&kinds, self.gpu_blocks(stage)) }
    }

    /// What a decode step of so many rows at a depth should take here.
    fn predict(&self, rows: u32, depth: u32) -> Result<f64> {
        let batch = |stage, idle| StageBatch {
            phase: Phase::Decode,
            rows: f64::from(rows),
            depth: f64::from(depth),
            outputs: if stage + 1 == self.ranges.len() { f64::from(rows) } else { 0.0 },
            idle: Millis(idle),
        };
        let times = |idle: &dyn Fn(usize) -> f64| -> Result<Vec<f64>> {
            let stages = self.profiles.iter().enumerate();
            stages.map(|(i, profile)| Ok(profile.stage_time(&self.parts(i), &batch(i, idle(i)))?.0)).collect()
        };
        // A stage idles while the others are at work.
        let busy = times(&|_| 0.0)?;
        let step: f64 = busy.iter().sum();
        Ok(times(&|stage| step - busy[stage])?.iter().sum::<f64>() * self.time_scale)
    }
}

/// Measures and prints.
pub(crate) fn run(args: &EmulationArgs, globals: &Globals) -> Result<()> {
    let setup = Setup::new(args, globals)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let measured = async {
        tokio::select! {
            report = measure(args, &setup, globals) => report,
            pressed = tokio::signal::ctrl_c() => {
                pressed.context("listening for Ctrl-C")?;
                anyhow::bail!("interrupted")
            }
        }
    };
    let report = runtime.context("starting the async runtime")?.block_on(measured)?;
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&table(&report))?;
    }
    Ok(())
}

async fn measure(args: &EmulationArgs, setup: &Setup, globals: &Globals) -> Result<Report> {
    let mut view = ProgressView::new();
    let bare_hop_ms = {
        view.show_share("the real cost of a hop", 0, 1);
        let bare = setup.bare()?;
        let replica = Replica::start(&bare, args, globals).await?;
        let steps = replica.decode(1, args.steps.min(200), &mut |_| {}).await?;
        replica.stop().await;
        let times: Vec<f64> = steps.iter().map(|step| step.measured_ms).collect();
        median(&times) / setup.ranges.len() as f64
    };
    let replica = Replica::start(setup, args, globals).await?;
    let mut results = Vec::new();
    let mut errors = Vec::new();
    for &rows in &args.batch {
        let what = format!("{rows} rows");
        let mut show = |done| view.show_share(&what, u64::from(done), u64::from(args.steps));
        let steps = replica.decode(rows, args.steps, &mut show).await?;
        let (measured, of_steps) = compare(setup, rows, &steps)?;
        errors.extend(of_steps);
        results.push(measured);
    }
    replica.stop().await;
    view.finish();
    Ok(Report {
        devices: setup.profiles.iter().map(|profile| profile.device.0.clone()).collect(),
        stages: setup.ranges.clone(),
        time_scale: setup.time_scale,
        bare_hop_ms,
        median_error: median(&errors),
        p95_error: quantile(&errors, 0.95),
        worst_error: quantile(&errors, 1.0),
        worst_drift: results.iter().map(|result| result.drift.abs()).fold(0.0, f64::max),
        results,
    })
}

/// Compares steps with what they should have taken; gives their errors too.
fn compare(setup: &Setup, rows: u32, steps: &[Step]) -> Result<(Measured, Vec<f64>)> {
    let predicted = steps.iter().map(|step| setup.predict(rows, step.depth)).collect::<Result<Vec<f64>>>()?;
    let measured: Vec<f64> = steps.iter().map(|step| step.measured_ms).collect();
    let errors: Vec<f64> = measured.iter().zip(&predicted).map(|(m, p)| (m - p).abs() / p).collect();
    let (all_measured, all_predicted): (f64, f64) = (measured.iter().sum(), predicted.iter().sum());
    let result = Measured {
        rows,
        steps: steps.len(),
        predicted_ms: median(&predicted),
        measured_ms: median(&measured),
        median_error: median(&errors),
        p95_error: quantile(&errors, 0.95),
        worst_error: quantile(&errors, 1.0),
        drift: (all_measured - all_predicted) / all_predicted,
    };
    Ok((result, errors))
}

fn table(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["rows", "steps", "predicted", "measured", "median error", "95 %", "worst", "drift"]);
    for row in &report.results {
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        table.add_row([
            row.rows.to_string(),
            row.steps.to_string(),
            format!("{:.2} ms", row.predicted_ms),
            format!("{:.2} ms", row.measured_ms),
            percent(row.median_error),
            percent(row.p95_error),
            percent(row.worst_error),
            percent(row.drift),
        ]);
    }
    format!(
        "{} stages, time scale {}, a bare hop takes {:.2} ms\n{table}",
        report.stages.len(),
        report.time_scale,
        report.bare_hop_ms
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(stages: u32, time_scale: f64) -> Setup {
        let shape = devices::model();
        let profiles = devices::profiles().unwrap().into_iter().cycle().take(stages as usize).collect();
        Setup { profiles, ranges: shape.split(stages).unwrap(), shape, time_scale }
    }

    #[test]
    fn a_step_is_predicted_to_take_what_its_stages_take_in_this_hosts_time() {
        let whole = setup(2, 1.0).predict(4, 100).unwrap();
        assert!(whole > 1.0 && setup(2, 1.0).predict(8, 100).unwrap() > whole);
        assert!((setup(2, 0.5).predict(4, 100).unwrap() / whole - 0.5).abs() < 1e-9);
        let bare = setup(2, 1.0).bare().unwrap().predict(1, 0).unwrap();
        assert!(bare < 0.01, "{bare}");
    }

    #[test]
    fn errors_are_shares_of_what_was_predicted() {
        let setup = setup(2, 1.0);
        let predicted = setup.predict(1, 50).unwrap();
        let step = |factor: f64| Step { depth: 50, measured_ms: predicted * factor };
        let (measured, errors) = compare(&setup, 1, &[step(1.0), step(1.02), step(0.96)]).unwrap();
        assert!((measured.median_error - 0.02).abs() < 1e-9 && (measured.worst_error - 0.04).abs() < 1e-9);
        assert!((measured.drift + 0.02 / 3.0).abs() < 1e-9, "{}", measured.drift);
        assert_eq!(errors.len(), 3);
    }
}
