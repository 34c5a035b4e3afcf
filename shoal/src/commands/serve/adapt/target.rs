//! What can be changed: the roles of replicas that are there from beginning to end, or the plan that a cluster carries out.

use std::sync::Arc;

use adapt::{Flip, Outlook, Payoff, Reload, Runner, Speed, Tuning, weigh};
use anyhow::{Context, Result};
use cluster::{Bytes, Millis, Plan, Prediction, Role, TokensPerSecond, Workload};
use deploy::{Chain, Deployment, Goal, Health, ReloadNeeds, with_roles};
use orchestrator::Fleet;
use planner::{SimSpeed, predict, solve, speeds_of};
use protocol::plan_files::PlanFile;
use registry::{EventKind, PlanOrigin, Registry};
use serde_json::{Value, json};

use super::super::cluster::PlanMode;
use super::super::deployment::Known;

/// A process starts, and llama.cpp prepares its buffers.
const START_S: f64 = 5.0;

/// Bytes a second at which weights are loaded: what a gigabit link carries, since they may have to come from another node.
const LOAD_RATE: f64 = 110e6;

/// Workloads that two plans are compared on.
const SEEDS: [u64; 2] = [1, 2];

/// What is changed.
pub(in super::super) enum Target {
    Fixed(Fixed),
    Deployed(Box<Deployed>),
}

/// Replicas whose roles alone can be others.
pub(in super::super) struct Fixed {
    pub(in super::super) fleet: Fleet,
    /// Where events are kept, if anywhere.
    pub(in super::super) registry: Option<Registry>,
}

/// A plan that is carried out.
pub(in super::super) struct Deployed {
    pub(in super::super) deployment: Deployment,
    pub(in super::super) fleet: Fleet,
    /// What the planner has to know, where there are profiles.
    pub(in super::super) known: Option<Arc<Known>>,
    pub(in super::super) plan_mode: PlanMode,
}

/// What was decided, to be told of.
pub(super) struct Verdict {
    pub(super) kind: EventKind,
    /// In a word, for metrics.
    pub(super) what: &'static str,
    pub(super) text: String,
    pub(super) facts: Value,
}

/// Another plan, and what it is worth.
pub(super) struct Replan {
    plan: Plan,
    origin: PlanOrigin,
    pub(super) payoff: Payoff,
    pub(super) facts: Value,
}

impl Verdict {
    pub(super) fn declined(text: String, facts: Value) -> Self {
        Self { kind: EventKind::AdaptationDeclined, what: "declined", text, facts }
    }
}

impl Target {
    /// Whether nothing is on its way to be something else.
    pub(super) fn is_steady(&self) -> bool {
        match self {
            Self::Fixed(_) => true,
            Self::Deployed(deployed) => deployed.is_steady(),
        }
    }

    /// Tells of something.
    pub(super) fn note(&self, kind: EventKind, text: &str, facts: &Value) {
        match self {
            Self::Deployed(deployed) => deployed.deployment.note_with(kind, text, facts),
            Self::Fixed(fixed) => fixed.note(kind, text, facts),
        }
    }

    /// Changes roles, at once.
    pub(super) async fn flip(&self, flips: &[Flip], reason: &str) -> Result<()> {
        match self {
            Self::Fixed(fixed) => {
                for flip in flips {
                    fixed.fleet.set_role(flip.replica, flip.to);
                    let text =
                        format!("replica {} is {} from now on, it was {}", flip.replica, flip.to, flip.from);
                    fixed.note(EventKind::ReplicaRole, &text, &Value::Null);
                }
                Ok(())
            }
            Self::Deployed(deployed) => deployed.flip(flips, reason).await,
        }
    }

    /// Fills in how fast replicas are in what they have never done, where their devices were profiled.
    pub(super) fn fill_speeds(&self, replicas: &mut [Runner], workload: &Workload) {
        if let Self::Deployed(deployed) = self
            && let Some(profiled) = deployed.profiled(workload)
        {
            for replica in replicas {
                let found = profiled.iter().find(|(number, _)| *number == replica.number);
                replica.speed = found.map_or(replica.speed, |(_, speed)| replica.speed.filled_from(*speed));
            }
        }
    }
}

impl Fixed {
    fn note(&self, kind: EventKind, text: &str, facts: &Value) {
        tracing::info!(kind = kind.as_str(), %facts, "{text}");
        if let Some(registry) = &self.registry {
            let kept = if facts.is_null() {
                registry.tell(kind, text)
            } else {
                registry.tell_with(kind, text, facts)
            };
            if let Err(error) = kept {
                tracing::warn!(%error, "an event could not be kept");
            }
        }
    }
}

impl Deployed {
    fn goal(&self) -> Option<Goal> {
        self.deployment.watch().borrow().clone()
    }

    fn is_steady(&self) -> bool {
        let Some(goal) = self.goal() else { return false };
        let seen = self.deployment.watch_seen().borrow().clone();
        seen.iter().all(|one| one.observed.health == Health::Serving)
            && self.deployment.steps(&goal, &seen).is_empty()
    }

    async fn flip(&self, flips: &[Flip], reason: &str) -> Result<()> {
        let roles: Vec<(usize, Role)> = flips.iter().map(|flip| (flip.replica, flip.to)).collect();
        let goal = self.goal().context("no plan is desired")?;
        let seen = self.deployment.watch_seen().borrow().clone();
        let plan = with_roles(&goal, &seen, &roles).context("the plan has become another one")?;
        self.apply(plan, origin(&goal), reason.to_owned()).await?;
        // Whoever carries the plan out does so too; but not where somebody had changed the role of the replica alone.
        roles.iter().for_each(|(number, role)| self.fleet.set_role(*number, *role));
        Ok(())
    }

