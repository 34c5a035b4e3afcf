//! `shoal bench idle-gap`: what waiting between two calls costs the second of them.
//!
//! The experiment itself, and what its numbers mean, is `profiler::idle_gap`.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Args;
use cluster::{Millis, ModelShape};
use comfy_table::{Table, presets};
use node::default_threads;
use profiler::idle_gap::{Experiment, Gaps, Point, Setup, slices_for, svg};
use profiler::statistics::Quartiles;
use serde::Serialize;

use crate::cli::Globals;
use crate::commands::model::{self, BorrowedSlices};
use crate::cuts::Cuts;
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::ProgressView;

/// Arguments of `shoal bench idle-gap`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench idle-gap -m SmolLM2
  shoal bench idle-gap -m SmolLM2 --cuts 5,15,25 --gaps 0,1,2,5,10,25 --svg idle-gap.svg
  shoal bench idle-gap -m SmolLM2 --cuts 10 --json

`extra` is the time that a gap adds to each token beside itself. That of gap 0 is noise: no other that is as small
says anything.")]
pub(crate) struct IdleGapArgs {
    #[command(flatten)]
    model: model::ModelArg,
    /// First blocks of the measured slices, each of which reaches to the model's end, such as 5,15,25; or `every`
    /// [default: three, spread over the model].
    #[arg(long, value_name = "BLOCKS")]
    cuts: Option<Cuts>,
    /// Gaps between the calls, in milliseconds; 0 is always measured [default: 0,1,2,5,10,25].
    #[arg(long, value_name = "MS")]
    gaps: Option<GapList>,
    /// Tokens of one replay.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    tokens: u32,
    /// Replays of each cut with each gap, not counting the first, which warms up.
    #[arg(long, value_name = "N", default_value_t = 21, value_parser = clap::value_parser!(u32).range(3..=1000))]
    repeat: u32,
    /// CPU threads [default: the physical cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Blocks of each slice to keep on GPUs.
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu_layers: u32,
    /// Also draw the result into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Gaps as they are written on the command line: `0,1,2.5`.
#[derive(Debug, Clone)]
struct GapList(Gaps);

impl FromStr for GapList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let gaps: Result<Vec<f64>, _> = text.split(',').map(|gap| gap.trim().parse()).collect();
        let gaps =
            gaps.map_err(|_| format!("{text:?} is not a list of gaps in milliseconds like 0,1,2.5"))?;
        let gaps: Vec<Millis> = gaps.into_iter().map(Millis).collect();
        Gaps::new(&gaps).map(Self).map_err(|error| error.to_string())
    }
}

#[derive(Serialize)]
struct Report {
    model: String,
    blocks: u32,
    threads: u32,
    gpu_layers: u32,
    tokens: u32,
    repeat: u32,
    llama_cpp: &'static str,
    results: Vec<Measured>,
}

#[derive(Serialize)]
struct Measured {
    cut: u32,
    gap_ms: f64,
    /// The gap as it was.
    actual_gap_ms: f64,
    /// L(c, d), gap included.
    per_token_ms: Summary,
    /// ΔL(c, d) = L(c, d) − d − L(c, 0).
    extra_ms: Summary,
}

#[derive(Serialize)]
struct Summary {
    lower_quartile: f64,
    median: f64,
    upper_quartile: f64,
}

impl From<Quartiles> for Summary {
    fn from(of: Quartiles) -> Self {
        Self { lower_quartile: of.lower, median: of.median, upper_quartile: of.upper }
    }
}

impl From<&Point> for Measured {
    fn from(point: &Point) -> Self {
        Self {
            cut: point.cut,
            gap_ms: point.gap.0,
            actual_gap_ms: point.actual_gap.0,
            per_token_ms: point.per_token.into(),
            extra_ms: point.extra.into(),
        }
    }
}

