//! Becoming a member: with a token, or by asking an orchestrator that was found on the LAN.

use std::time::Duration;

use cluster::NodeId;
use protocol::certify::MemberKey;
use protocol::finding::lan::{self, LanError};
use protocol::finding::reach::first;
use protocol::fingerprint::{Fingerprint, pairing_code};
use protocol::identity::MemberIdentity;
use protocol::membership::{Admission, Newcomer};
use protocol::node::{Address, BadMessage, Build};
use protocol::pin::{ShownCa, connect_as_stranger, pinned_ca};
use protocol::tls::{ConnectError, TlsError, describe_status};
use protocol::token::JoinToken;
use protocol::v1;
use protocol::v1::ask_reply::Reply;
use protocol::v1::join_client::JoinClient;
use thiserror::Error;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};
use uuid::Uuid;

use super::state::Membership;

/// Within which an orchestrator answers: it waits for its disk at most.
const ANSWER_DEADLINE: Duration = Duration::from_secs(15);

/// How often a host asks whether somebody has decided.
const ASK_PAUSE: Duration = Duration::from_secs(2);

/// For which announcements are waited at a time.
const LISTEN: Duration = Duration::from_secs(4);

/// Who wants to join.
#[derive(Debug, Clone)]
pub struct Applicant {
    /// The host's id.
    pub id: Uuid,
    /// Its key.
    pub key: MemberKey,
    /// What it would like to be called.
    pub name: NodeId,
    /// What it runs.
    pub build: Build,
}

/// A cluster that was found, and not trusted yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Of its CA.
    pub ca: Fingerprint,
    /// Where its orchestrator is.
    pub addresses: Vec<Address>,
}

/// News for whoever waits for a host to be let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinNews {
    /// No orchestrator announces itself; it is looked for further.
    NobodyThere,
    /// One was found.
    Found(Found),
    /// Somebody has to decide; the code is what they compare.
    Pending {
        /// The same that the orchestrator shows, unless somebody is between the two.
        code: String,
    },
    /// It cannot be reached any more; it is looked for again.
    Lost(String),
}

/// Why a host did not become a member.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum JoinError {
    #[error("no orchestrator of the token's cluster was found: {}", .0.join("; "))]
    NotFound(Vec<String>),
    #[error("the orchestrator refused this host: {reason}")]
    Refused { reason: String, code: Code },
    #[error("the orchestrator did not answer within {} s", ANSWER_DEADLINE.as_secs())]
    Silent,
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the orchestrator gave an answer that cannot be used: {0}")]
    Answer(#[from] BadMessage),
    #[error("the orchestrator gave a certificate that cannot be used: {0}")]
    Certificate(#[from] TlsError),
    #[error(transparent)]
    Lan(#[from] LanError),
    #[error("several clusters announce themselves on this LAN ({}): join one with a token", list(.0))]
    SeveralClusters(Vec<Found>),
    #[error(
        "the orchestrator shows another code than this host: somebody between them pretends to be one to the other"
    )]
    OtherCode,
}

impl JoinError {
    /// Whether trying again may help.
    fn is_passing(&self) -> bool {
        match self {
            Self::NotFound(_) | Self::Silent | Self::Connect(_) => true,
            Self::Refused { code, .. } => {
                matches!(code, Code::Unavailable | Code::ResourceExhausted | Code::Internal | Code::Unknown)
            }
            _ => false,
        }
    }
}