    async fn apply(&self, plan: Plan, origin: PlanOrigin, reason: String) -> Result<u64> {
        let applied = self.deployment.run(move |deployment| {
            let id = deployment.add(&PlanFile::new(&plan), origin)?.id;
            deployment.apply(id, &reason)?;
            Ok(id)
        });
        Ok(applied.await?)
    }

    /// How fast the replicas that are there should be in either phase, by their numbers.
    fn profiled(&self, workload: &Workload) -> Option<Vec<(usize, Speed)>> {
        let (known, goal) = (self.known.as_ref()?, self.goal()?);
        let problem = known.problem(&self.deployment, &goal, workload).ok()?;
        let speeds = speeds_of(&problem, &known.settings, &known.named(&goal.plan)).ok()?;
        let seen = self.deployment.watch_seen().borrow().clone();
        let of = |(wanted, speed): (&deploy::Wanted, &SimSpeed)| {
            let one = seen.iter().find(|seen| seen.observed.chain == wanted.chain)?;
            let tpot = (Millis(speed.tpot_alone * 1e3), Millis(speed.tpot_full * 1e3));
            let prefill = Some(TokensPerSecond(speed.prompt_tokens_per_second));
            Some((one.observed.number, Speed { prefill, tpot: Some(tpot) }))
        };
        Some(goal.replicas.iter().zip(&speeds).filter_map(of).collect())
    }

    /// The best plan of the nodes that are there, and whether it pays. Why none can be made, if none can.
    pub(super) async fn replan(&self, workload: &Workload, tuning: &Tuning) -> Result<Replan, String> {
        let known = self.known.clone().ok_or("no device was profiled (--profiles)")?;
        let goal = self.goal().ok_or("no plan is desired")?;
        if goal.origin == PlanOrigin::Replanned {
            return Err(format!("plan {} is without nodes that are away", goal.id));
        }
        let problem = known.problem(&self.deployment, &goal, workload)?;
        let (settings, present) = (known.settings.clone(), known.named(&goal.plan));
        let judged = tokio::task::spawn_blocking(move || {
            let solved = solve(&problem, &settings)?.plan;
            let of = |plan: &Plan| predict(&problem, &settings, plan, &SEEDS).map(|it| outlook(&it));
            Ok::<_, planner::PlanError>((of(&present)?, of(&solved)?, solved))
        });
        let judged = judged.await.map_err(|error| error.to_string())?;
        let (now, then, plan) = judged.map_err(|error| error.to_string())?;
        let needs = self.deployment.reload_for(&plan);
        let reload = reload(&needs);
        let payoff = weigh(&now, &then, reload, tuning);
        let facts = json!({
            "now": now, "then": then, "payoff": payoff, "reload": reload,
            "most_bytes_to_load": needs.most().0, "workload": {
                "interval_ms": workload.mean_interval().0, "prompt": workload.prompt, "output": workload.output,
            },
        });
        Ok(Replan { plan, origin: origin(&goal), payoff, facts })
    }

    /// Applies a plan that pays, or proposes it.
    pub(super) async fn carry_out(&self, replan: Replan) -> Verdict {
        let Replan { plan, origin, payoff, facts } = replan;
        let replicas: Vec<String> =
            plan.replicas.iter().map(|one| format!("{} {}", one.role, Chain::of(one))).collect();
        let reason = format!(
            "it saves {:.1} s of waiting, of which loading costs {:.1} s",
            payoff.gain_s, payoff.cost_s
        );
        let (what, kept) = match self.plan_mode {
            PlanMode::Apply => ("plan", self.apply(plan, origin, reason.clone()).await),
            PlanMode::Propose => {
                let add = move |it: &Deployment| it.add(&PlanFile::new(&plan), origin).map(|kept| kept.id);
                ("proposed", self.deployment.run(add).await.map_err(anyhow::Error::from))
            }
        };
        match kept {
            Ok(id) => {
                let done = if what == "plan" { "applied" } else { "proposed" };
                let text = format!("plan {id} is {done}: {reason}: {}", replicas.join("; "));
                Verdict { kind: EventKind::Adapted, what, text, facts }
            }
            Err(error) => Verdict::declined(format!("the plan cannot be: {error:#}"), facts),
        }
    }
}

/// Who a plan is by that is made of the desired one: while nodes are away it is one for then, and goes when they are back.
fn origin(goal: &Goal) -> PlanOrigin {
    if goal.origin == PlanOrigin::Replanned { PlanOrigin::Replanned } else { PlanOrigin::Adapted }
}

fn outlook(of: &Prediction) -> Outlook {
    let seconds = |ms: Millis| ms.0 / 1e3;
    Outlook {
        max_wait_s: seconds(of.max_wait),
        ttft_s: seconds(of.ttft),
        tpot_s: seconds(of.tpot),
        below_min_rate: of.below_min_rate,
    }
}

fn reload(needs: &ReloadNeeds) -> Reload {
    let most = needs.most();
    let load_s = if most == Bytes::ZERO { 0.0 } else { START_S + most.0 as f64 / LOAD_RATE };
    Reload { load_s, lost_share: f64::from(needs.stopped_slots) / f64::from(needs.slots.max(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_takes_what_the_fullest_node_loads_and_costs_the_slots_that_are_away() {
        let node = |name: &str| cluster::NodeId(name.into());
        let loads = [(node("a"), Bytes(110_000_000)), (node("b"), Bytes(1_100_000_000))].into();
        let needs = ReloadNeeds { loads, stopped_slots: 4, slots: 16 };
        assert_eq!(reload(&needs), Reload { load_s: 15.0, lost_share: 0.25 });
        let none = ReloadNeeds { slots: 16, ..ReloadNeeds::default() };
        assert_eq!(reload(&none), Reload { load_s: 0.0, lost_share: 0.0 });
    }
}
