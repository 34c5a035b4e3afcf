//! `shoal slice info`: what a model is made of.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use cluster::{Attention, BlockShape, Bytes, FeedForward, ModelShape};
use comfy_table::{Table, presets};
use gguf::architectures::{self, Support};
use node::ModelFile;
use serde::Serialize;

use crate::cli::Globals;
use crate::commands::model;
use crate::output;

/// Arguments of `shoal slice info`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal slice info model.gguf
  shoal slice info SmolLM2 --json
  shoal slice info big-00002-of-00003.gguf   any part of a split model stands for all")]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    model: model::ModelArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Info<'a> {
    model: String,
    parts: &'a [PathBuf],
    bytes: u64,
    support: &'static str,
    reason: Option<&'static str>,
    kv_bytes_per_token: u64,
    #[serde(flatten)]
    shape: &'a ModelShape,
}

/// Prints the description.
pub(crate) fn run(args: &InfoArgs, globals: &Globals) -> Result<()> {
    let file = args.model.open(&model::folders(globals)?)?;
    let info = describe(&file);
    if args.json {
        output::print_json(&info)?
    } else {
        output::print(&table(&info))?
    }
    Ok(())
}

fn describe(file: &ModelFile) -> Info<'_> {
    let shape = file.shape();
    let known = architectures::find(&shape.architecture);
    let (support, reason) = match known.map_or(Support::Uncertified, |architecture| architecture.support) {
        Support::Certified => ("certified", None),
        Support::Uncertified => ("uncertified", None),
        Support::Refused(reason) => ("refused", Some(reason)),
    };
    let elements: u64 = shape.blocks.iter().map(|block| block.kv_elements_per_token).sum();
    Info {
        model: file.name(),
        parts: file.parts(),
        bytes: file.gguf().total_bytes(),
        support,
        reason,
        // f16, the default cache type.
        kv_bytes_per_token: elements * 2,
        shape,
    }
}

fn table(info: &Info<'_>) -> String {
    let shape = info.shape;
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row("model", info.model.clone());
    row("name", shape.name.clone().unwrap_or_default());
    row("architecture", architecture(info));
    row("size", format!("{} in {} file(s)", Bytes(info.bytes), info.parts.len()));
    row("blocks", shape.n_layer().to_string());
    row("hidden width", shape.n_embd.to_string());
    row("heads (query / key and value)", format!("{} / {}", span(&shape.n_head), span(&shape.n_head_kv)));
    row("trained context", format!("{} tokens", shape.n_ctx_train));
    row("vocabulary", format!("{} tokens", shape.n_vocab));
    row("embedding", shape.embedding_bytes.to_string());
    row("head", format!("{}{}", shape.head_bytes, if shape.tied { ", tied to the embedding" } else { "" }));
    row("in every slice", shape.global_bytes.to_string());
    if let Some(experts) = shape.experts {
        row("experts", format!("{} per block, {} used", experts.count, experts.used));
    }
    row("cache per token (f16)", Bytes(info.kv_bytes_per_token).to_string());
    for group in groups(&shape.blocks) {
        row(&format!("blocks {}..{}", group.start, group.end), group_text(&group));
    }
    table.to_string()
}

fn architecture(info: &Info<'_>) -> String {
    let reason = info.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    format!("{} ({}{reason})", info.shape.architecture, info.support)
}

/// Blocks in a row that are alike, sizes aside.
struct Group<'a> {
    start: usize,
    end: usize,
    blocks: &'a [BlockShape],
}

fn groups(blocks: &[BlockShape]) -> Vec<Group<'_>> {
    let mut start = 0;
    let runs = blocks.chunk_by(|a, b| a.kind == b.kind && a.kv_elements_per_token == b.kv_elements_per_token);
    runs.map(|blocks| {
        let group = Group { start, end: start + blocks.len(), blocks };
        start = group.end;
        group
    })
    .collect()
}

fn group_text(group: &Group<'_>) -> String {
    let Some(first) = group.blocks.first() else { return String::new() };
    let attention = match first.kind.attention {
        Attention::Full => "full attention".to_owned(),
        Attention::SlidingWindow { window } => format!("attention to the last {window} tokens"),
        Attention::Recurrent => format!("recurrent, {} per slot", first.state_bytes_per_slot),
    };
    let feed_forward = match first.kind.feed_forward {
        FeedForward::Dense => "dense",
        FeedForward::MixtureOfExperts => "mixture of experts",
    };
    let sizes = || group.blocks.iter().map(|block| block.weight_bytes);
    let (least, most) = (sizes().min().unwrap_or_default(), sizes().max().unwrap_or_default());
    let size = if least == most { least.to_string() } else { format!("{least} to {most}") };
    format!("{attention}, {feed_forward}, {size} each")
}

fn span(counts: &[u32]) -> String {
    let (least, most) =
        (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0));
    if least == most { least.to_string() } else { format!("{least} to {most}") }
}
