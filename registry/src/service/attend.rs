//! One node's presence: it is reached, its signs of life are noted, and it ends with its stream, its silence or its membership.

use std::time::Duration;

use protocol::finding::reach::reach;
use protocol::membership::Heartbeat;
use protocol::node::{NodeFacts, Peer};
use protocol::tls::{TlsIdentity, describe_status};
use protocol::v1;
use protocol::v1::cluster_word::Word as Answer;
use protocol::v1::node_word::Word;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::Desk;
use crate::error::RegistryError;
use crate::event::EventKind;
use crate::member::{MemberState, NodeRecord};
use crate::presence::{Attendance, Reached};
use crate::registry::Registry;
use crate::timestamp::Timestamp;

/// A node tells of itself every second; one that has not for so long is away, whatever its connection does.
const SILENCE: Duration = Duration::from_secs(10);

/// Between two tries to reach a node that is reached nowhere.
const REACH_PAUSE: Duration = Duration::from_secs(5);

/// How often it is looked whether the node is still a member, and noted that it is there.
const LOOK_PERIOD: Duration = Duration::from_secs(2);

type Answers = mpsc::Sender<Result<v1::ClusterWord, Status>>;

/// A node that attends.
pub(super) struct Attending {
    registry: Registry,
    identity: TlsIdentity,
    node: NodeRecord,
    peer: Peer,
    attendance: Attendance,
    stop: CancellationToken,
}

impl Attending {
    /// It is there from now on.
    pub(super) async fn new(desk: &Desk, node: NodeRecord, facts: NodeFacts) -> Result<Self, RegistryError> {
        let peer = Peer {
            name: facts.name.clone(),
            instance: facts.instance.clone(),
            addresses: facts.addresses.clone(),
        };
        let (id, noted) = (node.id, facts.clone());
        let here = desk.registry.run(move |registry| {
            registry.store().attends(&id, &noted, Timestamp::now())?;
            registry.store().tell(
                EventKind::NodeHere,
                Some(&noted.name.0),
                &format!("{} is here", noted.name),
            )
        });
        here.await?;
        let attendance = desk.registry.presence().enter(id, facts);
        let (registry, identity, stop) = (desk.registry.clone(), desk.identity.clone(), desk.stop.clone());
        tracing::info!(node = %node.name, "a node is here");
        Ok(Self { registry, identity, node, peer, attendance, stop })
    }

    /// Until its end.
    pub(super) async fn run(self, mut words: Streaming<v1::NodeWord>, answers: Answers) {
        // Its end must be noted also if this task is dropped, which it is when the connection breaks.
        let farewell = Farewell { registry: self.registry.clone(), name: self.node.name.0.clone() };
        let reason = tokio::select! {
            reason = self.listen(&mut words) => reason,
            reason = self.look() => reason,
            never = self.be_reached(&answers) => match never {},
            () = self.stop.cancelled() => "the orchestrator stops".to_owned(),
        };
        if self.attendance.is_current() {
            tracing::info!(node = %self.node.name, %reason, "a node is away");
        }
        // The node may have gone.
        let _ = answers.send(Err(Status::aborted(reason))).await;
        drop(farewell);
    }

    async fn listen(&self, words: &mut Streaming<v1::NodeWord>) -> String {
        loop {
            let word = match tokio::time::timeout(SILENCE, words.message()).await {
                Ok(Ok(Some(v1::NodeWord { word: Some(word) }))) => word,
                Ok(Ok(Some(v1::NodeWord { word: None }))) => continue,
                Ok(Ok(None)) => return "it ended its stream".to_owned(),
                Ok(Err(status)) => return describe_status(&status),
                Err(_) => return format!("no sign of life for {} s", SILENCE.as_secs()),
            };
            let Word::Heartbeat(heartbeat) = word else { return "it introduced itself twice".to_owned() };
            match Heartbeat::check(heartbeat) {
                Ok(heartbeat) => self.attendance.beat(heartbeat),
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Ends when the node is no member any more, or has opened another stream.
    async fn look(&self) -> String {
        let mut next = Instant::now();
        loop {
            next += LOOK_PERIOD;
            tokio::time::sleep_until(next).await;
            if !self.attendance.is_current() {
                return "another process of this node attends".to_owned();
            }
            let id = self.node.id;
            let looked = self.registry.run(move |registry| {
                registry.store().seen(&id, Timestamp::now())?;
                registry.store().node(&id)
            });
            match looked.await {
                Ok(Some(node)) if node.state == MemberState::Approved => {}
                Ok(_) => return "it was removed from the cluster".to_owned(),
                Err(error) => tracing::warn!(%error, "the registry cannot be read"),
            }
        }
    }

    /// Tries its addresses until one leads to it, and tells it what came of that.
    async fn be_reached(&self, answers: &Answers) -> std::convert::Infallible {
        let mut told = None;
        loop {
            let (reached, answer) = match reach(&self.peer, &self.identity).await {
                Ok((address, _)) => (Reached::At(address.clone()), Answer::Reached(address.to_string())),
                Err(error) => {
                    let reason = error.to_string();
                    (Reached::Nowhere(reason.clone()), Answer::Unreachable(reason))
                }
            };
            self.attendance.reached(reached.clone());
            if told.as_ref() != Some(&reached) {
                self.note(&reached).await;
                let _ = answers.send(Ok(v1::ClusterWord { word: Some(answer) })).await;
            }
            if reached.address().is_some() {
                return std::future::pending().await;
            }
            told = Some(reached);
            tokio::time::sleep(REACH_PAUSE).await;
        }
    }

    async fn note(&self, reached: &Reached) {
        let (id, name, reached) = (self.node.id, self.node.name.0.clone(), reached.clone());
        let noted = self.registry.run(move |registry| match reached {
            Reached::At(address) => registry.store().reached(&id, &address),
            Reached::Nowhere(reason) => {
                registry.store().tell(EventKind::NodeUnreachable, Some(&name), &reason)
            }
            Reached::Trying => Ok(()),
        });
        if let Err(error) = noted.await {
            tracing::warn!(%error, "the registry cannot be written");
        }
    }
}

/// Notes that a node is away.
struct Farewell {
    registry: Registry,
    name: String,
}

impl Drop for Farewell {
    fn drop(&mut self) {
        let (registry, name) = (self.registry.clone(), std::mem::take(&mut self.name));
        // On a thread that may wait for the disk; it outlives this task by milliseconds.
        tokio::task::spawn_blocking(move || {
            if let Err(error) =
                registry.store().tell(EventKind::NodeAway, Some(&name), &format!("{name} is away"))
            {
                tracing::warn!(%error, "the registry cannot be written");
            }
        });
    }
}
