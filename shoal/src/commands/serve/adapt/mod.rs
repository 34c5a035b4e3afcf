//! Changes roles, and where it pays the plan, when something else is asked for than was planned: the loop around the decisions of
//! `adapt`, which has the clock, looks, and tells of everything.

mod target;

use std::time::Duration;

use adapt::{
    Cause, Line, Outcome, RoleChoice, Runner, Situation, Speed, Tuning, Waiting, Watcher, choose_roles,
};
use anyhow::Result;
use clap::{Args, ValueEnum};
use cluster::{Demand, DemandLevel, Millis, Workload};
use orchestrator::{Adaptation, Enough, Fleet, ReplicaLoad};
use registry::EventKind;
use serde_json::{Value, json};
use tokio::time::Instant;

pub(super) use target::{Deployed, Fixed, Target};
use target::{Replan, Verdict};

/// How often it is looked at what is asked for.
const PERIOD: Duration = Duration::from_millis(500);

/// Requests and answers that are enough to go by: their means are within a third of the truth.
const ENOUGH: (u32, u32) = (20, 10);

/// Slots of a replica that a plan may have at most where no workload says so.
const MOST_SLOTS: u32 = 32;

/// Options for changing what runs by what is asked for.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Adaptation options")]
pub(super) struct AdaptArgs {
    /// What may be changed when requests come faster or slower, or prompts or answers are longer or shorter, than was planned for
    /// (--workload, or else what came first) [default: roles with --cluster, else off].
    ///
    /// Each decision is an event with its reason and numbers (/admin/v1/events); /admin/v1/workload and `shoal status` show what is
    /// counted.
    #[arg(long, env = "SHOAL_ADAPT", value_enum, value_name = "WHAT",
          requires_ifs = [("plan", "cluster"), ("plan", "profiles")])]
    adapt: Option<AdaptMode>,
    /// Over how long requests are counted. As far is looked ahead.
    #[arg(long, env = "SHOAL_ADAPT_WINDOW", value_name = "TIME", default_value = "5m",
          value_parser = humantime::parse_duration)]
    adapt_window: Duration,
    /// How long something else must be asked for than was planned.
    #[arg(long, env = "SHOAL_ADAPT_AFTER", value_name = "TIME", default_value = "10s",
          value_parser = humantime::parse_duration)]
    adapt_after: Duration,
    /// The least time between two decisions.
    #[arg(long, env = "SHOAL_ADAPT_REST", value_name = "TIME", default_value = "30s",
          value_parser = humantime::parse_duration)]
    adapt_rest: Duration,
}

/// What may be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum AdaptMode {
    /// Nothing.
    Off,
    /// Which replicas prefill and which decode: at once, nothing is loaded.
    Roles,
    /// Also which stages there are, if that saves more than loading them costs. --plan-mode says whether that is done or only
    /// proposed.
    Plan,
}

impl AdaptArgs {
    /// Over how long requests are counted.
    pub(super) fn window(&self) -> Duration {
        self.adapt_window
    }

    /// What is enough to go by.
    pub(super) fn enough(&self) -> Enough {
        let (requests, answers) = ENOUGH;
        Enough { requests, answers, span: self.adapt_after }
    }

    fn tuning(&self) -> Tuning {
        Tuning { dwell: self.adapt_after, rest: self.adapt_rest, ..Tuning::default() }
    }
}

/// A workload of which all is open but how fast answers should be, and how long sequences may get.
pub(super) fn open_workload(n_ctx: u32) -> Workload {
    Workload {
        arrivals: cluster::Arrivals::Poisson(Millis(1e3)),
        prompt: cluster::Lengths::fixed(1.0),
        output: cluster::Lengths::fixed(1.0),
        requests: 100,
        min_rate: Workload::DEFAULT_MIN_RATE,
        slot_context: n_ctx,
        max_slots: MOST_SLOTS,
    }
}

/// What an adapter goes by.
pub(super) struct Basis {
    pub(super) args: AdaptArgs,
    /// What is planned for, if anybody said so.
    pub(super) planned: Option<Workload>,
    /// What is asked of a workload that nobody planned.
    pub(super) like: Workload,
    pub(super) prefill_chunk: u32,
}

/// Watches, decides, and has it done.
pub(super) struct Adapter {
    basis: Basis,
    mode: AdaptMode,
    fleet: Fleet,
    target: Target,
    watcher: Watcher,
    started: Instant,
    last: Option<String>,
}

impl Adapter {
    pub(super) fn new(basis: Basis, fleet: Fleet, target: Target) -> Self {
        let default = match target {
            Target::Deployed(_) => AdaptMode::Roles,
            Target::Fixed(_) => AdaptMode::Off,
        };
        let planned = basis.planned.as_ref().map(DemandLevel::of);
        fleet.count_demand_over(basis.args.window());
        Self {
            mode: basis.args.adapt.unwrap_or(default),
            watcher: Watcher::new(basis.args.tuning(), planned),
            basis,
            fleet,
            target,
            started: Instant::now(),
            last: None,
        }
    }

