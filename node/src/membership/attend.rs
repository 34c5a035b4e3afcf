//! Being there: a stream to the orchestrator that says that this node lives, where it is and what it runs, and the
//! certificate's renewal. The orchestrator may be away for as long as it likes; the node goes on with what it does.

use std::time::{Duration, SystemTime};

use protocol::certify::{LiveIdentity, MemberKey};
use protocol::finding::lan;
use protocol::finding::reach::first;
use protocol::identity::MemberIdentity;
use protocol::membership::Admission;
use protocol::node::{Address, Build, clean_text};
use protocol::tls::{self, describe_status};
use protocol::v1;
use protocol::v1::cluster_word::Word as Answer;
use protocol::v1::membership_client::MembershipClient;
use protocol::v1::node_word::Word;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::join::{Applicant, Found, JoinError, ask};
use super::state::{Membership, MembershipError, NodeState};
use crate::service::NodeWords;

/// Between two signs of life.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Signs of life that were not taken yet. When the connection stalls, the next will do.
const QUEUE: usize = 4;

/// Before the orchestrator is looked for again; doubled up to the longest. One that was started again serves when its nodes have found
/// it, within five seconds, and a try costs next to nothing.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// After so many failures in a row its address may have changed: it is listened for on the LAN too, during the pauses.
const LISTEN_AFTER: u32 = 3;

/// Addresses of the orchestrator that are kept.
const MOST_ADDRESSES: usize = 32;

/// Before a renewal that failed is tried again: several times before the certificate expires.
const RENEW_PAUSE_SHARE: u32 = 20;

/// A node's attendance.
pub struct Attendance {
    state: NodeState,
    membership: Membership,
    identity: LiveIdentity,
    build: Build,
    words: NodeWords,
}

/// News of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttendanceNews {
    /// The orchestrator knows that the node is there.
    Attends {
        /// Where it was reached.
        orchestrator: Address,
    },
    /// It reaches the node at this address.
    Reached(String),
    /// It reaches the node nowhere.
    Unreachable(String),
    /// It is away; it is looked for further.
    Away(String),
    /// The certificate was renewed.
    Renewed,
}

/// Why a node attends no more.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum AttendanceError {
    #[error("the cluster has no place for this host any more: {0}")]
    Removed(String),
    #[error(transparent)]
    State(#[from] MembershipError),
}

/// Why a stream ended.
enum Ended {
    /// It is tried again.
    Away(String),
    /// The certificate is not taken; another may be had for the same key.
    Unknown(String),
    /// For good.
    Failed(AttendanceError),
}

impl From<Status> for Ended {
    fn from(status: Status) -> Self {
        let reason = clean_text(&describe_status(&status));
        match status.code() {
            Code::PermissionDenied | Code::Unauthenticated => Self::Unknown(reason),
            // Another build, or another name: neither changes while both processes run.
            Code::FailedPrecondition => Self::Failed(AttendanceError::Removed(reason)),
            _ => Self::Away(reason),
        }
    }
}

impl Attendance {
    /// Of a member. `identity` is what its services present; it is renewed here.
    pub fn new(state: NodeState, membership: Membership, identity: LiveIdentity, words: NodeWords) -> Self {
        let build = words.facts().build;
        Self { state, membership, identity, build, words }
    }

