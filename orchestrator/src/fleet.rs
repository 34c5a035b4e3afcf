//! All replicas behind the API: whether any would answer, and what the desk is told of each.
//!
//! Knows nothing of requests.

use std::sync::Arc;
use std::time::Duration;

use cluster::{ForetoldHops, ReplicaState, StageObservation};
use futures::future::join_all;
use protocol::tls::TlsIdentity;
use protocol::v1;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use crate::config::ReplicaFeed;
use crate::desk::Desk;
use crate::dispatch::Dispatch;
use crate::openai::ApiError;
use crate::replica::Replica;
use crate::router::PolicyName;

/// The replicas.
pub(crate) struct Fleet {
    members: Vec<Member>,
    dispatch: Arc<Dispatch>,
    /// One for each.
    _watchers: Vec<AbortOnDropHandle<()>>,
}

/// One of them.
pub(crate) struct Member {
    /// The way to it.
    pub(crate) replica: Arc<Replica>,
    /// What the agent sees of its stages.
    pub(crate) observations: watch::Receiver<Vec<StageObservation>>,
    /// What its links foretell.
    pub(crate) hops: watch::Receiver<Option<ForetoldHops>>,
}

impl Fleet {
    /// In whose lines `limit` requests may wait. Needs a runtime.
    pub(crate) fn new(feeds: Vec<ReplicaFeed>, tls: &TlsIdentity, router: PolicyName, limit: usize) -> Self {
        // Any seed will do; orchestrators that share replicas must not share it.
        let seed = Uuid::new_v4().as_u64_pair().0;
        let mut desk = Desk::new(router.policy(seed), limit);
        let mut members = Vec::new();
        for feed in feeds {
            let number = desk.add(feed.slots, feed.predicted.unwrap_or_default());
            desk.set_role(number, feed.role, Duration::ZERO);
            let replica = Arc::new(Replica::new(feed.state, tls.clone()));
            members.push(Member { replica, observations: feed.observations, hops: feed.hops });
        }
        let dispatch = Dispatch::new(desk);
        let watchers = members.iter().enumerate().map(|(number, member)| {
            // Before the first request.
            tell(&member.replica, number, &dispatch);
            let watching = watch(Arc::clone(&member.replica), number, Arc::clone(&dispatch));
            AbortOnDropHandle::new(tokio::spawn(watching))
        });
        Self { _watchers: watchers.collect(), members, dispatch }
    }

    /// All replicas, by their numbers.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Where requests get their places.
    pub(crate) fn dispatch(&self) -> &Arc<Dispatch> {
        &self.dispatch
    }

    /// The way to a replica.
    pub(crate) fn replica(&self, number: usize) -> Result<&Replica, ApiError> {
        let member = self.members.get(number);
        member
            .map(|member| &*member.replica)
            .ok_or(ApiError::Internal { reason: "a replica is unknown to the fleet" })
    }

    /// Tells the desk at once what is known of a replica, for who has just learned something of it.
    pub(crate) fn refresh(&self, number: usize) {
        if let Some(member) = self.members.get(number) {
            tell(&member.replica, number, &self.dispatch);
        }
    }

    /// Whether any replica would take a request, and if not, why.
    pub(crate) fn readiness(&self) -> Result<(), ApiError> {
        let mut reasons = Vec::new();
        for (number, member) in self.members.iter().enumerate() {
            match member.replica.readiness() {
                Ok(()) => return Ok(()),
                Err(reason) => reasons.push((number, reason)),
            }
        }
        let reason = match &reasons[..] {
            [] => "there is no replica".to_owned(),
            [(_, reason)] => reason.clone(),
            several => {
                let each = several.iter().map(|(number, reason)| format!("replica {number}: {reason}"));
                each.collect::<Vec<_>>().join("; ")
            }
        };
        Err(ApiError::NotReady { reason })
    }

    /// What the engines say of themselves, of those that do within the deadline.
    pub(crate) async fn engines(&self, deadline: Duration) -> Vec<Option<v1::EngineStatusReply>> {
        let asked = self.members.iter().map(|member| async {
            tokio::time::timeout(deadline, member.replica.engine_status()).await.ok().flatten()
        });
        join_all(asked).await
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
