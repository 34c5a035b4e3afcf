//! The way to a replica: finds its master in the agent's word, sends it a request, and notices when it is lost.
//!
//! Knows nothing of text. A request holds on to the epoch it began in; when the agent says that the replica has moved
//! on or is down, the request is lost, whether or not its connection noticed.

use std::time::Duration;

use cluster::{Epoch, ReplicaState};
use protocol::tls::{self, TlsIdentity};
use protocol::v1;
use protocol::v1::engine_client::EngineClient;
use protocol::v1::generate_event::Event;
use tokio::sync::{Mutex, watch};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::openai::ApiError;

/// A master that computes accepts a request after the step it is at, which is one chunk of a prompt at most: seconds
/// on a slow host. One that is dead is noticed by its agent long before this.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(60);

const AGENT_ENDED: &str = "the replica's agent has ended";

/// A replica as its agent reports it.
pub(crate) struct Replica {
    state: watch::Receiver<ReplicaState>,
    tls: TlsIdentity,
    connection: Mutex<Option<Connection>>,
}

#[derive(Clone)]
struct Connection {
    epoch: Epoch,
    client: EngineClient<Channel>,
}

/// The events of one request. Dropping it cancels the request.
#[derive(Debug)]
pub(crate) struct TokenStream {
    events: Streaming<v1::GenerateEvent>,
    state: watch::Receiver<ReplicaState>,
    epoch: Epoch,
}

impl Replica {
    pub(crate) fn new(state: watch::Receiver<ReplicaState>, tls: TlsIdentity) -> Self {
        Self { state, tls, connection: Mutex::new(None) }
    }

    /// What the agent last said.
    pub(crate) fn state(&self) -> ReplicaState {
        self.state.borrow().clone()
    }

    /// Whether a request can be sent, and if not, why.
    pub(crate) fn readiness(&self) -> Result<(), ApiError> {
        match &*self.state.borrow() {
            // The agent's last word may be "ready" even though it is gone.
            ReplicaState::Ready { .. } if self.state.has_changed().is_err() => {
                Err(ApiError::NotReady { reason: AGENT_ENDED.into() })
            }
            ReplicaState::Ready { .. } => Ok(()),
            state => Err(ApiError::NotReady { reason: describe(state) }),
        }
    }

    /// Sends a request to the master.
    pub(crate) async fn generate(&self, request: v1::GenerateRequest) -> Result<TokenStream, ApiError> {
        let Connection { epoch, mut client } = self.connection().await?;
        let mut state = self.state.clone();
        let accepted = tokio::select! {
            biased;
            accepted = client.generate(request) => accepted,
            reason = lost(&mut state, epoch) => return Err(ApiError::ReplicaLost { reason }),
            () = tokio::time::sleep(ACCEPT_DEADLINE) => return Err(no_answer()),
        };
        let events = accepted.map_err(|status| refusal(&status))?.into_inner();
        Ok(TokenStream { events, state, epoch })
    }

    /// The connection to the master of the present epoch.
    async fn connection(&self) -> Result<Connection, ApiError> {
        // Held while connecting, so that of many waiting requests one connects.
        let mut connection = self.connection.lock().await;
        let (master, epoch) = match &*self.state.borrow() {
            ReplicaState::Ready { master, epoch } => (*master, *epoch),
            state => return Err(ApiError::NotReady { reason: describe(state) }),
        };
        if let Some(open) = connection.as_ref().filter(|open| open.epoch == epoch) {
            return Ok(open.clone());
        }
        let channel = tls::connect(master, &self.tls).await;
        let channel = channel.map_err(|error| ApiError::ReplicaLost { reason: error.to_string() })?;
        let open = Connection { epoch, client: EngineClient::new(channel) };
        *connection = Some(open.clone());
        Ok(open)
    }
}

impl TokenStream {
    /// The next event. After [`Event::Finished`] there is none.
    pub(crate) async fn next(&mut self) -> Result<Event, ApiError> {
        loop {
            let received = tokio::select! {
                // What has arrived counts, even if the replica was lost after it.
                biased;
                received = self.events.message() => received,
                reason = lost(&mut self.state, self.epoch) => return Err(ApiError::ReplicaLost { reason }),
            };
            match received {
                Ok(Some(v1::GenerateEvent { event: Some(Event::Failed(failed)) })) => {
                    return Err(failure(failed));
                }
                Ok(Some(v1::GenerateEvent { event: Some(event) })) => return Ok(event),
                Ok(Some(v1::GenerateEvent { event: None })) => {
                    tracing::debug!("the master sent an event of an unknown kind");
                }
                Ok(None) => {
                    return Err(ApiError::ReplicaLost { reason: "its stream ended without a result".into() });
                }
                Err(status) => return Err(refusal(&status)),
            }
        }
    }
}

/// Waits until the replica of `epoch` is no more, and says why.
async fn lost(state: &mut watch::Receiver<ReplicaState>, epoch: Epoch) -> String {
    loop {
        match &*state.borrow_and_update() {
            ReplicaState::Ready { epoch: present, .. } if *present == epoch => {}
            ReplicaState::Ready { epoch: present, .. } => {
                return format!("it was restarted ({present} after {epoch})");
            }
            state => return describe(state),
        }
        if state.changed().await.is_err() {
            return AGENT_ENDED.into();
        }
    }
}

/// Why a replica that is not ready is not.
fn describe(state: &ReplicaState) -> String {
    match state {
        ReplicaState::Loading { progress, waiting_for } => {
            format!("loading, {:.0} %, waiting for {waiting_for}", progress * 100.0)
        }
        ReplicaState::Ready { .. } => "ready".into(),
        ReplicaState::Down { reason } => reason.clone(),
    }
}

fn no_answer() -> ApiError {
    let reason = format!("its master did not accept the request within {} s", ACCEPT_DEADLINE.as_secs());
    ApiError::ReplicaLost { reason }
}

/// A status is the master's own refusal, or the connection's end.
fn refusal(status: &Status) -> ApiError {
    let reason = status.message().to_owned();
    match status.code() {
        Code::ResourceExhausted => ApiError::QueueFull { reason },
        Code::InvalidArgument | Code::OutOfRange => ApiError::Refused { reason },
        Code::FailedPrecondition => ApiError::NotReady { reason },
        code => {
            let cause = std::error::Error::source(status).map_or(reason, tls::root_cause);
            ApiError::ReplicaLost { reason: format!("its master: {cause} ({code:?})") }
        }
    }
}

fn failure(failed: v1::Failed) -> ApiError {
    let kind = failed.kind();
    let reason = failed.message;
    match kind {
        v1::FailureKind::Invalid => ApiError::Refused { reason },
        v1::FailureKind::ReplicaLost => ApiError::ReplicaLost { reason },
        v1::FailureKind::Unspecified | v1::FailureKind::Internal => ApiError::Engine { reason },
    }
}
