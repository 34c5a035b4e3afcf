//! `shoal simulate`: what requests go through under a plan.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Result, anyhow};
use clap::{Args, ValueEnum};
use cluster::Plan;
use comfy_table::{Table, presets};
use planner::sim::{Bounds, Policy, Report, RoundRobin, ShortestCount, ShortestWork, requests, simulate};
use planner::{ObjectiveKind, StageUse, cluster_of, too_large, utilisation};
use protocol::plan_files::PlanFile;
use serde::Serialize;

use crate::cli::Globals;
use crate::commands::planning::{Inputs, ProblemArgs, explained, print_notes, read_file, use_trace};
use crate::interrupt::Interrupt;
use crate::output;
use profiler::statistics::quantile;

/// Points in time at which queues are noted.
const SAMPLES: usize = 60;

/// Arguments of `shoal simulate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal simulate --plan plan.json --cluster cluster.json --model model.json --workload workload.toml --profiles profiles.json
  shoal simulate --plan plan.json … --trace requests.jsonl --policy shortest-count --json

A trace has a line for each request: {\"at_ms\": 0, \"prompt\": 812, \"output\": 240}.")]
pub(crate) struct SimulateArgs {
    /// A plan, as `shoal plan -o` writes it (docs/schema/plan.schema.json).
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    #[command(flatten)]
    problem: ProblemArgs,
    /// Requests as they were recorded, instead of the workload's.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How requests are given to replicas.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = PolicyArg::ShortestWork)]
    policy: PolicyArg,
    /// The seed of the workload's requests: one seed, one result.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// How requests are given to replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyArg {
    /// Where the least predicted work waits, the request's own included.
    ShortestWork,
    /// Where the fewest requests wait: the paper's.
    ShortestCount,
    /// One after the other.
    RoundRobin,
}

#[derive(Serialize)]
struct Outcome {
    requests: usize,
    /// When the last token was out.
    end_s: f64,
    wait_s: Spread,
    ttft_s: Spread,
    tpot_ms: Spread,
    tokens_per_second: f64,
    /// Share of requests generated more slowly than asked for.
    below_min_rate: f64,
    replicas: Vec<ReplicaUse>,
    /// Requests that wait, over time.
    queues: Vec<Queues>,
    events: u64,
    notes: Vec<String>,
}

/// A number that differs between requests.
#[derive(Serialize)]
struct Spread {
    mean: f64,
    median: f64,
    p95: f64,
    max: f64,
}

#[derive(Serialize)]
struct ReplicaUse {
    role: String,
    requests_prefilled: usize,
    requests_decoded: usize,
    /// Share of the time in which its network card sent caches.
    sending: f64,
    stages: Vec<StageEntry>,
}

/// Shares of the time.
#[derive(Serialize)]
struct StageEntry {
    device: String,
    computing: f64,
    /// The link out of it carried hidden rows.
    link: f64,
}

#[derive(Serialize)]
struct Queues {
    at_s: f64,
    /// Requests that wait for prefill, and for a decode slot.
    prefill: u32,
    decode: u32,
}

/// Simulates and prints.
pub(crate) fn run(args: &SimulateArgs, globals: &Globals) -> Result<()> {
    let interrupt = Interrupt::listen()?;
    let Inputs { mut problem, mut notes, .. } = args.problem.read(globals, &interrupt)?;
    if let Some(path) = &args.trace {
        use_trace(&mut problem.workload, path)?;
    }
    let plan = read_file::<PlanFile>(&args.plan)?.plan()?;
    let settings = args.problem.settings(ObjectiveKind::Queue);
    let cluster = cluster_of(&problem, &settings, &plan).map_err(explained)?;
    for number in too_large(&problem, &settings, &plan).map_err(explained)? {
        notes.push(format!("replica {number} needs more memory than its devices have"));
    }
    let mut policy: Box<dyn Policy> = match args.policy {
        PolicyArg::ShortestWork => Box::new(ShortestWork),
        PolicyArg::ShortestCount => Box::new(ShortestCount),
        PolicyArg::RoundRobin => Box::new(RoundRobin::default()),
    };
    let drawn = requests(&problem.workload, args.seed);
    let bounds = Bounds { samples: SAMPLES, ..Bounds::default() };
    let report = simulate(&cluster, &drawn, policy.as_mut(), bounds).ok_or_else(|| {
        anyhow!("the plan serves nothing: it needs a replica that prefills, one that decodes, and a link")
    })?;
    let used = utilisation(&problem, &settings, &plan, &report).map_err(explained)?;
    let sending = report.utilisation(&cluster).into_iter().map(|(_, _, sending)| sending);
    let summary = report.summary(1.0 / problem.workload.min_rate.0);
    let of = |value: &dyn Fn(&planner::sim::Served) -> f64| -> Spread {
        spread(&report.served.iter().map(value).collect::<Vec<_>>())
    };
    let outcome = Outcome {
        requests: report.served.len(),
        end_s: report.end,
        wait_s: of(&|served| served.wait()),
        ttft_s: of(&|served| served.ttft()),
        tpot_ms: of(&|served| served.tpot() * 1e3),
        tokens_per_second: summary.throughput,
        below_min_rate: summary.below_min_rate,
        replicas: replicas(&plan, &report, used.into_iter().zip(sending)),
        queues: report
            .queues
            .iter()
            .map(|&(at_s, prefill, decode)| Queues { at_s, prefill, decode })
            .collect(),
        events: report.events,
        notes,
    };
    print_notes(&outcome.notes)?;
    if args.json {
        output::print_json(&outcome)?
    } else {
        output::print(&text(&outcome))?
    }
    Ok(())
}

