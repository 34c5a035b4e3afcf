//! The replicas that run, and the one who makes them what is desired: looks at what there is, takes the steps that can be taken, and
//! does so again when anything has changed.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use cluster::{ReplicaState, Role};
use deploy::{Act, Chain, Deployment, Goal, Health, Leaving, Observed, Seen, Step, StepView, Wait};
use futures::future::join_all;
use node::links::RingNews;
use orchestrator::Fleet;
use registry::EventKind;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::super::report::Reporter;
use super::ground::Ground;
use super::member::{self, Heard, Order, talk};
use super::replan::MeasuredLinks;
use crate::commands::planning::row_encoding;

/// Changes come in flocks, such as all stages of a lost node: they are looked at together.
const DEBOUNCE: Duration = Duration::from_millis(50);

/// Memory that becomes free is told by heartbeats; nothing else rings for it.
const LOOK_PERIOD: Duration = Duration::from_secs(1);

/// A replica that is to go generates for so long at most: the rest goes on at another, which costs it its prompt once more.
const DRAIN_LIMIT: Duration = Duration::from_secs(120);

/// The replicas.
pub(super) struct Crew<'a> {
    ground: Arc<Ground>,
    fleet: Fleet,
    deployment: Deployment,
    reporter: Reporter<'a>,
    replicas: BTreeMap<usize, Running>,
    /// Rung when a replica's state may be another.
    bell: Arc<Notify>,
    /// The decision that was carried out.
    reached: Option<u64>,
}

/// One of them.
struct Running {
    chain: Chain,
    role: Role,
    decision: u64,
    heard: Heard,
    exit: Exit,
    /// As it was when it was last told of.
    health: Health,
    stop: CancellationToken,
    task: AbortOnDropHandle<()>,
}

/// Whether it is on its way out.
enum Exit {
    No,
    /// The task ends when nobody has a slot there any more.
    Draining(AbortOnDropHandle<()>),
}

impl<'a> Crew<'a> {
    /// Of nobody yet.
    pub(super) fn new(
        ground: Arc<Ground>,
        (fleet, deployment): (Fleet, Deployment),
        reporter: Reporter<'a>,
    ) -> Self {
        let (replicas, bell) = (BTreeMap::new(), Arc::default());
        Self { ground, fleet, deployment, reporter, replicas, bell, reached: None }
    }

    /// Makes what runs what is desired, until something fails that nobody foresaw.
    pub(super) async fn run(
        &mut self,
        mut of_links: mpsc::Receiver<(usize, RingNews)>,
        links: MeasuredLinks,
    ) -> Result<()> {
        self.reporter.starting()?;
        let mut desired = self.deployment.watch();
        let mut looks = tokio::time::interval(LOOK_PERIOD);
        let bell = Arc::clone(&self.bell);
        loop {
            self.look()?;
            let goal = desired.borrow_and_update().clone();
            if let Some(goal) = goal {
                self.pursue(&goal);
            }
            tokio::select! {
                changed = desired.changed() => changed?,
                () = bell.notified() => tokio::time::sleep(DEBOUNCE).await,
                _ = looks.tick() => {}
                Some((replica, news)) = of_links.recv() => {
                    links.note(&news);
                    self.reporter.links(replica, &news)?;
                }
            }
        }
    }

    /// Stops all, within seconds.
    pub(super) async fn shutdown(self) {
        let ends = self.replicas.into_values().map(|running| async move {
            running.stop.cancel();
            let _ = running.task.await;
        });
        join_all(ends).await;
    }

    /// Takes the steps that can be taken.
    fn pursue(&mut self, goal: &Goal) {
        let seen = self.seen();
        let steps = self.deployment.steps(goal, &seen);
        self.say_for_what_it_waits(goal, &steps, &seen);
        for step in steps.iter().filter(|step| step.wait == Wait::Nothing) {
            self.act(step.act, goal);
        }
        let all_serve = seen.iter().all(|seen| seen.observed.health == Health::Serving);
        if steps.is_empty() && all_serve && self.reached != Some(goal.decision) {
            self.reached = Some(goal.decision);
            let text = format!("plan {} is carried out: {} replicas serve", goal.id, seen.len());
            self.deployment.note(EventKind::PlanReached, &text);
        }
        self.deployment.tell(self.seen());
    }

    fn say_for_what_it_waits(&self, goal: &Goal, steps: &[Step], seen: &[Seen]) {
        let waits = steps.iter().filter_map(|step| StepView::new(step, goal, seen).waits_for);
        let waits: Vec<String> = waits.collect();
        if !waits.is_empty() {
            self.fleet.wait_for(format!("plan {} waits for {}", goal.id, waits.join(", for ")));
        }
    }

    fn act(&mut self, act: Act, goal: &Goal) {
        match act {
            Act::Start(place) => self.start(place, goal),
            Act::SetRole(number, role) => {
                let Some(running) = self.replicas.get_mut(&number) else { return };
                let text = format!("replica {number} is {role} from now on, it was {}", running.role);
                running.role = role;
                self.fleet.set_role(number, role);
                self.deployment.note(EventKind::ReplicaRole, &text);
            }
            Act::Resume(number) => {
                let Some(running) = self.replicas.get_mut(&number) else { return };
                running.exit = Exit::No;
                self.fleet.resume(number);
                self.deployment.note(EventKind::ReplicaKept, &format!("replica {number} stays after all"));
            }
            Act::Drain(number) => self.drain(number),
            Act::Stop(number) => {
                if let Some(running) = self.replicas.get(&number) {
                    running.stop.cancel();
                }
            }
        }
    }

