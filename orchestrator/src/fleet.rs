//! All replicas behind the API: which there are, whether any would answer, and what the desk is told of each. Replicas come and go
//! while requests are served; each has a number that no other ever gets.
//!
//! Knows nothing of requests, and nothing of why a replica comes or goes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use cluster::{Demand, ForetoldHops, ReplicaState, Role, StageObservation};
use futures::future::join_all;
use protocol::tls::TlsIdentity;
use protocol::v1;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use crate::config::ReplicaFeed;
use crate::demand::{Adaptation, Enough, Meter};
use crate::desk::{Desk, Load};
use crate::dispatch::Dispatch;
use crate::openai::ApiError;
use crate::replica::Replica;
use crate::router::PolicyName;

/// The replicas. Clones are handles of the same fleet.
#[derive(Clone)]
pub struct Fleet(Arc<Inner>);

struct Inner {
    tls: TlsIdentity,
    members: RwLock<Members>,
    dispatch: Arc<Dispatch>,
    meter: Arc<Meter>,
}

/// What a replica does, and how fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaLoad {
    /// Under which it is known.
    pub number: usize,
    /// Whether it would take a request.
    pub serves: bool,
    /// What it does.
    pub load: Load,
}

/// Requests that wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lines {
    /// For a slot.
    pub prompts: usize,
    /// With their first token, for a slot elsewhere.
    pub answers: usize,
}

struct Members {
    /// By their numbers.
    there: BTreeMap<usize, Arc<Member>>,
    /// For what it is waited while there is none.
    waiting_for: String,
}

/// One of them.
pub(crate) struct Member {
    /// The way to it.
    pub(crate) replica: Arc<Replica>,
    /// What the agent sees of its stages.
    pub(crate) observations: watch::Receiver<Vec<StageObservation>>,
    /// What its links foretell.
    pub(crate) hops: watch::Receiver<Option<ForetoldHops>>,
    is_draining: AtomicBool,
    _watcher: AbortOnDropHandle<()>,
}

impl Fleet {
    /// None yet. In their lines `limit` requests may wait; `tls` is who asks the masters.
    pub fn new(tls: TlsIdentity, router: PolicyName, limit: usize) -> Self {
        // Any seed will do; orchestrators that share replicas must not share it.
        let seed = Uuid::new_v4().as_u64_pair().0;
        let dispatch = Dispatch::new(Desk::new(router.policy(seed), limit));
        let members = Members { there: BTreeMap::new(), waiting_for: "there is no replica".to_owned() };
        Self(Arc::new(Inner { tls, members: RwLock::new(members), dispatch, meter: Meter::new() }))
    }

    /// Adds a replica and gives its number. Needs a runtime, in which it is watched.
    pub fn add(&self, feed: ReplicaFeed) -> usize {
        let dispatch = &self.0.dispatch;
        let number = dispatch.add(feed.slots, feed.predicted.unwrap_or_default());
        dispatch.set_role(number, feed.role);
        let replica = Arc::new(Replica::new(feed.state, self.0.tls.clone()));
        // Before the first request.
        tell(&replica, number, dispatch);
        let watching = watch(Arc::clone(&replica), number, Arc::clone(dispatch));
        let member = Member {
            replica,
            observations: feed.observations,
            hops: feed.hops,
            is_draining: AtomicBool::new(false),
            _watcher: AbortOnDropHandle::new(tokio::spawn(watching)),
        };
        self.write().there.insert(number, Arc::new(member));
        number
    }

    /// A replica's role is another from now on: nothing of it is reloaded, and its requests go on.
    pub fn set_role(&self, number: usize, role: Role) {
        self.0.dispatch.set_role(number, role);
    }

    /// Answers are expected to have so many tokens on average, as a plan's workload says, until they are seen to have others.
    pub fn expect_output(&self, mean: f64) {
        self.0.dispatch.expect_output(mean);
    }

    /// Sends a replica no more requests. Those that it generates go on, those that wait for it are bound anew.
    pub fn drain(&self, number: usize) {
        if let Some(member) = self.member(number) {
            // First, so that nobody says ready who is not.
            member.is_draining.store(true, Ordering::Relaxed);
            self.0.dispatch.drain(number);
        }
    }

    /// Lets a replica stay that was drained.
    pub fn resume(&self, number: usize) {
        if let Some(member) = self.member(number) {
            self.0.dispatch.resume(number);
            member.is_draining.store(false, Ordering::Relaxed);
            tell(&member.replica, number, &self.0.dispatch);
        }
    }

    /// Waits until a replica generates nothing, which a drained one comes to.
    pub async fn drained(&self, number: usize) {
        self.0.dispatch.vacant(number).await;
    }

    /// Forgets a replica. What it still generated goes on at another, as if it were lost.
    pub fn remove(&self, number: usize) {
        self.write().there.remove(&number);
        self.0.dispatch.remove(number);
    }

    /// Says for what it is waited while there is no replica.
    pub fn wait_for(&self, what: String) {
        self.write().waiting_for = what;
    }

    /// Counts what is asked for over windows of this length, from now on.
    pub fn count_demand_over(&self, span: Duration) {
        self.0.meter.set_span(span);
    }

