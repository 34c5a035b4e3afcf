//! `shoal plan`: which devices form which replica.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use cluster::{Plan, Prediction, Role};
use comfy_table::{Table, presets};
use deploy::StepView;
use planner::explain::{Explanation, Phase, explain};
use planner::suite::SEEDS;
use planner::{
    Doubt, Method, ObjectiveKind, Problem, Settings, Solution, Watch, draw, predict, solve_robust,
    solve_watched, table,
};
use protocol::plan_files::{PlanFile, PredictionEntry};
use serde::{Deserialize, Serialize};

use crate::cli::Globals;
use crate::commands::admin::AdminArgs;
use crate::commands::planning::{
    Inputs, ObjectiveArg, ProblemArgs, Shown, explained, print_notes, write_file,
};
use crate::interrupt::Interrupt;
use crate::output;

/// Arguments of `shoal plan`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal plan --cluster cluster.json --model model.json --workload workload.toml --profiles profiles.json
  shoal plan --cluster cluster.json -m SmolLM2 --workload workload.toml --profiles *.profile.json --compare
  shoal plan … --exclude laptop --robust -o plan.json --svg plan.svg
  shoal plan … --apply                          and have the orchestrator of this host's cluster carry it out
  shoal plan … --apply --dry-run --server http://desk:8080 --admin-key admin-key      only say which steps that would be

docs/examples/ has a file of each kind, docs/schema/ says what they may hold. A star marks a replica's master; G-C is the number of
blocks on the GPU and on the CPU.")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    problem: ProblemArgs,
    /// By what plans are judged.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = ObjectiveArg::Queue)]
    objective: ObjectiveArg,
    /// Also plan by the other objectives, and compare all of them on workloads that none was chosen by.
    #[arg(long)]
    compare: bool,
    /// Prefer the plan that is best at its 90th percentile where speeds, links and lengths are off by 10 to 15 %.
    #[arg(long)]
    robust: bool,
    /// Let stages begin only at these blocks, such as 8,16,24.
    #[arg(long, value_name = "BLOCKS", value_delimiter = ',')]
    cut_points: Option<Vec<u32>>,
    /// Do not look for what would help most, which plans again for every change that is tried.
    #[arg(long)]
    quick: bool,
    /// The seed of random choices: one seed, one plan.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write the plan to a file (docs/schema/plan.schema.json).
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Draw the plan.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Hand the plan to an orchestrator that runs (`shoal serve --cluster`), which carries it out: what it keeps of what runs is left
    /// alone.
    #[arg(long)]
    apply: bool,
    /// Hand it over, and say which steps it would take, but take none.
    #[arg(long, requires = "apply")]
    dry_run: bool,
    #[command(flatten)]
    admin: AdminArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    model: String,
    plan: PlanFile,
    /// In the objective's own seconds; lower is better.
    score: f64,
    /// A score that no plan can beat, where the objective allows to say one.
    bound: Option<f64>,
    method: &'static str,
    /// Plans or groupings that were looked at.
    judged: u64,
    /// What the search left undone since it would have taken too long.
    cut_short: Vec<String>,
    bottleneck: Option<&'static str>,
    next_best: Option<NextBest>,
    /// What would help most, the most helpful first.
    changes: Vec<Change>,
    comparison: Vec<Compared>,
    notes: Vec<String>,
    /// What the orchestrator made of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    applied: Option<Applied>,
}

/// A plan that was handed over.
#[derive(Serialize, Deserialize)]
struct Applied {
    plan: u64,
    dry_run: bool,
    /// The number of the decision for it, if there was one.
    decision: Option<u64>,
    steps: Vec<StepView>,
}

#[derive(Serialize)]
struct NextBest {
    in_short: String,
    plan: PlanFile,
    score: f64,
    /// Share of the score by which it is worse.
    worse_by: f64,
}

#[derive(Serialize)]
struct Change {
    what: String,
    score: f64,
    /// Share of the score that it saves.
    gain: f64,
}

/// One objective's plan, under the workloads that all are compared on.
#[derive(Serialize)]
struct Compared {
    objective: &'static str,
    plan: PlanFile,
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    prediction: PredictionEntry,
    in_short: String,
}