    fn start(&mut self, place: usize, goal: &Goal) {
        let Some((wanted, planned)) = goal.replicas.get(place).zip(goal.plan.replicas.get(place)) else {
            return;
        };
        let encoding = planned.stages.first().map(|stage| row_encoding(stage.encoding));
        let Some(Ok(encoding)) = encoding else { return };
        let (teller, heard, feed) = talk(Arc::clone(&self.bell), wanted.role, wanted.chain.slots);
        let number = self.fleet.add(feed);
        let text =
            format!("replica {number} ({}) is started for plan {}: {}", wanted.role, goal.id, wanted.chain);
        self.deployment.note(EventKind::ReplicaStarted, &text);
        let (stop, order) =
            (CancellationToken::new(), Order { number, chain: wanted.chain.clone(), encoding });
        let task = tokio::spawn(member::run(Arc::clone(&self.ground), order, teller, stop.clone()));
        let running = Running {
            chain: wanted.chain.clone(),
            role: wanted.role,
            decision: goal.decision,
            heard,
            exit: Exit::No,
            health: Health::Loading,
            stop,
            task: AbortOnDropHandle::new(task),
        };
        self.replicas.insert(number, running);
    }

    fn drain(&mut self, number: usize) {
        let Some(running) = self.replicas.get_mut(&number) else { return };
        self.fleet.drain(number);
        let (fleet, bell) = (self.fleet.clone(), Arc::clone(&self.bell));
        let vacant = tokio::spawn(async move {
            if tokio::time::timeout(DRAIN_LIMIT, fleet.drained(number)).await.is_err() {
                tracing::warn!(replica = number, "it still generates; that goes on elsewhere");
            }
            bell.notify_one();
        });
        running.exit = Exit::Draining(AbortOnDropHandle::new(vacant));
        let text = format!("replica {number} gets no more requests: {}", running.chain);
        self.deployment.note(EventKind::ReplicaDrained, &text);
    }

    /// What there is.
    fn seen(&self) -> Vec<Seen> {
        self.replicas.iter().map(|(number, running)| running.seen(*number)).collect()
    }

    /// Tells of what has changed, and forgets who has gone.
    fn look(&mut self) -> io::Result<()> {
        let gone: Vec<usize> =
            self.replicas.iter().filter(|(_, one)| one.is_gone()).map(|(n, _)| *n).collect();
        for number in gone {
            self.replicas.remove(&number);
            self.fleet.remove(number);
            self.reporter.forget(number);
            self.deployment.note(EventKind::ReplicaStopped, &format!("replica {number} is stopped"));
        }
        for (number, running) in &mut self.replicas {
            let Seen { observed, reason } = running.seen(*number);
            let before = std::mem::replace(&mut running.health, observed.health);
            match (before == Health::Serving, observed.health == Health::Serving) {
                (false, true) => {
                    let text = format!("replica {number} ({}) serves: {}", running.role, running.chain);
                    self.deployment.note(EventKind::ReplicaServes, &text);
                }
                (true, false) => {
                    let reason = reason.unwrap_or_default();
                    let text = format!("replica {number} does not serve: {reason}");
                    self.deployment.note(EventKind::ReplicaDown, &text);
                }
                _ if observed.health == Health::GivenUp && before != Health::GivenUp => {
                    let text = format!("replica {number} is given up: {}", reason.unwrap_or_default());
                    self.deployment.note(EventKind::ReplicaDown, &text);
                }
                _ => {}
            }
            if running.heard.predicted.has_changed().unwrap_or(false) {
                let predicted = running.heard.predicted.borrow_and_update();
                self.reporter.expect(*number, running.chain.slots, &predicted);
            }
            let (state, reports) =
                (running.heard.state.borrow().clone(), running.heard.reports.borrow().clone());
            self.reporter.changed(*number, &state, &reports)?;
        }
        Ok(())
    }
}

impl Running {
    fn seen(&self, number: usize) -> Seen {
        let state = self.heard.state.borrow().clone();
        let given_up = self.heard.given_up.borrow().clone();
        let (health, reason) = match (state, given_up) {
            (_, Some(reason)) => (Health::GivenUp, Some(reason)),
            (ReplicaState::Ready { .. }, None) => (Health::Serving, None),
            (ReplicaState::Loading { waiting_for, .. }, None) => (Health::Loading, Some(waiting_for)),
            (ReplicaState::Down { reason }, None) => (Health::Down, Some(reason)),
        };
        let leaving = match &self.exit {
            Exit::No => Leaving::No,
            Exit::Draining(vacant) if vacant.is_finished() => Leaving::Drained,
            Exit::Draining(_) => Leaving::Draining,
        };
        let (chain, role, decision) = (self.chain.clone(), self.role, self.decision);
        Seen { observed: Observed { number, chain, role, health, leaving, decision }, reason }
    }

    /// Whether none of its stages is left.
    fn is_gone(&self) -> bool {
        self.task.is_finished()
    }
}
