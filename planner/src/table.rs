//! A plan as text: the paper's table of replicas, and one line.

use std::fmt::Write as _;

use cluster::{Plan, ReplicaPlan, Role};

/// A plan in one line: `P[Dev.1 26-22] D9[Dev.2 7-3 | Dev.7 19-0 | Dev.8* 19-0]`.
pub fn in_short(plan: &Plan) -> String {
    let replicas = plan.replicas.iter().map(|replica| {
        let stages: Vec<String> = replica
            .stages
            .iter()
            .map(|stage| format!("{} {}-{}", stage.device, stage.gpu_blocks, stage.cpu_blocks()))
            .collect();
        format!("{}[{}]", short_role(replica), stages.join(" | "))
    });
    replicas.collect::<Vec<_>>().join(" ")
}

fn short_role(replica: &ReplicaPlan) -> String {
    match replica.role {
        Role::Prefill => "P".to_owned(),
        Role::Decode => format!("D{}", replica.slots),
        Role::Mixed => format!("M{}", replica.slots),
    }
}

/// A row of the table of replicas: role, device, slots, G–C, blocks, load, rates, limit. Cells that belong to the whole
/// replica are on its first row only.
pub fn rows(plan: &Plan) -> Vec<[String; 9]> {
    let mut rows = Vec::new();
    for replica in &plan.replicas {
        for (place, stage) in replica.stages.iter().enumerate() {
            let first = place == 0;
            let of_replica = |cell: String| if first { cell } else { String::new() };
            let master = if place + 1 == replica.stages.len() { "*" } else { "" };
            rows.push([
                of_replica(replica.role.to_string()),
                format!("{}{master}", stage.device),
                of_replica(replica.slots.to_string()),
                format!("{}-{}", stage.gpu_blocks, stage.cpu_blocks()),
                stage.layers.to_string(),
                format!("{:.0} %", stage.load * 100.0),
                of_replica(rate(replica.prefill_rate.0)),
                of_replica(rate(replica.decode_rate.0)),
                of_replica(replica.limit.to_string()),
            ]);
        }
    }
    rows
}

/// Titles of [`rows`].
pub const TITLES: [&str; 9] =
    ["role", "device", "slots", "G-C", "blocks", "load", "prefill tok/s", "decode tok/s", "limited by"];

fn rate(tokens_per_second: f64) -> String {
    if tokens_per_second > 0.0 { format!("{tokens_per_second:.0}") } else { "-".to_owned() }
}

/// The whole plan as plain text, aligned.
pub fn text(plan: &Plan) -> String {
    let rows = rows(plan);
    let mut widths = TITLES.map(str::len);
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let line = |out: &mut String, cells: &[&str]| {
        let padded: Vec<String> =
            cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(out, "{}", padded.join("  ").trim_end());
    };
    line(&mut out, &TITLES);
    for row in &rows {
        line(&mut out, &row.each_ref().map(String::as_str));
    }
    if !plan.idle.is_empty() {
        let idle: Vec<&str> = plan.idle.iter().map(|device| device.0.as_str()).collect();
        let _ = writeln!(out, "idle: {}", idle.join(", "));
    }
    let predicted = &plan.prediction;
    let _ = writeln!(
        out,
        "PS {:.0} tok/s, DS {:.0} tok/s; TTFT {:.2} s, TPOT {:.1} ms, wait {:.2} s (longest {:.2} s)",
        plan.prefill_rate().0,
        plan.decode_rate().0,
        predicted.ttft.0 / 1e3,
        predicted.tpot.0,
        predicted.wait.0 / 1e3,
        predicted.max_wait.0 / 1e3,
    );
    out
}