/// Plans and prints.
pub(crate) fn run(args: &PlanArgs, globals: &Globals) -> Result<()> {
    let interrupt = Interrupt::listen()?;
    let Inputs { problem, model, notes } = args.problem.read(globals, &interrupt)?;
    let shown = Shown::new(&interrupt);
    let of = |objective| Settings {
        cut_points: args.cut_points.clone(),
        seed: args.seed,
        ..args.problem.settings(objective)
    };
    let chosen = of(args.objective.kind());
    let solution = if args.robust {
        solve_robust(&problem, &chosen, &Doubt::default(), &shown)
    } else {
        solve_watched(&problem, &chosen, &shown)
    };
    let solution = solution.map_err(explained)?;
    let comparison =
        if args.compare { compare(&problem, &solution, (&of, args), &shown)? } else { Vec::new() };
    // The scores of a robust plan are percentiles, which a plain search for changes has not.
    let explanation = if args.quick || args.robust {
        None
    } else {
        Some(explain(&problem, &chosen, &solution, &shown).map_err(explained)?)
    };
    shown.finish();
    let mut report = report(model, (&solution, explanation.as_ref()), comparison, notes);
    if let Some(path) = &args.output {
        write_file(path, &format!("{}\n", serde_json::to_string_pretty(&report.plan)?))?;
    }
    if let Some(path) = &args.svg {
        let title = format!("{} on {} devices", report.model, problem.devices.len());
        write_file(path, &draw::svg(&solution.plan, &title))?;
    }
    if args.apply {
        report.applied = Some(apply(&report.plan, args, globals)?);
    }
    print_notes(&report.notes)?;
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report, &solution.plan, explanation.as_ref()))?
    }
    Ok(())
}

/// Hands a plan to the orchestrator.
fn apply(plan: &PlanFile, args: &PlanArgs, globals: &Globals) -> Result<Applied> {
    let admin = args.admin.open(globals)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("starting the async runtime")?.block_on(async {
        let none = || format!("{} carries out no plans: it was not started with --cluster", admin.server);
        let added = admin.post("/admin/v1/plans", &serde_json::to_value(plan)?).await?.with_context(none)?;
        let path = format!("/admin/v1/plans/{}/apply?dry_run={}", added["id"], args.dry_run);
        let applied = admin.post(&path, &serde_json::json!({})).await?.with_context(none)?;
        serde_json::from_value(applied).context("reading what the orchestrator said")
    })
}

/// Every objective's plan on seeds that none was chosen by.
fn compare(
    problem: &Problem,
    solution: &Solution,
    (of, args): (&dyn Fn(ObjectiveKind) -> Settings, &PlanArgs),
    watch: &dyn Watch,
) -> Result<Vec<Compared>> {
    let mut compared = Vec::new();
    for objective in ObjectiveKind::ALL {
        let settings = of(objective);
        let plan = if objective == args.objective.kind() {
            solution.plan.clone()
        } else {
            solve_watched(problem, &settings, watch).map_err(explained)?.plan
        };
        let prediction = predict(problem, &settings, &plan, &SEEDS).map_err(explained)?;
        let plan = Plan { prediction, ..plan };
        compared.push(Compared {
            objective: objective.name(),
            prefill_tokens_per_second: plan.prefill_rate().0,
            decode_tokens_per_second: plan.decode_rate().0,
            in_short: table::in_short(&plan),
            plan: PlanFile::new(&plan),
            prediction: PlanFile::new(&plan).prediction,
        });
    }
    Ok(compared)
}

fn report(
    model: String,
    (solution, explanation): (&Solution, Option<&Explanation>),
    comparison: Vec<Compared>,
    notes: Vec<String>,
) -> Report {
    Report {
        plan: PlanFile { model: Some(model.clone()), ..PlanFile::new(&solution.plan) },
        model,
        score: solution.score,
        bound: solution.bound,
        method: match solution.method {
            Method::Exact => "exact",
            Method::Simulated => "simulated",
            Method::Genetic => "genetic",
        },
        judged: solution.judged,
        cut_short: solution.cut_short.iter().map(ToString::to_string).collect(),
        bottleneck: explanation.map(|explanation| match explanation.bottleneck {
            Phase::Neither => "neither",
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
            Phase::Both => "both",
        }),
        next_best: solution.next_best().map(|(plan, score, worse_by)| NextBest {
            in_short: table::in_short(plan),
            plan: PlanFile::new(plan),
            score,
            worse_by,
        }),
        changes: explanation.map_or_else(Vec::new, |explanation| {
            let change = |of: &planner::explain::Change| Change {
                what: of.what.clone(),
                score: of.score,
                gain: of.gain,
            };
            explanation.changes.iter().map(change).collect()
        }),
        comparison,
        notes,
        applied: None,
    }
}

