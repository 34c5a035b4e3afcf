//! The cluster port over real connections: who is let in, who is refused, and that nothing else happens then.

use std::net::SocketAddr;
use std::time::Duration;

use protocol::certify::MemberKey;
use protocol::membership::Newcomer;
use protocol::pin::{ShownCa, connect_as_stranger, pinned_ca};
use protocol::tls::{ClusterCa, TlsIdentity, connect};
use protocol::token::JoinToken;
use protocol::v1;
use protocol::v1::join_client::JoinClient;
use protocol::v1::membership_client::MembershipClient;
use tempfile::TempDir;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::*;
use crate::event::EventKind;
use crate::member::MemberState;
use crate::testing::{build, newcomer, newcomer_with_key};

const DAY: Duration = Duration::from_secs(24 * 3600);

struct Port {
    registry: Registry,
    address: SocketAddr,
    _folder: TempDir,
    _stop: DropGuard,
}

impl Port {
    async fn open(approval: Approval) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::open(folder.path()).unwrap();
        let config = ClusterPortConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            advertise: Vec::new(),
            build: build(),
            approval,
            announce: Announce::Nowhere,
            certificate_life: DAY,
        };
        let port = ClusterPort::bind(registry.clone(), config).await.unwrap();
        let (address, stop) = (port.local_addr(), CancellationToken::new());
        tokio::spawn(port.serve(stop.clone()));
        Self { registry, address, _folder: folder, _stop: stop.drop_guard() }
    }

    fn token(&self) -> JoinToken {
        self.registry.make_token(DAY, vec![self.address.into()]).unwrap()
    }

    async fn ca(&self) -> ShownCa {
        pinned_ca(self.address, self.registry.fingerprint()).await.unwrap()
    }

    async fn stranger(&self) -> Channel {
        connect_as_stranger(self.address, &self.ca().await).await.unwrap()
    }

    async fn join(&self, newcomer: &Newcomer, token: &JoinToken) -> Result<v1::Admission, Status> {
        let request = v1::JoinRequest {
            newcomer: Some(newcomer.clone().into()),
            token_id: token.id.0.to_vec().into(),
            secret: token.secret.0.to_vec().into(),
        };
        JoinClient::new(self.stranger().await).join(request).await.map(tonic::Response::into_inner)
    }

    async fn ask(&self, newcomer: &Newcomer) -> Result<v1::ask_reply::Reply, Status> {
        let request = v1::AskRequest { newcomer: Some(newcomer.clone().into()) };
        let reply = JoinClient::new(self.stranger().await).ask(request).await?;
        Ok(reply.into_inner().reply.unwrap())
    }

    /// A member, with its identity.
    async fn member(&self, id: u128, name: &str) -> TlsIdentity {
        let (newcomer, key) = newcomer_with_key(id, name);
        self.identity(&key, self.join(&newcomer, &self.token()).await.unwrap())
    }

    fn identity(&self, key: &MemberKey, admission: v1::Admission) -> TlsIdentity {
        key.identity(self.registry.ca().certificate_pem().to_owned(), admission.certificate_pem).unwrap()
    }

    async fn as_member(&self, identity: &TlsIdentity) -> MembershipClient<Channel> {
        MembershipClient::new(connect(self.address, identity).await.unwrap())
    }

    fn refusals(&self) -> Vec<String> {
        let events = self.registry.events_after(0, 1000).unwrap();
        events
            .into_iter()
            .filter(|event| event.kind == EventKind::JoinRefused)
            .map(|event| event.text)
            .collect()
    }
}

// Field case 31.
#[tokio::test]
async fn case_31_every_wrong_token_is_refused_with_its_reason_told_once_and_changes_nothing() {
    let port = Port::open(Approval::ByHand).await;
    let (newcomer, _) = newcomer_with_key(1, "desk");
    let good = port.token();
    let expired = port.registry.make_token(Duration::ZERO, Vec::new()).unwrap();
    let revoked = port.token();
    port.registry.revoke_token(&revoked.id.to_string()).unwrap();
    let other = Port::open(Approval::ByHand).await.token();
    let mut guessed = good.clone();
    guessed.secret.0[0] ^= 1;
    for (token, reason) in [
        (guessed, "not one of this cluster"),
        (expired, "expired"),
        (revoked, "revoked"),
        (other, "not one of"),
    ] {
        let refused = port.join(&newcomer, &token).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert!(refused.message().contains(reason), "{refused}");
    }
    assert!(port.registry.members().unwrap().is_empty(), "somebody was let in");
    assert_eq!(port.refusals().len(), 4, "{:?}", port.refusals());
    assert!(port.registry.tokens().unwrap().iter().all(|token| token.uses == 0));
    assert!(port.join(&newcomer, &good).await.is_ok());
}

// Field case 16.
#[tokio::test]
async fn case_16_another_build_is_refused_with_both_versions() {
    let port = Port::open(Approval::Automatic).await;
    let (mut newcomer, _) = newcomer_with_key(1, "desk");
    newcomer.build.version = "9.9.9".into();
    let token = port.token();
    for refused in [port.join(&newcomer, &token).await.map(drop), port.ask(&newcomer).await.map(drop)] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("9.9.9") && refused.message().contains("0.1.0"), "{refused}");
    }
    assert!(port.registry.members().unwrap().is_empty());
}