    /// As long as it is served.
    pub(super) async fn run(mut self) -> Result<()> {
        self.tell();
        if self.mode == AdaptMode::Off {
            return std::future::pending().await;
        }
        let mut looks = tokio::time::interval(PERIOD);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            // What is being changed is judged when it is done.
            if !self.target.is_steady() {
                continue;
            }
            let demand = self.fleet.recent_demand(self.basis.args.enough());
            let cause = self.watcher.look(self.started.elapsed(), demand.as_ref(), self.line());
            if let Some((cause, demand)) = cause.zip(demand) {
                self.decide(cause, &demand).await;
            }
            self.tell();
        }
    }

    fn line(&self) -> Line {
        let (loads, lines) = self.fleet.loads();
        let slots = loads.iter().filter(|one| one.serves).map(|one| one.load.slots).sum();
        Line { waiting: lines.prompts + lines.answers, slots }
    }

    async fn decide(&mut self, cause: Cause, demand: &Demand) {
        let horizon = Millis::from(self.basis.args.window());
        let Some(workload) = demand.workload(&self.basis.like, horizon) else { return };
        let facts = json!({ "cause": cause, "demand": demand, "planned": self.watcher.planned() });
        self.target.note(EventKind::WorkloadLeft, &format!("something else is asked for: {cause}"), &facts);
        let verdicts = [self.roles(&cause, &workload).await, self.plan(&workload).await];
        let mut outcome = Outcome::Kept;
        for Verdict { kind, what, text, facts } in verdicts.into_iter().flatten() {
            if matches!(what, "roles" | "plan") {
                outcome = Outcome::Changed;
            }
            self.target.note(kind, &text, &facts);
            self.fleet.count_decision(what);
            self.last = Some(text);
        }
        self.watcher.settle(self.started.elapsed(), (cause, outcome), demand.level());
    }

    /// Roles are changed if others are better.
    async fn roles(&self, cause: &Cause, workload: &Workload) -> Option<Verdict> {
        let situation = self.situation(workload);
        let chosen = tokio::task::spawn_blocking(move || choose_roles(&situation)).await;
        let choice = chosen.ok().flatten()?;
        let facts = serde_json::to_value(&choice).unwrap_or_default();
        let RoleChoice { flips, now, then, .. } = &choice;
        if !choice.is_worth_it(&self.basis.args.tuning()) {
            let text = format!(
                "roles stay: the longest wait should be {:.1} s with them, and {:.1} s with the best that were found",
                now.max_wait_s, then.max_wait_s
            );
            return Some(Verdict::declined(text, facts));
        }
        let changes =
            flips.iter().map(|flip| format!("replica {} from {} to {}", flip.replica, flip.from, flip.to));
        let changes = changes.collect::<Vec<_>>().join(", ");
        let text = format!(
            "{changes}: the longest wait should be {:.1} s, instead of {:.1} s; {cause}",
            then.max_wait_s, now.max_wait_s
        );
        Some(match self.target.flip(flips, &text).await {
            Ok(()) => Verdict { kind: EventKind::Adapted, what: "roles", text, facts },
            Err(error) => Verdict::declined(format!("roles could not be changed: {error:#}"), facts),
        })
    }

    /// Another plan is applied or proposed if it pays.
    async fn plan(&self, workload: &Workload) -> Option<Verdict> {
        let Target::Deployed(deployed) = &self.target else { return None };
        if self.mode != AdaptMode::Plan {
            return None;
        }
        let tuning = self.basis.args.tuning();
        Some(match deployed.replan(workload, &tuning).await {
            Err(reason) => Verdict::declined(format!("no other plan is made: {reason}"), Value::Null),
            Ok(Replan { payoff, facts, .. }) if !payoff.pays => {
                let text = format!(
                    "the plan stays: another would save {:.1} s of waiting, and {:.1} s are needed, of which loading costs {:.1} s",
                    payoff.gain_s, payoff.needed_s, payoff.cost_s
                );
                Verdict::declined(text, facts)
            }
            Ok(replan) => deployed.carry_out(replan).await,
        })
    }

    fn situation(&self, workload: &Workload) -> Situation {
        let (loads, lines) = self.fleet.loads();
        let mut replicas: Vec<Runner> = loads.iter().filter(|one| one.serves).map(runner).collect();
        self.target.fill_speeds(&mut replicas, workload);
        Situation {
            replicas,
            workload: workload.clone(),
            waiting: Waiting { prompts: lines.prompts, answers: lines.answers },
            move_s: self.fleet.move_seconds(workload.mean_prompt()).unwrap_or(0.0),
            prefill_chunk: self.basis.prefill_chunk,
        }
    }

    fn tell(&self) {
        let mode = self.mode.to_possible_value();
        self.fleet.tell_adaptation(Adaptation {
            mode: mode.map_or_else(String::new, |mode| mode.get_name().to_owned()),
            planned: self.watcher.planned(),
            outside: self.watcher.outside().map(|cause| cause.to_string()),
            last: self.last.clone(),
        });
    }
}

fn runner(of: &ReplicaLoad) -> Runner {
    let load = &of.load;
    let speed = Speed {
        prefill: load.knows_prefill.then_some(load.prefill),
        tpot: load.knows_decode.then_some((load.tpot_alone, load.tpot_full)),
    };
    Runner { number: of.number, role: load.role, slots: u32::try_from(load.slots).unwrap_or(u32::MAX), speed }
}
