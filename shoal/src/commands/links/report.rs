//! What was found, as a table and as JSON.

use comfy_table::{CellAlignment, Table, presets};
use node::links::{LinkOutcome, SettledLink};
use protocol::node::{DeviceFacts, DeviceKind};
use serde::Serialize;

use super::{Found, Missing};

/// A row for each sender, a column for each receiver, and below it what failed.
pub(super) fn text(found: &Found) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    let names = || found.nodes.iter().map(|node| node.name().0.clone());
    table.set_header(["from \\ to".to_owned()].into_iter().chain(names()));
    for from in names() {
        let cells = names().map(|to| cell(found, &from, &to));
        table.add_row([from.clone()].into_iter().chain(cells));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let failed = found.links.iter().filter_map(|link| {
        link.outcome.as_ref().err().map(|reason| format!("{} → {}: {reason}", link.from, link.to))
    });
    let missing =
        found.missing.iter().map(|Missing { address, reason }| format!("{address}: not reached: {reason}"));
    let legend = "Mbit/s that one stream sustains; round trip: middle (99th percentile)".to_owned();
    [table.to_string(), legend].into_iter().chain(failed).chain(missing).collect::<Vec<_>>().join("\n")
}

fn cell(found: &Found, from: &str, to: &str) -> String {
    let link = found.links.iter().find(|link| link.from.0 == from && link.to.0 == to);
    match link.map(|link| &link.outcome) {
        None => String::new(),
        Some(Err(_)) => "failed".to_owned(),
        Some(Ok(link)) => {
            format!("{:.0} Mbit/s\n{:.2} ({:.2}) ms", mbit(link), link.round_trip.0, link.round_trip_p99.0)
        }
    }
}

fn mbit(link: &SettledLink) -> f64 {
    link.quality.bandwidth.mbit()
}

#[derive(Serialize)]
pub(super) struct Report {
    nodes: Vec<NodeReport>,
    unreachable: Vec<Unreachable>,
    links: Vec<LinkReport>,
    failed: Vec<FailedLink>,
}

#[derive(Serialize)]
struct NodeReport {
    name: String,
    address: String,
    version: String,
    llama_cpp: String,
    emulated: bool,
    memory_total_bytes: u64,
    memory_available_bytes: u64,
    devices: Vec<DeviceReport>,
}

#[derive(Serialize)]
struct DeviceReport {
    name: String,
    description: String,
    kind: &'static str,
    memory_total_bytes: u64,
    memory_free_bytes: u64,
}

#[derive(Serialize)]
struct Unreachable {
    address: String,
    reason: String,
}

#[derive(Serialize)]
struct LinkReport {
    from: String,
    to: String,
    address: String,
    mbit_per_s: f64,
    one_way_ms: f64,
    round_trip_median_ms: f64,
    round_trip_p99_ms: f64,
    /// Of the pieces of a stream: (largest − smallest) / middle.
    bandwidth_spread: f64,
    measurements: usize,
    frames: Vec<FrameReport>,
}

#[derive(Serialize)]
struct FrameReport {
    rows: u32,
    bytes: u64,
    one_way_median_ms: f64,
    one_way_p99_ms: f64,
}

#[derive(Serialize)]
struct FailedLink {
    from: String,
    to: String,
    reason: String,
}

/// Everything.
pub(super) fn json(found: &Found) -> Report {
    let nodes = found.nodes.iter().map(|node| {
        let facts = node.facts();
        NodeReport {
            name: facts.name.0.clone(),
            address: node.address().to_string(),
            version: facts.build.version.clone(),
            llama_cpp: facts.build.llama_cpp.clone(),
            emulated: facts.emulated,
            memory_total_bytes: facts.memory_total.0,
            memory_available_bytes: facts.memory_available.0,
            devices: facts.devices.iter().map(device).collect(),
        }
    });
    let unreachable = found
        .missing
        .iter()
        .map(|missing| Unreachable { address: missing.address.to_string(), reason: missing.reason.clone() });
    Report {
        nodes: nodes.collect(),
        unreachable: unreachable.collect(),
        links: found.links.iter().filter_map(|link| measured(link, found.n_embd)).collect(),
        failed: found.links.iter().filter_map(failed).collect(),
    }
}

fn device(device: &DeviceFacts) -> DeviceReport {
    DeviceReport {
        name: device.name.clone(),
        description: device.description.clone(),
        kind: match device.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Gpu => "gpu",
            DeviceKind::IntegratedGpu => "integrated_gpu",
        },
        memory_total_bytes: device.memory_total.0,
        memory_free_bytes: device.memory_free.0,
    }
}

fn measured(link: &LinkOutcome, n_embd: u32) -> Option<LinkReport> {
    let settled = link.outcome.as_ref().ok()?;
    let frames = settled.frames.iter().map(|frame| FrameReport {
        rows: frame.rows,
        bytes: u64::from(frame.rows) * u64::from(n_embd) * 4,
        one_way_median_ms: frame.one_way.0,
        one_way_p99_ms: frame.one_way_p99.0,
    });
    Some(LinkReport {
        from: link.from.0.clone(),
        to: link.to.0.clone(),
        address: settled.address.to_string(),
        mbit_per_s: mbit(settled),
        one_way_ms: settled.quality.one_way_latency.0,
        round_trip_median_ms: settled.round_trip.0,
        round_trip_p99_ms: settled.round_trip_p99.0,
        bandwidth_spread: settled.bandwidth_spread,
        measurements: settled.measurements,
        frames: frames.collect(),
    })
}

fn failed(link: &LinkOutcome) -> Option<FailedLink> {
    let reason = link.outcome.as_ref().err()?.clone();
    Some(FailedLink { from: link.from.0.clone(), to: link.to.0.clone(), reason })
}