fn spread(values: &[f64]) -> Spread {
    Spread {
        mean: values.iter().sum::<f64>() / values.len().max(1) as f64,
        median: quantile(values, 0.5),
        p95: quantile(values, 0.95),
        max: values.iter().copied().fold(0.0, f64::max),
    }
}

fn replicas(
    plan: &Plan,
    report: &Report,
    used: impl Iterator<Item = (Vec<StageUse>, f64)>,
) -> Vec<ReplicaUse> {
    let of =
        |(number, (replica, (stages, sending))): (usize, (&cluster::ReplicaPlan, (Vec<StageUse>, f64)))| {
            let stage = |(stage, used): (&cluster::StagePlan, StageUse)| StageEntry {
                device: stage.device.0.clone(),
                computing: used.stage,
                link: used.link,
            };
            ReplicaUse {
                role: replica.role.to_string(),
                requests_prefilled: report
                    .served
                    .iter()
                    .filter(|served| served.prefilled_by == number)
                    .count(),
                requests_decoded: report.served.iter().filter(|served| served.decoded_by == number).count(),
                sending,
                stages: replica.stages.iter().zip(stages).map(stage).collect(),
            }
        };
    plan.replicas.iter().zip(used).enumerate().map(of).collect()
}

fn text(outcome: &Outcome) -> String {
    let mut out = format!(
        "{} requests in {:.1} s, {:.1} tok/s generated",
        outcome.requests, outcome.end_s, outcome.tokens_per_second
    );
    if outcome.below_min_rate > 0.0 {
        let _ = write!(out, ", {:.0} % of requests slower than asked for", outcome.below_min_rate * 100.0);
    }
    let _ = writeln!(out, "\n{}\n{}", times(outcome), usage(outcome));
    let line = |of: fn(&Queues) -> u32| sparkline(&outcome.queues.iter().map(of).collect::<Vec<_>>());
    let _ = writeln!(out, "waiting for prefill {}", line(|queues| queues.prefill));
    let _ = write!(out, "waiting for a slot  {}", line(|queues| queues.decode));
    out
}

fn times(outcome: &Outcome) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["", "mean", "median", "95 %", "longest"]);
    let rows =
        [("wait", &outcome.wait_s, "s"), ("TTFT", &outcome.ttft_s, "s"), ("TPOT", &outcome.tpot_ms, "ms")];
    for (name, spread, unit) in rows {
        let cell = |value: f64| format!("{value:.2} {unit}");
        table.add_row([
            name.to_owned(),
            cell(spread.mean),
            cell(spread.median),
            cell(spread.p95),
            cell(spread.max),
        ]);
    }
    table
}

fn usage(outcome: &Outcome) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["role", "device", "computing", "link", "sending caches", "prefilled", "decoded"]);
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    for replica in &outcome.replicas {
        for (place, stage) in replica.stages.iter().enumerate() {
            let master = if place + 1 == replica.stages.len() { "*" } else { "" };
            let of_replica = |cell: String| if place == 0 { cell } else { String::new() };
            table.add_row([
                of_replica(replica.role.clone()),
                format!("{}{master}", stage.device),
                percent(stage.computing),
                percent(stage.link),
                of_replica(percent(replica.sending)),
                of_replica(replica.requests_prefilled.to_string()),
                of_replica(replica.requests_decoded.to_string()),
            ]);
        }
    }
    table
}

/// Numbers over time as a line of bars, and the largest.
fn sparkline(values: &[u32]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().copied().max().unwrap_or(0);
    // Any request that waits is seen.
    let height = |value: u32| (value as usize * 7).div_ceil(most.max(1) as usize).min(7);
    let bars: String = values.iter().map(|&value| BARS[height(value)]).collect();
    format!("{bars} at most {most}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_bars_shows_what_waits() {
        assert_eq!(sparkline(&[0, 1, 50, 100]), "▁▂▅█ at most 100");
        assert_eq!(sparkline(&[0, 0]), "▁▁ at most 0");
    }

    #[test]
    fn a_spread_is_of_all_values() {
        let spread = spread(&[1.0, 2.0, 3.0, 10.0]);
        assert_eq!((spread.mean, spread.median, spread.max), (4.0, 2.5, 10.0));
    }
}