    /// What was asked for in the shortest time in which there was enough; none if there was not.
    pub fn recent_demand(&self, enough: Enough) -> Option<Demand> {
        self.0.meter.recent(enough)
    }

    /// Says what is made of what is asked for, for people to see.
    pub fn tell_adaptation(&self, adaptation: Adaptation) {
        self.0.meter.tell_adaptation(adaptation);
    }

    /// Counts a decision about it, for metrics: what it was, in a word of which there are few.
    pub fn count_decision(&self, what: &'static str) {
        self.0.meter.decided(what);
    }

    /// What each replica does that is to stay, and who waits.
    pub fn loads(&self) -> (Vec<ReplicaLoad>, Lines) {
        let queue = self.0.dispatch.queue();
        let loads = self.members().into_iter().filter(|(_, member)| !member.is_draining());
        let loads = loads.filter_map(|(number, member)| {
            let load = *queue.loads.get(number)?;
            Some(ReplicaLoad { number, serves: member.readiness().is_ok(), load })
        });
        (loads.collect(), Lines { prompts: queue.waiting, answers: queue.waiting_to_decode })
    }

    /// Seconds that moves of so many tokens between replicas take, as far as any were seen.
    pub fn move_seconds(&self, tokens: f64) -> Option<f64> {
        self.0.dispatch.move_seconds(tokens)
    }

    /// Where it is counted what is asked for.
    pub(crate) fn meter(&self) -> &Arc<Meter> {
        &self.0.meter
    }

    /// All replicas and their numbers.
    pub(crate) fn members(&self) -> Vec<(usize, Arc<Member>)> {
        let members = self.0.members.read().unwrap_or_else(PoisonError::into_inner);
        members.there.iter().map(|(number, member)| (*number, Arc::clone(member))).collect()
    }

    /// Where requests get their places.
    pub(crate) fn dispatch(&self) -> &Arc<Dispatch> {
        &self.0.dispatch
    }

    /// A replica, unless it was removed.
    pub(crate) fn member(&self, number: usize) -> Option<Arc<Member>> {
        self.0.members.read().unwrap_or_else(PoisonError::into_inner).there.get(&number).cloned()
    }

    /// Tells the desk at once what is known of a replica, for who has just learned something of it.
    pub(crate) fn refresh(&self, number: usize) {
        if let Some(member) = self.member(number) {
            tell(&member.replica, number, &self.0.dispatch);
        }
    }

    /// Whether any replica would take a request, and if not, why.
    pub(crate) fn readiness(&self) -> Result<(), ApiError> {
        let mut reasons = Vec::new();
        for (number, member) in self.members() {
            match member.readiness() {
                Ok(()) => return Ok(()),
                Err(reason) => reasons.push((number, reason)),
            }
        }
        let reason = match &reasons[..] {
            [] => self.0.members.read().unwrap_or_else(PoisonError::into_inner).waiting_for.clone(),
            [(_, reason)] => reason.clone(),
            several => {
                let each = several.iter().map(|(number, reason)| format!("replica {number}: {reason}"));
                each.collect::<Vec<_>>().join("; ")
            }
        };
        Err(ApiError::NotReady { reason })
    }

    /// What the engines of some replicas say of themselves, of those that do within the deadline.
    pub(crate) async fn engines(
        members: &[(usize, Arc<Member>)],
        deadline: Duration,
    ) -> Vec<Option<v1::EngineStatusReply>> {
        let asked = members.iter().map(|(_, member)| async {
            tokio::time::timeout(deadline, member.replica.engine_status()).await.ok().flatten()
        });
        join_all(asked).await
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Members> {
        // It is whole after every statement.
        self.0.members.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<usize> = self.members().into_iter().map(|(number, _)| number).collect();
        f.debug_tuple("Fleet").field(&numbers).finish()
    }
}

impl Member {
    /// Whether it would take a request, and if not, why.
    pub(crate) fn readiness(&self) -> Result<(), String> {
        if self.is_draining() {
            return Err("it is drained: it finishes what it generates, and is stopped then".to_owned());
        }
        self.replica.readiness()
    }

    /// Whether it gets no more requests.
    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }
}

/// Tells the desk of a replica's changes, until its agent ends.
async fn watch(replica: Arc<Replica>, number: usize, dispatch: Arc<Dispatch>) {
    let mut state: watch::Receiver<ReplicaState> = replica.watch();
    loop {
        state.mark_unchanged();
        let doubt_ends = tell(&replica, number, &dispatch);
        let undoubted = async {
            match doubt_ends {
                Some(end) => tokio::time::sleep_until(end.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = state.changed() => if changed.is_err() {
                tell(&replica, number, &dispatch);
                return;
            },
            () = replica.doubted() => {}
            () = undoubted => {}
        }
    }
}

/// Tells the desk; gives the end of a doubt, if that is why it does not serve.
fn tell(replica: &Replica, number: usize, dispatch: &Dispatch) -> Option<std::time::Instant> {
    let serving = replica.serving();
    dispatch.serve(number, serving.epoch);
    serving.doubt_ends
}
