//! `shoal bench profile-accuracy`: whether the few blocks that a profile measures foretell the whole model's times.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use cluster::Bytes;
use comfy_table::{Table, presets};
use node::default_threads;
use profiler::Accuracy;
use serde::Serialize;

use super::parts::{Parts, Terms};
use crate::cli::Globals;
use crate::commands::model;
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::ProgressView;

/// Tokens per slot: what the deepest decode step and the longest prompt need.
const CONTEXT: u32 = 2048;

/// Arguments of `shoal bench profile-accuracy`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench profile-accuracy -m SmolLM2
  shoal bench profile-accuracy -m SmolLM2 --json

The whole model is loaded too: this is about models that fit this host.")]
pub(crate) struct ProfileAccuracyArgs {
    #[command(flatten)]
    model: model::ModelArg,
    /// CPU threads [default: the physical cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Seconds, roughly [default: 90].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    model: String,
    threads: u32,
    #[serde(flatten)]
    accuracy: Accuracy,
}

/// Measures and prints.
pub(crate) fn run(args: &ProfileAccuracyArgs, globals: &Globals) -> Result<()> {
    let interrupt = Interrupt::listen()?;
    let threads = args.threads.unwrap_or_else(|| default_threads(1));
    let budget = args.seconds.map(|seconds| Duration::from_secs(seconds.into()));
    let terms = Terms { threads, n_ctx: CONTEXT, budget };
    let parts = Parts::cut(&args.model, &terms, globals, &interrupt)?;
    let mut view = ProgressView::new();
    let accuracy = profiler::accuracy(&parts.request(), &mut |step| {
        view.show_share(&step.what, step.done, step.total);
        interrupt.check()
    })?;
    view.finish();
    let report = Report { model: parts.file.name(), threads, accuracy };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&table(&report))?
    }
    Ok(())
}

fn table(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["call", "rows", "depth", "predicted", "measured", "error"]);
    for point in &report.accuracy.points {
        table.add_row([
            point.phase.to_string(),
            point.rows.to_string(),
            point.depth.to_string(),
            format!("{:.2} ms", point.predicted_ms),
            format!("{:.2} ms", point.measured_ms),
            format!("{:.1} %{}", point.error * 100.0, if point.noisy { ", noisy" } else { "" }),
        ]);
    }
    let Accuracy { median_error, worst_error, peak_resident_bytes, .. } = report.accuracy;
    format!(
        "{}, {} threads\n{table}\nmedian error {:.1} %, worst {:.1} %; processes with parts held at most {}",
        report.model,
        report.threads,
        median_error * 100.0,
        worst_error * 100.0,
        Bytes(peak_resident_bytes)
    )
}