/// Measures and prints.
pub(crate) fn run(args: &IdleGapArgs, globals: &Globals) -> Result<()> {
    let folders = model::folders(globals)?;
    let file = args.model.open(&folders)?;
    let interrupt = Interrupt::listen()?;
    let cuts = cuts(args.cuts.as_ref(), file.shape())?;
    let setup = Setup {
        threads: args.threads.unwrap_or_else(|| default_threads(1)),
        gpu_layers: args.gpu_layers,
        tokens: args.tokens,
    };
    let ranges = slices_for(&cuts, file.shape().n_layer())?;
    let slices = BorrowedSlices::cut(&file, &ranges, &folders, &interrupt)?;
    let mut experiment = Experiment::load(&file, slices.files(), &cuts, setup)?;
    let points = measure(&mut experiment, args, &interrupt)?;
    drop((experiment, slices));

    let name = file.name();
    if let Some(path) = &args.svg {
        let title = format!("{name}: what an idle gap adds to a call");
        std::fs::write(path, svg(&points, &title)).with_context(|| format!("writing {}", path.display()))?;
    }
    let report = Report {
        model: name,
        blocks: file.shape().n_layer(),
        threads: setup.threads,
        gpu_layers: setup.gpu_layers,
        tokens: args.tokens,
        repeat: args.repeat,
        llama_cpp: llama::version(),
        results: points.iter().map(Measured::from).collect(),
    };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&table(&report))?
    }
    Ok(())
}

/// Those asked for, or of the boundaries where the model can be cut those after a sixth, a half and five sixths.
fn cuts(asked: Option<&Cuts>, shape: &ModelShape) -> Result<Vec<u32>> {
    let starts = |ranges: Vec<cluster::LayerRange>| -> Vec<u32> {
        ranges.iter().skip(1).map(|range| range.start()).collect()
    };
    if let Some(cuts) = asked {
        return Ok(starts(cuts.ranges(shape)?));
    }
    let boundaries = starts(shape.finest_split());
    let mut chosen: Vec<u32> = [1, 3, 5]
        .iter()
        .filter_map(|sixths| boundaries.get(boundaries.len() * sixths / 6))
        .copied()
        .collect();
    chosen.dedup();
    Ok(chosen)
}

fn measure(experiment: &mut Experiment, args: &IdleGapArgs, interrupt: &Interrupt) -> Result<Vec<Point>> {
    let gaps = args.gaps.clone().map(|list| list.0).unwrap_or_default();
    let mut view = ProgressView::new();
    let points = experiment.run(&gaps, args.repeat, &mut |done, total| {
        view.show_share("replaying with gaps", done, total);
        interrupt.check()
    });
    Ok(points?)
}

fn table(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["cut", "gap", "as measured", "per token", "extra", "quartiles"]);
    for row in &report.results {
        let Summary { lower_quartile, median, upper_quartile } = row.extra_ms;
        table.add_row([
            row.cut.to_string(),
            format!("{} ms", row.gap_ms),
            format!("{:.2} ms", row.actual_gap_ms),
            format!("{:.2} ms", row.per_token_ms.median),
            format!("{median:+.2} ms"),
            format!("{lower_quartile:+.2} to {upper_quartile:+.2}"),
        ]);
    }
    let Report { model, blocks, threads, tokens, repeat, .. } = report;
    let head =
        format!("{model}, {blocks} blocks, {threads} threads, {repeat} replays of {tokens} tokens each");
    format!("{head}\n{table}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_read_as_people_write_them() {
        let read = |text: &str| text.parse::<GapList>().map(|list| list.0.all().to_vec());
        assert_eq!(read("5, 1,2.5"), Ok([0.0, 1.0, 2.5, 5.0].map(Millis).to_vec()));
        assert!(read("1,,2").unwrap_err().contains("not a list of gaps"));
        assert!(read("-1").unwrap_err().contains("between 0 and 1000 ms"));
        assert!(read("nan").is_err());
    }
}
