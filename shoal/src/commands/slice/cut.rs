//! `shoal slice cut`: slices as files, to look at or to carry to other hosts.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use cluster::{Bytes, LayerRange};
use gguf::cut::{CutOptions, Uncertified};
use node::{CutRequest, Existing, Origin, SliceFolder, StoredFile, StoredSlices, model_hash};
use serde::Serialize;

use crate::cli::Globals;
use crate::commands::model;
use crate::cuts::Cuts;
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::ProgressView;

/// Arguments of `shoal slice cut`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal slice cut model.gguf --cuts 10,20 -o slices   0-10.gguf, 10-20.gguf, …, embedding.gguf
  shoal slice cut model.gguf --cuts every -o slices   a slice for each block

Complete files that are there already are kept. `shoal serve` cuts by itself.")]
pub(crate) struct CutArgs {
    #[command(flatten)]
    model: model::ModelArg,
    /// First blocks of the second and later slices, such as 10,20; or `every`.
    #[arg(long, value_name = "BLOCKS")]
    cuts: Cuts,
    /// Folder for the slices.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Cut architectures for which no test shows that slices compute what the whole model does.
    #[arg(long)]
    allow_uncertified: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct CutReport {
    model: String,
    hash: String,
    slices: Vec<FileReport>,
    embedding: FileReport,
}

#[derive(Serialize)]
struct FileReport {
    layers: Option<LayerRange>,
    path: PathBuf,
    bytes: u64,
    written: bool,
}

/// Cuts, and prints what was written.
pub(crate) fn run(args: &CutArgs, globals: &Globals) -> Result<()> {
    let folders = model::folders(globals)?;
    let file = args.model.open(&folders)?;
    let ranges = args.cuts.ranges(file.shape())?;
    let uncertified = if args.allow_uncertified { Uncertified::Allow } else { Uncertified::Refuse };
    let interrupt = Interrupt::listen()?;
    let mut view = ProgressView::new();
    let mut observer = |progress: node::Progress| {
        view.show(&progress);
        interrupt.check()
    };
    let hash = model_hash(file.parts(), &folders.model_hashes(), &mut observer)?;
    let request = CutRequest { model: &file, hash, ranges: &ranges, options: CutOptions { uncertified } };
    let stored = SliceFolder::new(args.output.clone(), Existing::Refuse).ensure(&request, &mut observer)?;
    view.finish();
    let report = report(file.name(), hash.to_string(), &ranges, &stored);
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report))?
    }
    Ok(())
}

fn report(model: String, hash: String, ranges: &[LayerRange], stored: &StoredSlices) -> CutReport {
    let file = |layers: Option<LayerRange>, file: &StoredFile| FileReport {
        layers,
        path: file.path.clone(),
        bytes: file.bytes.0,
        written: file.origin == Origin::Written,
    };
    let slices =
        ranges.iter().zip(&stored.slices).map(|(&layers, slice)| file(Some(layers), slice)).collect();
    CutReport { model, hash, slices, embedding: file(None, &stored.embedding) }
}

fn text(report: &CutReport) -> String {
    let line = |file: &FileReport| {
        let origin = if file.written { "written" } else { "kept" };
        format!("{}  {} {origin}", file.path.display(), Bytes(file.bytes))
    };
    let files = report.slices.iter().chain([&report.embedding]);
    files.map(line).collect::<Vec<_>>().join("\n")
}
