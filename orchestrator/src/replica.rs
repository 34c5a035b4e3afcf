//! The way to a replica: finds its master in the agent's word, sends it a request, and notices when it is lost.
//!
//! Knows nothing of text, nor of other replicas. A request holds on to the epoch it began in; when the agent says that the
//! replica has moved on or is down, the request is lost, whether or not its connection noticed. The other way round, a request that was
//! lost is known here before the agent's next look: until the agent has had the time to say so, the epoch is doubted.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex as SyncMutex, PoisonError};
use std::time::{Duration, Instant};

use cluster::{Epoch, ReplicaState};
use protocol::tls::{self, TlsIdentity};
use protocol::v1;
use protocol::v1::engine_client::EngineClient;
use protocol::v1::generate_event::Event;
use tokio::sync::{Mutex, Notify, watch};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::openai::ApiError;

/// A master that computes accepts a request after the step it is at, which is one chunk of a prompt at most: seconds
/// on a slow host. One that is dead is noticed by its agent long before this.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(60);

/// An agent sees the end of a process at once, and a frozen or broken one by its next heartbeats, within 3 s.
const DOUBT: Duration = Duration::from_secs(5);

/// A full engine has a slot free within a second or two.
const ENGINE_FULL_SECS: u16 = 2;

const AGENT_ENDED: &str = "the replica's agent has ended";

/// A replica as its agent reports it.
pub(crate) struct Replica {
    state: watch::Receiver<ReplicaState>,
    tls: TlsIdentity,
    connection: Mutex<Option<Connection>>,
    doubt: Arc<Doubt>,
}

/// The epoch in which a request was last lost, until when it is doubted, and why.
#[derive(Debug, Default)]
struct Doubt {
    raised: SyncMutex<Option<(Epoch, Instant, String)>>,
    news: Notify,
}

/// Whether a replica serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Serving {
    /// In which epoch, if it does.
    pub(crate) epoch: Option<Epoch>,
    /// When the doubt ends for which it does not.
    pub(crate) doubt_ends: Option<Instant>,
}

/// Why a request got nothing, or nothing more, of a replica.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Setback {
    /// The replica could not be asked: it knows nothing of the request.
    Unreached {
        /// For people.
        reason: String,
    },
    /// The replica neither holds its slots for others nor takes anything over from them.
    CannotHandOff {
        /// For people.
        reason: String,
    },
    /// The replica was lost, perhaps through the request.
    Lost {
        /// For people.
        reason: String,
    },
    /// The request would get the same answer anywhere.
    Final(ApiError),
}

impl Setback {
    /// The replica was removed from the fleet.
    pub(crate) fn taken_away() -> Self {
        Self::Unreached { reason: "it was taken away".to_owned() }
    }
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
    doubt: Arc<Doubt>,
}

impl Replica {
    pub(crate) fn new(state: watch::Receiver<ReplicaState>, tls: TlsIdentity) -> Self {
        Self { state, tls, connection: Mutex::new(None), doubt: Arc::default() }
    }

    /// What the agent last said.
    pub(crate) fn state(&self) -> ReplicaState {
        self.state.borrow().clone()
    }

    /// The agent's word, to wait for its changes.
    pub(crate) fn watch(&self) -> watch::Receiver<ReplicaState> {
        self.state.clone()
    }

    /// Returns when the replica was doubted since the last call.
    pub(crate) async fn doubted(&self) {
        self.doubt.news.notified().await;
    }

    /// Whether a request can be sent, and if not, why.
    pub(crate) fn readiness(&self) -> Result<(), String> {
        self.present().map(drop)
    }

    /// In which epoch a request can be sent, if it can.
    pub(crate) fn serving(&self) -> Serving {
        let epoch = self.present().ok().map(|(_, epoch)| epoch);
        Serving { epoch, doubt_ends: if epoch.is_none() { self.doubt.end() } else { None } }
    }

    /// The present master and epoch, or why there is none to be trusted.
    fn present(&self) -> Result<(SocketAddr, Epoch), String> {
        match &*self.state.borrow() {
            // The agent's last word may be "ready" even though it is gone.
            ReplicaState::Ready { .. } if self.state.has_changed().is_err() => Err(AGENT_ENDED.into()),
            ReplicaState::Ready { master, epoch } => self.doubt.check(*epoch).map(|()| (*master, *epoch)),
            state => Err(describe(state)),
        }
    }

    /// Sends a request to the master.
    pub(crate) async fn generate(&self, request: v1::GenerateRequest) -> Result<TokenStream, Setback> {
        let Connection { epoch, mut client } =
            self.connection().await.map_err(|reason| Setback::Unreached { reason })?;
        let changes_hands = request.hold_ms > 0 || request.from.is_some();
        let mut state = self.state.clone();
        let accepted = tokio::select! {
            biased;
            accepted = client.generate(request) => accepted.map_err(|status| refusal(&status)),
            reason = lost(&mut state, epoch) => Err(Setback::Lost { reason }),
            () = tokio::time::sleep(ACCEPT_DEADLINE) => Err(no_answer()),
        };
        let doubt = Arc::clone(&self.doubt);
        match accepted {
            Ok(accepted) => Ok(TokenStream { events: accepted.into_inner(), state, epoch, doubt }),
            Err(Setback::CannotHandOff { reason }) if !changes_hands => {
                Err(doubt.raise_for(epoch, Setback::Unreached { reason }))
            }
            Err(setback) => Err(doubt.raise_for(epoch, setback)),
        }
    }

