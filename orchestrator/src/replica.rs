//! The way to a replica: finds its master in the agent's word, sends it a request, and notices when it is lost.
//!
//! Knows nothing of text. A request holds on to the epoch it began in; when the agent says that the replica has moved
//! on or is down, the request is lost, whether or not its connection noticed. The other way round, a request that was
//! lost is known here before the agent's next look: until the agent has had the time to say so, the epoch is doubted.

use std::sync::{Arc, Mutex as SyncMutex, PoisonError};
use std::time::{Duration, Instant};

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

/// An agent sees the end of a process at once, and a frozen or broken one by its next heartbeats, within 3 s.
const DOUBT: Duration = Duration::from_secs(5);

const AGENT_ENDED: &str = "the replica's agent has ended";

/// A replica as its agent reports it.
pub(crate) struct Replica {
    state: watch::Receiver<ReplicaState>,
    tls: TlsIdentity,
    connection: Mutex<Option<Connection>>,
    doubt: Doubt,
}

/// The epoch in which a request was last lost, until when it is doubted, and why.
#[derive(Debug, Clone, Default)]
struct Doubt(Arc<SyncMutex<Option<(Epoch, Instant, String)>>>);

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
    doubt: Doubt,
}

impl Replica {
    pub(crate) fn new(state: watch::Receiver<ReplicaState>, tls: TlsIdentity) -> Self {
        Self { state, tls, connection: Mutex::new(None), doubt: Doubt::default() }
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
            ReplicaState::Ready { epoch, .. } => self.doubt.check(*epoch),
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
        let doubt = self.doubt.clone();
        match accepted {
            Ok(accepted) => Ok(TokenStream { events: accepted.into_inner(), state, epoch, doubt }),
            Err(status) => Err(doubt.raise_if_lost(epoch, refusal(&status))),
        }
    }

    /// What the engine says of itself; none if it cannot be asked. May take long: the caller sets the deadline.
    pub(crate) async fn engine_status(&self) -> Option<v1::EngineStatusReply> {
        let Connection { mut client, .. } = self.connection().await.ok()?;
        client.engine_status(v1::EngineStatusRequest {}).await.ok().map(tonic::Response::into_inner)
    }

    /// The connection to the master of the present epoch.
    async fn connection(&self) -> Result<Connection, ApiError> {
        // Held while connecting, so that of many waiting requests one connects.
        let mut connection = self.connection.lock().await;
        let (master, epoch) = match &*self.state.borrow() {
            ReplicaState::Ready { master, epoch } => {
                self.doubt.check(*epoch)?;
                (*master, *epoch)
            }
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
        let received = self.receive().await;
        received.map_err(|error| self.doubt.raise_if_lost(self.epoch, error))
    }

    async fn receive(&mut self) -> Result<Event, ApiError> {
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

impl Doubt {
    /// Refuses an epoch that is doubted.
    fn check(&self, epoch: Epoch) -> Result<(), ApiError> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((doubted, until, reason)) if *doubted == epoch && Instant::now() < *until => {
                Err(ApiError::NotReady { reason: reason.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Doubts an epoch if the error says that it was lost; gives the error back.
    fn raise_if_lost(&self, epoch: Epoch, error: ApiError) -> ApiError {
        if let ApiError::ReplicaLost { reason } = &error {
            let doubt = (epoch, Instant::now() + DOUBT, reason.clone());
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(doubt);
        }
        error
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_that_lost_a_request_is_doubted_and_the_next_is_not() {
        let doubt = Doubt::default();
        doubt.check(Epoch(1)).unwrap();
        doubt.raise_if_lost(Epoch(1), ApiError::QueueFull { reason: "8 of 8".into() });
        doubt.check(Epoch(1)).unwrap();
        doubt.raise_if_lost(Epoch(1), ApiError::ReplicaLost { reason: "stage 1".into() });
        assert!(matches!(doubt.check(Epoch(1)), Err(ApiError::NotReady { reason }) if reason == "stage 1"));
        doubt.check(Epoch(2)).unwrap();
    }
}