fn list(found: &[Found]) -> String {
    let one = |found: &Found| {
        let addresses: Vec<String> = found.addresses.iter().map(ToString::to_string).collect();
        format!("{} at {}", found.ca, addresses.join(", "))
    };
    found.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// An orchestrator that was reached and belongs to the wanted cluster.
struct Reached {
    address: Address,
    ca: ShownCa,
    channel: Channel,
}

/// Joins with a token.
pub async fn join(applicant: &Applicant, token: &JoinToken) -> Result<Membership, JoinError> {
    let reached = find(&token.addresses, token.ca).await?;
    // From here on the other side is known to have a certificate of the token's cluster.
    let request = v1::JoinRequest {
        newcomer: Some(applicant.newcomer()),
        token_id: token.id.0.to_vec().into(),
        secret: token.secret.0.to_vec().into(),
    };
    let mut client = JoinClient::new(reached.channel.clone());
    let admission = answered(client.join(request)).await?;
    applicant.member(&reached, admission)
}

/// Asks whether this host is let in; `Err` holds the code while nobody has decided.
pub(super) async fn ask(
    applicant: &Applicant,
    found: &Found,
) -> Result<Result<Membership, String>, JoinError> {
    let reached = find(&found.addresses, found.ca).await?;
    let mut client = JoinClient::new(reached.channel.clone());
    let reply = answered(client.ask(v1::AskRequest { newcomer: Some(applicant.newcomer()) })).await?;
    match reply.reply {
        Some(Reply::Admission(admission)) => applicant.member(&reached, admission).map(Ok),
        Some(Reply::Pending(v1::Pending { code })) => {
            let ours = pairing_code(&applicant.key.fingerprint(), &found.ca);
            if code == ours { Ok(Err(code)) } else { Err(JoinError::OtherCode) }
        }
        None => Err(BadMessage::Missing { what: "an answer", field: "a decision" }.into()),
    }
}

/// The cluster that announces itself on this LAN, if it is one.
pub async fn find_cluster() -> Result<Option<Found>, JoinError> {
    let mut found: Vec<Found> = Vec::new();
    for lan::Announced { ca, addresses, .. } in lan::find(LISTEN).await? {
        match found.iter_mut().find(|known| known.ca == ca) {
            Some(known) => known.addresses.extend(addresses),
            None => found.push(Found { ca, addresses }),
        }
    }
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => Err(JoinError::SeveralClusters(found)),
    }
}

/// Asks whoever announces itself on this LAN until somebody has decided. Can be dropped at any time.
pub async fn wait_for_admission(
    applicant: &Applicant,
    told: &mut (dyn FnMut(JoinNews) + Send),
) -> Result<Membership, JoinError> {
    let mut last = None;
    let mut tell = |news: JoinNews| {
        if last.as_ref() != Some(&news) {
            told(news.clone());
            last = Some(news);
        }
    };
    loop {
        let Some(found) = find_cluster().await? else {
            tell(JoinNews::NobodyThere);
            continue;
        };
        tell(JoinNews::Found(found.clone()));
        loop {
            match ask(applicant, &found).await {
                Ok(Ok(membership)) => return Ok(membership),
                Ok(Err(code)) => tell(JoinNews::Pending { code }),
                Err(error) if error.is_passing() => {
                    tell(JoinNews::Lost(error.to_string()));
                    tokio::time::sleep(ASK_PAUSE).await;
                    break;
                }
                Err(error) => return Err(error),
            }
            tokio::time::sleep(ASK_PAUSE).await;
        }
    }
}

/// Reaches an orchestrator whose CA has this fingerprint.
async fn find(addresses: &[Address], wanted: Fingerprint) -> Result<Reached, JoinError> {
    let attempt = async |address: &Address| {
        let ca = pinned_ca(address, wanted).await.map_err(|error| error.to_string())?;
        let channel = connect_as_stranger(address, &ca).await.map_err(|error| error.to_string())?;
        Ok(Reached { address: address.clone(), ca, channel })
    };
    first(addresses, attempt).await.map_err(JoinError::NotFound)
}

async fn answered<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, JoinError> {
    let answer = tokio::time::timeout(ANSWER_DEADLINE, call).await.map_err(|_| JoinError::Silent)?;
    let refused =
        |status: Status| JoinError::Refused { reason: describe_status(&status), code: status.code() };
    answer.map(Response::into_inner).map_err(refused)
}

impl Applicant {
    fn newcomer(&self) -> v1::Newcomer {
        let certificate_request = self.key.request().to_vec();
        let (id, name, build) = (self.id, self.name.clone(), self.build.clone());
        Newcomer { id, name, build, certificate_request }.into()
    }

    fn member(&self, reached: &Reached, admission: v1::Admission) -> Result<Membership, JoinError> {
        let Admission { name, cert_pem, mut orchestrators, validity } = Admission::check(admission)?;
        let tls = self.key.identity(reached.ca.pem.clone(), cert_pem)?;
        // What worked comes first.
        orchestrators.retain(|address| *address != reached.address);
        orchestrators.insert(0, reached.address.clone());
        Ok(Membership { id: self.id, identity: MemberIdentity { name, tls }, orchestrators, validity })
    }
}
