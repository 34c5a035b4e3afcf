//! Leaving a cluster: the orchestrator is told, over the membership's own certificate, and takes it back.

use std::time::Duration;

use protocol::finding::reach::first;
use protocol::node::{Address, clean_text};
use protocol::tls::{self, describe_status};
use protocol::v1::LeaveRequest;
use protocol::v1::membership_client::MembershipClient;
use thiserror::Error;
use tonic::Code;

use super::state::Membership;

/// Within which an orchestrator answers: it waits for its disk at most.
const ANSWER_DEADLINE: Duration = Duration::from_secs(15);

/// What the orchestrator says to a member that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// It is no member any more.
    Now,
    /// It was none before.
    Before,
}

/// Why the orchestrator does not know that a node left.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum LeaveError {
    #[error("the orchestrator cannot be reached: {}", .0.join("; "))]
    Away(Vec<String>),
    #[error("the orchestrator did not answer within {} s", ANSWER_DEADLINE.as_secs())]
    Silent,
    #[error("the orchestrator refused: {0}")]
    Refused(String),
}

/// Tells the orchestrator. What is kept on this host stays as it is.
pub async fn leave(membership: &Membership) -> Result<Left, LeaveError> {
    let attempt = async |address: &Address| {
        tls::connect(address, &membership.identity.tls).await.map_err(|error| error.to_string())
    };
    let channel = first(&membership.orchestrators, attempt).await.map_err(LeaveError::Away)?;
    let mut client = MembershipClient::new(channel);
    let answer = tokio::time::timeout(ANSWER_DEADLINE, client.leave(LeaveRequest {})).await;
    match answer.map_err(|_| LeaveError::Silent)? {
        Ok(_) => Ok(Left::Now),
        Err(status) if status.code() == Code::PermissionDenied => Ok(Left::Before),
        Err(status) => Err(LeaveError::Refused(clean_text(&describe_status(&status)))),
    }
}