    /// Attends until told to stop, or until the cluster has no place for the node.
    pub async fn run(
        mut self,
        stop: CancellationToken,
        told: &mut (dyn FnMut(AttendanceNews) + Send),
    ) -> Result<(), AttendanceError> {
        let (mut failures, mut pause) = (0, FIRST_PAUSE);
        loop {
            let mut attended = false;
            let mut tell = |news: AttendanceNews| {
                attended |= matches!(news, AttendanceNews::Attends { .. });
                told(news);
            };
            let ended = tokio::select! {
                ended = self.attend(&mut tell) => ended,
                () = stop.cancelled() => return Ok(()),
            };
            if attended {
                (failures, pause) = (0, FIRST_PAUSE);
            }
            match ended {
                Ended::Failed(error) => return Err(error),
                Ended::Unknown(reason) => self.be_known_again(&reason).await?,
                Ended::Away(reason) => told(AttendanceNews::Away(reason)),
            }
            failures += 1;
            tokio::select! {
                () = self.wait(pause, failures) => {}
                () = stop.cancelled() => return Ok(()),
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
            if failures >= LISTEN_AFTER {
                // By the orchestrator's clock it may have expired, and a refused handshake tells nothing.
                if self.until_renewal().is_zero() {
                    self.be_known_again("this host's certificate is old").await?;
                }
            }
        }
    }

    /// One stream, from its connection to its end.
    async fn attend(&mut self, told: &mut (dyn FnMut(AttendanceNews) + Send)) -> Ended {
        if self.membership.validity.expires <= SystemTime::now() {
            return Ended::Unknown("this host's certificate has expired".to_owned());
        }
        let (orchestrator, channel) = match self.connect().await {
            Ok(connected) => connected,
            Err(reasons) => return Ended::Away(reasons.join("; ")),
        };
        match self.talk(&orchestrator, channel, told).await {
            Ok(never) => match never {},
            Err(ended) => ended,
        }
    }

    async fn connect(&self) -> Result<(Address, Channel), Vec<String>> {
        let identity = self.identity.now();
        let attempt = async |address: &Address| {
            let connected = tls::connect(address, &identity).await.map_err(|error| error.to_string())?;
            Ok((address.clone(), connected))
        };
        first(&self.membership.orchestrators, attempt).await
    }

    async fn talk(
        &mut self,
        orchestrator: &Address,
        channel: Channel,
        told: &mut (dyn FnMut(AttendanceNews) + Send),
    ) -> Result<std::convert::Infallible, Ended> {
        let mut client = MembershipClient::new(channel);
        let (words, queue) = mpsc::channel(QUEUE);
        // There is room.
        let _ = words.try_send(word(Word::Here(self.words.facts().into())));
        let mut answers = client.attend(ReceiverStream::new(queue)).await?.into_inner();
        told(AttendanceNews::Attends { orchestrator: orchestrator.clone() });
        self.prefer(orchestrator)?;
        let mut beats = tokio::time::interval(HEARTBEAT);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut renewal = Instant::now() + self.until_renewal();
        loop {
            tokio::select! {
                answer = answers.message() => match answer?.and_then(|answer| answer.word) {
                    Some(Answer::Reached(address)) => told(AttendanceNews::Reached(clean_text(&address))),
                    Some(Answer::Unreachable(reason)) => told(AttendanceNews::Unreachable(clean_text(&reason))),
                    None => return Err(Ended::Away("the orchestrator ended the stream".to_owned())),
                },
                _ = beats.tick() => {
                    // If the queue is full, the connection stalls, which its keepalive will notice.
                    let _ = words.try_send(word(Word::Heartbeat(self.words.heartbeat().into())));
                }
                () = tokio::time::sleep_until(renewal) => {
                    match self.renew(&mut client).await {
                        Ok(()) => told(AttendanceNews::Renewed),
                        Err(reason) => tracing::warn!(%reason, "the certificate could not be renewed yet"),
                    }
                    renewal = Instant::now() + self.until_renewal().max(self.renewal_pause());
                }
            }
        }
    }

    fn until_renewal(&self) -> Duration {
        self.membership.validity.renew_at().duration_since(SystemTime::now()).unwrap_or_default()
    }

    fn renewal_pause(&self) -> Duration {
        let validity = self.membership.validity;
        validity.expires.duration_since(validity.issued).unwrap_or_default() / RENEW_PAUSE_SHARE
    }

    /// Gets a certificate for a new key. Connections that exist keep the old one; it is good for as long as it was.
    async fn renew(&mut self, client: &mut MembershipClient<Channel>) -> Result<(), String> {
        let key = MemberKey::generate().map_err(|error| error.to_string())?;
        let request = v1::RenewRequest { certificate_request: key.request().to_vec().into() };
        let admission = client.renew(request).await.map_err(|status| describe_status(&status))?;
        let admission = Admission::check(admission.into_inner()).map_err(|error| error.to_string())?;
        let Admission { name, cert_pem, orchestrators, validity } = admission;
        let ca_pem = self.membership.identity.tls.ca_pem.clone();
        let tls = key.identity(ca_pem, cert_pem).map_err(|error| error.to_string())?;
        let known = std::mem::take(&mut self.membership.orchestrators);
        self.membership.orchestrators = merged(known, orchestrators);
        self.membership.identity = MemberIdentity { name, tls: tls.clone() };
        self.membership.validity = validity;
        // Kept first: a certificate that is in use must not be lost with the process.
        self.state.keep(&self.membership).map_err(|error| error.to_string())?;
        self.identity.renew(tls);
        Ok(())
    }

    /// The orchestrator is where it was reached last.
    fn prefer(&mut self, orchestrator: &Address) -> Result<(), Ended> {
        if self.membership.orchestrators.first() == Some(orchestrator) {
            return Ok(());
        }
        let known = std::mem::take(&mut self.membership.orchestrators);
        self.membership.orchestrators = merged(vec![orchestrator.clone()], known);
        self.state.keep(&self.membership).map_err(|error| Ended::Failed(error.into()))
    }

    /// A host whose certificate is not taken any more, because it was away for too long, gets another for the same key;
    /// one that was removed does not.
    async fn be_known_again(&mut self, reason: &str) -> Result<(), AttendanceError> {
        let key = MemberKey::from_pem(&self.identity.now().key_pem).map_err(MembershipError::from)?;
        let ca = self.membership.cluster().map_err(MembershipError::from)?;
        let found = Found { ca, addresses: self.membership.orchestrators.clone() };
        let (id, name, build) =
            (self.membership.id, self.membership.identity.name.clone(), self.build.clone());
        match ask(&Applicant { id, key, name, build }, &found).await {
            Ok(Ok(membership)) => {
                self.state.keep(&membership)?;
                self.identity.renew(membership.identity.tls.clone());
                self.membership = membership;
                Ok(())
            }
            Ok(Err(_)) => Err(AttendanceError::Removed(reason.to_owned())),
            Err(JoinError::Refused { reason, code: Code::PermissionDenied | Code::FailedPrecondition }) => {
                Err(AttendanceError::Removed(reason))
            }
            Err(error) => {
                tracing::warn!(%error, "no new certificate could be had yet");
                Ok(())
            }
        }
    }

    /// Pauses after so many failures.
    async fn wait(&mut self, pause: Duration, failures: u32) {
        let listening = async {
            if failures >= LISTEN_AFTER {
                self.listen_for_it(pause).await;
            }
        };
        tokio::join!(tokio::time::sleep(pause), listening);
    }

    /// An orchestrator whose address has changed may announce itself.
    async fn listen_for_it(&mut self, pause: Duration) {
        let Ok(ca) = self.membership.cluster() else { return };
        let Ok(announced) = lan::find(pause).await else { return };
        for found in announced.into_iter().filter(|found| found.ca == ca) {
            let known = std::mem::take(&mut self.membership.orchestrators);
            self.membership.orchestrators = merged(known, found.addresses);
        }
    }
}

fn word(word: Word) -> v1::NodeWord {
    v1::NodeWord { word: Some(word) }
}

/// Both, the first ones first, each once.
fn merged(mut first: Vec<Address>, second: Vec<Address>) -> Vec<Address> {
    for address in second {
        if !first.contains(&address) {
            first.push(address);
        }
    }
    first.truncate(MOST_ADDRESSES);
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_were_told_come_after_those_that_are_known() {
        let address = |text: &str| Address::parse(text).unwrap();
        let merged = merged(vec![address("a:1"), address("b:1")], vec![address("b:1"), address("c:1")]);
        assert_eq!(merged, [address("a:1"), address("b:1"), address("c:1")]);
    }
}
