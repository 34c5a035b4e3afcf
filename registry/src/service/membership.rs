//! The Membership service: for nodes that are members, which their connection's certificate tells.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use protocol::certify::CheckedRequest;
use protocol::fingerprint::Fingerprint;
use protocol::membership::Admission;
use protocol::node::NodeFacts;
use protocol::throttle::Throttle;
use protocol::v1;
use protocol::v1::node_word::Word;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status, Streaming};

use super::Desk;
use super::attend::Attending;
use super::refusal::{caller, internal};
use crate::error::RegistryError;
use crate::event::EventKind;
use crate::member::{MemberState, NodeRecord};
use crate::timestamp::Timestamp;

/// Within which a node that opened a stream says who it is.
const FIRST_WORD_DEADLINE: Duration = Duration::from_secs(5);

/// Words to a node that it has not taken yet; there are few.
const QUEUE: usize = 8;

/// Log lines about callers who are no members: one per this long.
const LOG_PERIOD: Duration = Duration::from_secs(1);

/// For members.
pub(super) struct MembershipService {
    desk: Desk,
    refused: Throttle,
}

/// Words to a node. Dropping it ends the node's presence.
pub(crate) struct ClusterWords {
    words: mpsc::Receiver<Result<v1::ClusterWord, Status>>,
    _attending: AbortOnDropHandle<()>,
}

impl Stream for ClusterWords {
    type Item = Result<v1::ClusterWord, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.words.poll_recv(cx)
    }
}

impl MembershipService {
    pub(super) fn new(desk: Desk) -> Self {
        Self { desk, refused: Throttle::new(LOG_PERIOD) }
    }

    /// Whose certificate the connection showed. Every call begins with this.
    async fn member<T>(&self, request: &Request<T>) -> Result<NodeRecord, Status> {
        let member = self.find_member(request).await;
        if let Err(status) = &member
            && let Some(held) = self.refused.pass(Instant::now())
        {
            let (host, reason) = (caller(request).ip(), status.message());
            tracing::warn!(%host, reason, held, "refused a call that is for members of the cluster");
        }
        member
    }

    async fn find_member<T>(&self, request: &Request<T>) -> Result<NodeRecord, Status> {
        let certificates = request.peer_certs().unwrap_or_default();
        let Some(certificate) = certificates.first() else {
            return Err(Status::unauthenticated(
                "this call is for members of the cluster, with a certificate",
            ));
        };
        let certificate = Fingerprint::of(certificate);
        let found = self.desk.registry.run(move |registry| {
            let id = registry.store().holder(&certificate)?;
            Ok(id.map(|id| registry.store().node(&id)).transpose()?.flatten())
        });
        let found = found.await.map_err(|error| internal(&error))?;
        found
            .filter(|node| node.state == MemberState::Approved)
            .ok_or_else(|| Status::permission_denied("this certificate is no present member's"))
    }

    fn check_facts(&self, node: &NodeRecord, facts: v1::NodeDescription) -> Result<NodeFacts, Status> {
        let facts = NodeFacts::check(facts).map_err(|error| Status::invalid_argument(error.to_string()))?;
        if facts.name != node.name {
            return Err(Status::failed_precondition(format!(
                "it calls itself {}, and is a member as {}",
                facts.name, node.name
            )));
        }
        let checked = self.desk.build.check_same(&facts.build);
        checked.map_err(|mismatch| Status::failed_precondition(mismatch.to_string()))?;
        Ok(facts)
    }
}

#[tonic::async_trait]
impl v1::membership_server::Membership for MembershipService {
    type AttendStream = ClusterWords;

    async fn attend(
        &self,
        request: Request<Streaming<v1::NodeWord>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let node = self.member(&request).await?;
        let mut words = request.into_inner();
        let silent =
            |_| Status::deadline_exceeded(format!("no word for {} s", FIRST_WORD_DEADLINE.as_secs()));
        let first = tokio::time::timeout(FIRST_WORD_DEADLINE, words.message()).await.map_err(silent)??;
        let Some(Word::Here(facts)) = first.and_then(|word| word.word) else {
            return Err(Status::invalid_argument("the first word must say who attends"));
        };
        let facts = self.check_facts(&node, facts)?;
        let (answers, queue) = mpsc::channel(QUEUE);
        let attending = Attending::new(&self.desk, node, facts).await.map_err(|error| internal(&error))?;
        let attending = tokio::spawn(attending.run(words, answers));
        Ok(Response::new(ClusterWords { words: queue, _attending: AbortOnDropHandle::new(attending) }))
    }

    async fn renew(&self, request: Request<v1::RenewRequest>) -> Result<Response<v1::Admission>, Status> {
        let node = self.member(&request).await?;
        let checked = CheckedRequest::check(&request.into_inner().certificate_request);
        let checked = checked.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (desk, name) = (self.desk.clone(), node.name.clone());
        let renewed = self.desk.registry.run(move |registry| -> Result<Admission, RegistryError> {
            let node = (&node.id, &node.name);
            desk.certify(registry, node, checked, EventKind::CertificateRenewed)
        });
        let admission = renewed.await.map_err(|error| internal(&error))?;
        tracing::info!(node = %name, "a node's certificate was renewed");
        Ok(Response::new(admission.into()))
    }

    async fn leave(&self, request: Request<v1::LeaveRequest>) -> Result<Response<v1::LeaveReply>, Status> {
        let node = self.member(&request).await?;
        let left = self.desk.registry.run(move |registry| {
            registry.store().seen(&node.id, Timestamp::now())?;
            registry.store().remove(&node.id)
        });
        let node = left.await.map_err(|error| internal(&error))?;
        tracing::info!(node = %node.name, "a node left");
        Ok(Response::new(v1::LeaveReply {}))
    }
}