#[tokio::test]
async fn a_request_without_the_keys_signature_is_refused() {
    let port = Port::open(Approval::Automatic).await;
    let refused = port.join(&newcomer(1, "desk"), &port.token()).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    let nobody = JoinClient::new(port.stranger().await).join(v1::JoinRequest::default()).await.unwrap_err();
    assert_eq!(nobody.code(), Code::InvalidArgument, "{nobody}");
    assert!(port.registry.members().unwrap().is_empty());
}

#[tokio::test]
async fn who_tries_too_often_is_held_back_even_with_a_good_token() {
    let port = Port::open(Approval::ByHand).await;
    let (newcomer, _) = newcomer_with_key(1, "desk");
    let mut wrong = port.token();
    wrong.secret.0[0] ^= 1;
    let mut refused = 0;
    let held_back = loop {
        let status = port.join(&newcomer, &wrong).await.unwrap_err();
        if status.code() == Code::ResourceExhausted {
            break status;
        }
        refused += 1;
        assert!(refused < 100, "nobody is held back");
    };
    assert!(held_back.message().contains("wait for"), "{held_back}");
    assert_eq!(port.join(&newcomer, &port.token()).await.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!(port.refusals().len(), refused, "those held back are not told of one by one");
}

#[tokio::test]
async fn without_a_certificate_of_a_present_member_no_other_call_is_answered() {
    let port = Port::open(Approval::ByHand).await;
    // None at all.
    let mut stranger = MembershipClient::new(port.stranger().await);
    let words = || tokio_stream::iter([v1::NodeWord { word: None }]);
    assert_eq!(stranger.attend(words()).await.unwrap_err().code(), Code::Unauthenticated);
    let renew =
        v1::RenewRequest { certificate_request: MemberKey::generate().unwrap().request().to_vec().into() };
    assert_eq!(stranger.renew(renew.clone()).await.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(stranger.leave(v1::LeaveRequest {}).await.unwrap_err().code(), Code::Unauthenticated);
    // One of the CA that is no node's.
    let mut hand_made = port.as_member(&port.registry.own_identity("x").unwrap()).await;
    assert_eq!(hand_made.renew(renew.clone()).await.unwrap_err().code(), Code::PermissionDenied);
    // One of another cluster, with this one's CA to trust: not past the handshake.
    let mut foreign = ClusterCa::new().unwrap().issue("x").unwrap();
    foreign.ca_pem = port.ca().await.pem;
    let mut client = match connect(port.address, &foreign).await {
        Ok(channel) => MembershipClient::new(channel),
        Err(_) => return,
    };
    assert!(client.renew(renew).await.is_err());
    assert!(port.registry.members().unwrap().is_empty());
}

#[tokio::test]
async fn a_member_renews_and_leaves_and_its_certificate_is_worth_nothing_then() {
    let port = Port::open(Approval::ByHand).await;
    let old = port.member(1, "desk").await;
    let key = MemberKey::generate().unwrap();
    let renew = v1::RenewRequest { certificate_request: key.request().to_vec().into() };
    let renewed = port.as_member(&old).await.renew(renew.clone()).await.unwrap().into_inner();
    assert_eq!((renewed.name.as_str(), renewed.expires - renewed.issued), ("desk", DAY.as_secs()));
    let new = port.identity(&key, renewed);
    let mut client = port.as_member(&new).await;
    client.leave(v1::LeaveRequest {}).await.unwrap();
    for identity in [&old, &new] {
        let refused = port.as_member(identity).await.renew(renew.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
    }
    assert_eq!(port.registry.members().unwrap()[0].record.state, MemberState::Left);
}

#[tokio::test]
async fn a_host_without_a_token_is_let_in_when_the_code_that_both_see_was_approved() {
    let port = Port::open(Approval::ByHand).await;
    let (newcomer, key) = newcomer_with_key(1, "desk");
    let v1::ask_reply::Reply::Pending(v1::Pending { code }) = port.ask(&newcomer).await.unwrap() else {
        panic!("nobody approved it")
    };
    assert_eq!(code, pairing_code_of(&port, &key));
    assert_eq!(port.registry.members().unwrap()[0].record.code.as_deref(), Some(code.as_str()));
    port.registry.approve("desk").unwrap();
    let v1::ask_reply::Reply::Admission(admission) = port.ask(&newcomer).await.unwrap() else {
        panic!("it was approved")
    };
    let member = port.identity(&key, admission);
    let renew = v1::RenewRequest { certificate_request: key.request().to_vec().into() };
    assert!(port.as_member(&member).await.renew(renew).await.is_ok());
}

fn pairing_code_of(port: &Port, key: &MemberKey) -> String {
    protocol::fingerprint::pairing_code(&key.fingerprint(), &port.registry.fingerprint())
}

#[tokio::test]
async fn where_all_are_let_in_a_host_without_a_token_is_a_member_at_once() {
    let port = Port::open(Approval::Automatic).await;
    let (newcomer, key) = newcomer_with_key(1, "desk");
    let v1::ask_reply::Reply::Admission(admission) = port.ask(&newcomer).await.unwrap() else {
        panic!("all are let in")
    };
    port.identity(&key, admission);
}