    /// What the engine says of itself; none if it cannot be asked. May take long: the caller sets the deadline.
    pub(crate) async fn engine_status(&self) -> Option<v1::EngineStatusReply> {
        let Connection { mut client, .. } = self.connection().await.ok()?;
        client.engine_status(v1::EngineStatusRequest {}).await.ok().map(tonic::Response::into_inner)
    }

    /// The connection to the master of the present epoch.
    async fn connection(&self) -> Result<Connection, String> {
        // Held while connecting, so that of many waiting requests one connects.
        let mut connection = self.connection.lock().await;
        let (master, epoch) = self.present()?;
        if let Some(open) = connection.as_ref().filter(|open| open.epoch == epoch) {
            return Ok(open.clone());
        }
        let channel = tls::connect(master, &self.tls).await.map_err(|error| {
            let reason = error.to_string();
            self.doubt.raise(epoch, reason.clone());
            reason
        })?;
        let open = Connection { epoch, client: EngineClient::new(channel) };
        *connection = Some(open.clone());
        Ok(open)
    }
}

impl TokenStream {
    /// The next event. After [`Event::Finished`] there is none.
    pub(crate) async fn next(&mut self) -> Result<Event, Setback> {
        let received = self.receive().await;
        received.map_err(|setback| self.doubt.raise_for(self.epoch, setback))
    }

    async fn receive(&mut self) -> Result<Event, Setback> {
        loop {
            let received = tokio::select! {
                // What has arrived counts, even if the replica was lost after it.
                biased;
                received = self.events.message() => received,
                reason = lost(&mut self.state, self.epoch) => return Err(Setback::Lost { reason }),
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
                    return Err(Setback::Lost { reason: "its stream ended without a result".into() });
                }
                Err(status) => return Err(refusal(&status)),
            }
        }
    }
}

impl Doubt {
    /// Refuses an epoch that is doubted.
    fn check(&self, epoch: Epoch) -> Result<(), String> {
        match &*self.raised.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((doubted, until, reason)) if *doubted == epoch && Instant::now() < *until => {
                Err(reason.clone())
            }
            _ => Ok(()),
        }
    }

    fn raise(&self, epoch: Epoch, reason: String) {
        let doubt = (epoch, Instant::now() + DOUBT, reason);
        *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(doubt);
        self.news.notify_one();
    }

    /// Doubts an epoch if the setback says that it is lost; gives the setback back.
    fn raise_for(&self, epoch: Epoch, setback: Setback) -> Setback {
        if let Setback::Lost { reason } | Setback::Unreached { reason } = &setback {
            self.raise(epoch, reason.clone());
        }
        setback
    }

    /// When the last doubt ends.
    fn end(&self) -> Option<Instant> {
        let raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        raised.as_ref().map(|(_, until, _)| *until).filter(|until| *until > Instant::now())
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

fn no_answer() -> Setback {
    let reason = format!("its master did not accept the request within {} s", ACCEPT_DEADLINE.as_secs());
    Setback::Lost { reason }
}

/// A status is the master's own refusal, or the connection's end.
fn refusal(status: &Status) -> Setback {
    let reason = status.message().to_owned();
    let cause = std::error::Error::source(status);
    match (status.code(), cause) {
        (Code::ResourceExhausted, _) => {
            Setback::Final(ApiError::QueueFull { reason, seconds: ENGINE_FULL_SECS })
        }
        (Code::InvalidArgument | Code::OutOfRange, _) => Setback::Final(ApiError::Refused { reason }),
        // Said by a master whose stages are loading or not linked.
        (Code::Unavailable, None) => Setback::Unreached { reason },
        (Code::FailedPrecondition, None) => Setback::CannotHandOff { reason },
        (code, cause) => {
            let cause = cause.map_or(reason, tls::root_cause);
            Setback::Lost { reason: format!("its master: {cause} ({code:?})") }
        }
    }
}

fn failure(failed: v1::Failed) -> Setback {
    let kind = failed.kind();
    let reason = failed.message;
    match kind {
        v1::FailureKind::Invalid => Setback::Final(ApiError::Refused { reason }),
        v1::FailureKind::ReplicaLost => Setback::Lost { reason },
        v1::FailureKind::Unspecified | v1::FailureKind::Internal => {
            Setback::Final(ApiError::Engine { reason })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_that_lost_a_request_is_doubted_and_the_next_is_not() {
        let doubt = Doubt::default();
        doubt.check(Epoch(1)).unwrap();
        doubt.raise_for(Epoch(1), Setback::Final(ApiError::Refused { reason: "no".into() }));
        doubt.check(Epoch(1)).unwrap();
        assert_eq!(doubt.end(), None);
        doubt.raise_for(Epoch(1), Setback::Lost { reason: "stage 1".into() });
        assert_eq!(doubt.check(Epoch(1)), Err("stage 1".into()));
        assert!(doubt.end().is_some());
        doubt.check(Epoch(2)).unwrap();
    }

    #[test]
    fn a_master_without_stages_has_not_had_the_request() {
        let own = Status::unavailable("the pipeline is not linked");
        assert!(matches!(refusal(&own), Setback::Unreached { reason } if reason.contains("not linked")));
        let broken = Status::from_error(Box::new(std::io::Error::other("reset")));
        assert!(matches!(refusal(&broken), Setback::Lost { .. }));
    }
}