fn text(report: &Report, plan: &Plan, explanation: Option<&Explanation>) -> String {
    let found = match report.method {
        "exact" => "no plan is better",
        "simulated" => "the best of the most promising plans",
        _ => "the best that a bounded search found",
    };
    let mut out = format!(
        "{} by {}: {found}, of {} looked at\n{}\n",
        report.model,
        plan.objective,
        report.judged,
        replicas(plan)
    );
    for cut in &report.cut_short {
        let _ = writeln!(out, "cut short: {cut}");
    }
    if !plan.idle.is_empty() {
        let idle: Vec<&str> = plan.idle.iter().map(|device| device.0.as_str()).collect();
        let _ = writeln!(out, "idle: {}", idle.join(", "));
    }
    let _ = writeln!(
        out,
        "PS {:.0} tok/s, DS {:.0} tok/s{}; {}",
        plan.prefill_rate().0,
        plan.decode_rate().0,
        if plan.replicas.iter().any(|r| r.role == Role::Mixed) {
            ", of mixed replicas one or the other"
        } else {
            ""
        },
        predicted(&plan.prediction)
    );
    if let Some(explanation) = explanation {
        let bottleneck = match explanation.bottleneck {
            Phase::Neither => "neither phase is slower than requests come",
            Phase::Prefill => "prefill is slower than requests come",
            Phase::Decode => "generation is slower than requests come",
            Phase::Both => "both phases together are slower than requests come",
        };
        let _ = writeln!(out, "limits: {bottleneck}; {}", explanation.limits.join("; "));
    }
    if let Some(next) = &report.next_best {
        let _ = writeln!(out, "next best, {}: {}", percent(next.worse_by, "worse"), next.in_short);
    }
    let helpful: Vec<&Change> = report.changes.iter().filter(|change| change.gain > 0.005).take(5).collect();
    match helpful.as_slice() {
        [] if report.changes.is_empty() => {}
        [] => out.push_str("nothing that was tried would help by more than half a per cent\n"),
        helpful => {
            out.push_str("what would help most:\n");
            for change in helpful {
                let _ = writeln!(out, "  {}: {}", change.what, percent(change.gain, "better"));
            }
        }
    }
    if !report.comparison.is_empty() {
        let _ = writeln!(
            out,
            "compared on workloads that none was chosen by:\n{}",
            comparison(&report.comparison)
        );
    }
    if let Some(applied) = &report.applied {
        applied_text(applied, &mut out);
    }
    out.trim_end().to_owned()
}

fn applied_text(applied: &Applied, out: &mut String) {
    let _ = match applied.decision {
        Some(_) => writeln!(out, "plan {} is desired; `shoal status` shows how far it is:", applied.plan),
        None => writeln!(out, "it is kept as plan {}; to carry it out would take:", applied.plan),
    };
    for step in &applied.steps {
        let _ = writeln!(out, "  {}", step.in_words());
    }
    if applied.steps.is_empty() {
        out.push_str("  nothing: all is as it asks\n");
    }
}

fn percent(share: f64, word: &str) -> String {
    if share.abs() < 5e-4 { "equal".to_owned() } else { format!("{:.1} % {word}", share * 100.0) }
}

fn predicted(prediction: &Prediction) -> String {
    let mut text = format!(
        "TTFT {:.2} s, TPOT {:.1} ms, wait {:.2} s (longest {:.2} s)",
        prediction.ttft.0 / 1e3,
        prediction.tpot.0,
        prediction.wait.0 / 1e3,
        prediction.max_wait.0 / 1e3
    );
    if prediction.below_min_rate > 0.0 {
        let _ =
            write!(text, "; {:.0} % of requests slower than asked for", prediction.below_min_rate * 100.0);
    }
    text
}

/// The paper's table.
fn replicas(plan: &Plan) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(table::TITLES);
    for row in table::rows(plan) {
        table.add_row(row);
    }
    table
}

fn comparison(compared: &[Compared]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["objective", "PS", "DS", "TTFT", "TPOT", "wait", "longest", "plan"]);
    for row in compared {
        let seconds = |ms: f64| format!("{:.2} s", ms / 1e3);
        table.add_row([
            row.objective.to_owned(),
            format!("{:.0}", row.prefill_tokens_per_second),
            format!("{:.0}", row.decode_tokens_per_second),
            seconds(row.prediction.ttft_ms),
            format!("{:.0} ms", row.prediction.tpot_ms),
            seconds(row.prediction.wait_ms),
            seconds(row.prediction.max_wait_ms),
            row.in_short.clone(),
        ]);
    }
    table
}
