//! A profile for people.

use anyhow::Result;
use cluster::{Attention, BlockKind, Bytes, DeviceProfile, FeedForward, ProcessorProfile};
use comfy_table::{Table, presets};
use protocol::plan_files::{MeasuredEntry, ProfileEntry, ProfilesFile};

/// Columns of decode steps.
const BATCHES: [f64; 4] = [1.0, 4.0, 8.0, 32.0];

const DEEP: f64 = 4096.0;

const CHUNK: f64 = 512.0;

/// Every device in the file.
pub(super) fn text(file: &ProfilesFile) -> Result<String> {
    let texts = file.profiles.iter().map(|entry| Ok(device(entry, &entry.profile()?)));
    Ok(texts.collect::<Result<Vec<_>>>()?.join("\n\n"))
}

fn device(entry: &ProfileEntry, profile: &DeviceProfile) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    let mut header = vec!["on".to_owned(), "part".to_owned()];
    header.extend(BATCHES.map(|rows| format!("{rows} rows")));
    header.extend([format!("1 row at {DEEP}"), format!("prefill {CHUNK}")]);
    table.set_header(header);
    for (name, processor) in [("GPU", &profile.gpu), ("CPU", &profile.cpu)] {
        if let Some(processor) = processor {
            rows(name, processor).into_iter().for_each(|row| {
                table.add_row(row);
            });
        }
    }
    let measured = entry.measured.as_deref();
    let model = measured.map_or(entry.model.as_str(), |measured| measured.model_name.as_str());
    let mut text = format!("{}: {model}, {}, times in ms\n{table}", entry.device, entry.runtime);
    for line in [memory(profile), measured.map(facts).unwrap_or_default()] {
        if !line.is_empty() {
            text = format!("{text}\n{line}");
        }
    }
    text
}

fn rows(name: &str, processor: &ProcessorProfile) -> Vec<Vec<String>> {
    let ms = |time: f64| format!("{time:.3}");
    let mut rows = Vec::new();
    for block in &processor.blocks {
        let mut row = vec![name.to_owned(), kind(block.kind)];
        row.extend(BATCHES.map(|n| ms(block.decode.at(n, 0.0).0)));
        row.extend([ms(block.decode.at(1.0, DEEP).0), ms(block.prefill.at(CHUNK, 0.0).0)]);
        rows.push(row);
    }
    let surfaces = [("head", Some(&processor.head)), ("call", processor.call.as_ref())];
    for (part, surface) in surfaces {
        let Some(surface) = surface else { continue };
        let mut row = vec![name.to_owned(), part.to_owned()];
        row.extend(BATCHES.map(|n| ms(surface.at(n, 0.0).0)));
        rows.push(row);
    }
    rows
}

fn kind(kind: BlockKind) -> String {
    let attention = match kind.attention {
        Attention::Full => "attention".to_owned(),
        Attention::SlidingWindow { window } => format!("window of {window}"),
        Attention::Recurrent => "recurrent".to_owned(),
    };
    match kind.feed_forward {
        FeedForward::Dense => attention,
        FeedForward::MixtureOfExperts => format!("{attention}, experts"),
    }
}

fn memory(profile: &DeviceProfile) -> String {
    let mut text = format!("hop {}", profile.hop_overhead);
    if let Some(embedding) = &profile.embedding {
        text = format!("{text}, embedding {:.3} ms a row", embedding.at(1.0, 0.0).0);
    }
    if let Some(costs) = &profile.memory {
        text = format!(
            "{text}; a stage takes {} and, for each row at once, {} and {} for each token of a slot",
            costs.runtime, costs.row, costs.row_and_cell
        );
    }
    text
}

fn facts(measured: &MeasuredEntry) -> String {
    let noisy = measured.measurements.iter().filter(|measurement| measurement.noisy).count();
    let mut text = format!(
        "{} measurements, {noisy} of them noisy, with {} threads; the measuring processes held at most {}",
        measured.measurements.len(),
        measured.threads,
        Bytes(measured.peak_resident_bytes),
    );
    for failure in &measured.failures {
        text = format!("{text}\n{}: {}", failure.what, failure.reason);
    }
    text
}
