//! A plan as words: the rows of the paper's table of replicas, and one line.

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
