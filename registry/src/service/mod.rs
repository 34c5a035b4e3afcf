//! The cluster port: where hosts join, and where members attend and renew their certificates.
//!
//! Strangers get past the handshake here, since they have no certificate yet; the Join service is theirs. Every call of
//! the Membership service first asks whose certificate its connection showed, and whether that node is still a member.

mod attend;
mod join;
mod membership;
mod refusal;

use std::net::SocketAddr;
use std::time::Duration;

use protocol::certify::{CheckedRequest, Validity};
use protocol::finding::{addresses, lan};
use protocol::listen::{Clients, FrameSizes, ListenError, TlsIncoming, server};
use protocol::membership::Admission;
use protocol::node::{Address, Build};
use protocol::tls::TlsIdentity;
use protocol::v1::join_server::JoinServer;
use protocol::v1::membership_server::MembershipServer;
use thiserror::Error;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::error::RegistryError;
use crate::event::EventKind;
use crate::registry::Registry;
use crate::store::NewCertificate;
use crate::timestamp::Timestamp;
use join::JoinService;
use membership::MembershipService;

/// Largest message: what a node says of itself, with all its devices and addresses, is some kilobytes.
const MAX_REQUEST: usize = 256 << 10;

/// Small messages only; these are the smallest windows.
const SIZES: (u32, u32) = (1, 1);

/// Who decides about hosts without a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Approval {
    /// Somebody, one by one.
    ByHand,
    /// Nobody: all are let in.
    Automatic,
}

/// Whether hosts without a token can find the orchestrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Announce {
    /// It announces itself by mDNS.
    OnLan,
    /// It does not.
    Nowhere,
}

/// How the cluster port is served.
#[derive(Debug, Clone)]
pub struct ClusterPortConfig {
    /// Where to listen.
    pub listen: SocketAddr,
    /// What to tell others of where it is reached; if empty, what the host's interfaces say.
    pub advertise: Vec<Address>,
    /// What this process runs; nodes must run the same.
    pub build: Build,
    /// Who decides about hosts without a token.
    pub approval: Approval,
    /// Whether it can be found.
    pub announce: Announce,
    /// For how long a node's certificate is good.
    pub certificate_life: Duration,
}

/// Why there is no cluster port.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum PortError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error("serving the cluster port")]
    Serve(#[from] tonic::transport::Error),
}

/// A cluster port that listens.
pub struct ClusterPort {
    incoming: TlsIncoming,
    desk: Desk,
    announce: Announce,
    addresses: Vec<Address>,
}

/// What both services need.
#[derive(Debug, Clone)]
struct Desk {
    registry: Registry,
    identity: TlsIdentity,
    build: Build,
    approval: Approval,
    certificate_life: Duration,
    orchestrators: Vec<Address>,
    stop: CancellationToken,
}

impl ClusterPort {
    /// Begins to listen.
    pub async fn bind(registry: Registry, config: ClusterPortConfig) -> Result<Self, PortError> {
        let ClusterPortConfig { listen, advertise, build, approval, announce, certificate_life } = config;
        let identity = registry.own_identity("orchestrator")?;
        let incoming = TlsIncoming::bind_live(listen, &identity.clone().into(), Clients::Strangers).await?;
        let addresses = addresses::offered(incoming.local_addr(), &advertise);
        let kept = addresses.clone();
        registry.run(move |registry| registry.store().set_addresses(&kept)).await?;
        let orchestrators = addresses.clone();
        let stop = CancellationToken::new();
        let desk = Desk { registry, identity, build, approval, certificate_life, orchestrators, stop };
        Ok(Self { incoming, desk, announce, addresses })
    }

    /// Where it listens.
    pub const fn local_addr(&self) -> SocketAddr {
        self.incoming.local_addr()
    }

    /// Where others may reach it.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Serves until told to stop.
    pub async fn serve(mut self, stop: CancellationToken) -> Result<(), PortError> {
        self.desk.stop = stop.clone();
        let _announcement = self.announcement();
        let (rows, width) = SIZES;
        let join = JoinServer::new(JoinService::new(self.desk.clone()));
        let membership = MembershipServer::new(MembershipService::new(self.desk));
        let router = server(FrameSizes::for_rows(rows, width))
            .add_service(join.max_decoding_message_size(MAX_REQUEST))
            .add_service(membership.max_decoding_message_size(MAX_REQUEST));
        tokio::select! {
            served = router.serve_with_incoming(self.incoming) => Ok(served?),
            // Nodes notice that the connection ended, and come again.
            () = stop.cancelled() => Ok(()),
        }
    }

    fn announcement(&self) -> Option<lan::Announcement> {
        if self.announce == Announce::Nowhere {
            return None;
        }
        let (ca, version) = (self.desk.registry.fingerprint(), &self.desk.build.version);
        match lan::announce(&ca, version, self.local_addr().port()) {
            Ok(announcement) => Some(announcement),
            Err(error) => {
                tracing::warn!(%error, "hosts cannot find this orchestrator by themselves: give them a token");
                None
            }
        }
    }
}

impl Desk {
    /// Makes and remembers a node's certificate.
    fn certify(
        &self,
        registry: &Registry,
        node: (&Uuid, &cluster::NodeId),
        request: CheckedRequest,
        kind: EventKind,
    ) -> Result<Admission, RegistryError> {
        let (id, name) = node;
        let key = request.fingerprint();
        let validity = Validity::starting(Timestamp::now().system(), self.certificate_life);
        let certified = registry.ca().certify(request, name, validity)?;
        let certificate = NewCertificate {
            fingerprint: certified.fingerprint,
            key,
            serial: certified.serial,
            issued: validity.issued.into(),
            expires: validity.expires.into(),
        };
        registry.store().certified(id, &certificate, kind)?;
        Ok(Admission {
            name: name.clone(),
            cert_pem: certified.pem,
            orchestrators: self.orchestrators.clone(),
            validity,
        })
    }
}

#[cfg(test)]
mod tests;
