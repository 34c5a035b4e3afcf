//! Who may talk to whom: a cluster CA, identities signed by it, and connections that are TLS with a certificate of that
//! CA on both sides. Knows nothing of the messages, nor where a CA or an identity is kept.
//!
//! Every certificate carries the name [`SERVER_NAME`] alone. Hosts have many addresses, and addresses change; what a
//! connection proves is membership of the cluster, not an address.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, crypto, version};
use tonic::Status;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::certify::member_params;
use crate::fingerprint::Fingerprint;
use crate::patience::peer_timeout;

/// The name in every certificate of a cluster.
pub const SERVER_NAME: &str = "shoal.internal";

/// A silent connection is asked for a sign of life after this long …
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_millis(750);

/// … and is given up so much before the [`peer_timeout`], without one: for that pause, and for this process being kept waiting.
const KEEPALIVE_MARGIN: Duration = Duration::from_secs(1);

/// The name in the certificate of a cluster's CA.
const CA_NAME: &str = "shoal cluster CA";

/// A certificate authority.
pub struct ClusterCa {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate authority as text, to be kept by whoever founded the cluster.
#[derive(Clone, PartialEq, Eq)]
pub struct CaPem {
    /// Its certificate; every member has it.
    pub cert: String,
    /// Its private key. Who has it can make members.
    pub key: String,
}

/// A member's certificate and key, with the CA's certificate to check others by.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TlsIdentity {
    /// The CA's certificate.
    pub ca_pem: String,
    /// The member's certificate.
    pub cert_pem: String,
    /// The member's private key.
    pub key_pem: String,
}

/// Why a certificate or TLS configuration could not be made.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A key or certificate could not be generated.
    #[error("cannot issue a certificate for {name:?}")]
    Issue {
        /// Whose.
        name: String,
        /// The generator's reason.
        #[source]
        source: rcgen::Error,
    },
    /// A PEM text is not one.
    #[error("cannot read the {what} of a TLS identity")]
    Pem {
        /// Which text.
        what: &'static str,
        /// The parser's reason.
        #[source]
        source: tokio_rustls::rustls::pki_types::pem::Error,
    },
    /// The parts do not make a configuration.
    #[error("a TLS identity cannot be used: {reason}")]
    Identity {
        /// What is wrong with it.
        reason: String,
    },
}

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The address cannot be dialled.
    #[error("{address:?} is not an address of the form host:port")]
    Address {
        /// As given.
        address: String,
        /// The parser's reason.
        #[source]
        source: tonic::transport::Error,
    },
    /// The identity cannot be used.
    #[error("cannot use the TLS identity to connect to {address}")]
    Tls {
        /// As given.
        address: String,
        /// The reason.
        #[source]
        source: tonic::transport::Error,
    },
    /// No answer in time.
    #[error("{address} did not answer within {} s", deadline.as_secs_f32())]
    Deadline {
        /// As given.
        address: String,
        /// The limit.
        deadline: Duration,
    },
    /// Refused, or not a member of this cluster.
    #[error("cannot connect to {address}: {}", root_cause(source))]
    Refused {
        /// As given.
        address: String,
        /// The reason.
        #[source]
        source: tonic::transport::Error,
    },
}

impl ClusterCa {
    /// A new CA with a key of its own.
    pub fn new() -> Result<Self, TlsError> {
        let (params, key) = (ca_params()?, KeyPair::generate().map_err(ca_failed)?);
        let pem = params.self_signed(&key).map_err(ca_failed)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem })
    }

    /// A CA as it was kept.
    pub fn from_pem(pem: &CaPem) -> Result<Self, TlsError> {
        let provider = crypto::ring::default_provider();
        let key = PrivateKeyDer::from_pem_slice(pem.key.as_bytes())
            .map_err(|source| TlsError::Pem { what: "private key", source })?;
        // Does the key belong to the certificate? Members of another CA could not be told from impostors later.
        CertifiedKey::from_der(certificates("certificate", &pem.cert)?, key, &provider)
            .map_err(|error| TlsError::Identity { reason: error.to_string() })?;
        let key = KeyPair::from_pem(&pem.key).map_err(ca_failed)?;
        // All CAs have the same parameters, so those of the certificate need not be parsed.
        Ok(Self { issuer: Issuer::new(ca_params()?, key), pem: pem.cert.clone() })
    }

    /// The CA's certificate.
    pub fn certificate_pem(&self) -> &str {
        &self.pem
    }

    /// What signs.
    pub(crate) const fn issuer(&self) -> &Issuer<'static, KeyPair> {
        &self.issuer
    }

    /// The CA as text.
    pub fn to_pem(&self) -> CaPem {
        CaPem { cert: self.pem.clone(), key: self.issuer.key().serialize_pem() }
    }

    /// An identity with a new key, good for both ends of a connection.
    pub fn issue(&self, common_name: &str) -> Result<TlsIdentity, TlsError> {
        let issue = |source| TlsError::Issue { name: common_name.to_owned(), source };
        let params = member_params(common_name).map_err(issue)?;
        let key = KeyPair::generate().map_err(issue)?;
        let cert = params.signed_by(&key, &self.issuer).map_err(issue)?;
        Ok(TlsIdentity { ca_pem: self.pem.clone(), cert_pem: cert.pem(), key_pem: key.serialize_pem() })
    }
}

fn ca_failed(source: rcgen::Error) -> TlsError {
    TlsError::Issue { name: CA_NAME.to_owned(), source }
}

fn ca_params() -> Result<CertificateParams, TlsError> {
    let mut params = CertificateParams::new(Vec::new()).map_err(ca_failed)?;
    params.distinguished_name.push(DnType::CommonName, CA_NAME);
    // It signs members, never another CA.
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    Ok(params)
}

impl fmt::Debug for ClusterCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterCa").finish_non_exhaustive()
    }
}

impl fmt::Debug for CaPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CaPem").finish_non_exhaustive()
    }
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never the key: configurations are logged.
        f.debug_struct("TlsIdentity").finish_non_exhaustive()
    }
}

/// Whom a server lets past the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clients {
    /// Members of its cluster.
    Members,
    /// Also those without any certificate, to become members. They are shown the CA's certificate, by whose fingerprint
    /// they recognise the cluster.
    Strangers,
}

/// What a server of the cluster presents to its members, and whom it admits: TLS 1.3, HTTP/2, clients of the same CA only.
pub fn server_config(identity: &TlsIdentity) -> Result<Arc<ServerConfig>, TlsError> {
    server_config_for(identity, Clients::Members)
}

/// The same for a server that may admit others too.
pub fn server_config_for(identity: &TlsIdentity, clients: Clients) -> Result<Arc<ServerConfig>, TlsError> {
    let unusable = |error: &dyn fmt::Display| TlsError::Identity { reason: error.to_string() };
    let provider = Arc::new(crypto::ring::default_provider());
    let cas = certificates("ca certificate", &identity.ca_pem)?;
    let mut chain = certificates("certificate", &identity.cert_pem)?;
    let mut roots = RootCertStore::empty();
    for cert in &cas {
        roots.add(cert.clone()).map_err(|e| unusable(&e))?;
    }
    let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    if clients == Clients::Strangers {
        verifier = verifier.allow_unauthenticated();
        chain.extend(cas);
    }
    let verifier = verifier.build().map_err(|e| unusable(&e))?;
    let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes())
        .map_err(|source| TlsError::Pem { what: "private key", source })?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])
        .map_err(|e| unusable(&e))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|e| unusable(&e))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// Of the CA that an identity belongs to.
pub fn ca_fingerprint(identity: &TlsIdentity) -> Result<Fingerprint, TlsError> {
    certificate_der(&identity.ca_pem).map(|der| Fingerprint::of(&der))
}

/// The first certificate of a text.
pub(crate) fn certificate_der(pem: &str) -> Result<CertificateDer<'static>, TlsError> {
    let mut found = certificates("certificate", pem)?;
    Ok(found.swap_remove(0))
}

fn certificates(what: &'static str, pem: &str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|source| TlsError::Pem { what, source })?;
    if certificates.is_empty() {
        return Err(TlsError::Identity { reason: format!("its {what} is empty") });
    }
    Ok(certificates)
}

/// What a client of the cluster presents, and whom it trusts.
pub fn client_config(identity: &TlsIdentity) -> ClientTlsConfig {
    ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&identity.ca_pem))
        .identity(Identity::from_pem(&identity.cert_pem, &identity.key_pem))
        .domain_name(SERVER_NAME)
}

/// How long a connection that was asked for a sign of life may give none.
pub(crate) fn keepalive_timeout() -> Duration {
    peer_timeout().saturating_sub(KEEPALIVE_MARGIN)
}

/// Connects to a member at `address` (`host:port`) within the [`peer_timeout`], and notices later when it freezes.
///
/// The channel re-connects by itself for calls made after its connection broke.
pub async fn connect(
    address: impl fmt::Display + Send,
    identity: &TlsIdentity,
) -> Result<Channel, ConnectError> {
    connect_with(address, client_config(identity)).await
}

/// The same with whatever the client presents and trusts.
pub(crate) async fn connect_with(
    address: impl fmt::Display + Send,
    config: ClientTlsConfig,
) -> Result<Channel, ConnectError> {
    let (address, deadline) = (address.to_string(), peer_timeout());
    let endpoint = Endpoint::from_shared(format!("https://{address}"))
        .map_err(|source| ConnectError::Address { address: address.clone(), source })?
        .connect_timeout(deadline)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(keepalive_timeout())
        .keep_alive_while_idle(true)
        .tls_config(config)
        .map_err(|source| ConnectError::Tls { address: address.clone(), source })?;
    // The endpoint's own limit covers TCP alone; a peer that accepts and then says nothing must not hold us either.
    match tokio::time::timeout(deadline, endpoint.connect()).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(source)) => Err(ConnectError::Refused { address, source }),
        Err(_) => Err(ConnectError::Deadline { address, deadline }),
    }
}

/// The innermost reason of an error: transport errors say only "transport error" themselves.
pub fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// A refused or broken call in words: what the peer said, or what became of the connection.
pub fn describe_status(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(source) => format!("{}: {}", status.message(), root_cause(source)),
        None => status.message().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ca_that_was_kept_issues_members_of_the_same_cluster() {
        let founded = ClusterCa::new().unwrap();
        let kept = ClusterCa::from_pem(&founded.to_pem()).unwrap();
        assert_eq!(kept.issue("b").unwrap().ca_pem, founded.issue("a").unwrap().ca_pem);
        let mut mixed = founded.to_pem();
        mixed.key = ClusterCa::new().unwrap().to_pem().key;
        assert!(ClusterCa::from_pem(&mixed).is_err(), "a key of another CA was accepted");
        mixed.key.clear();
        assert!(ClusterCa::from_pem(&mixed).unwrap_err().to_string().contains("private key"));
    }

    #[test]
    fn an_identity_never_prints_its_key() {
        let identity = ClusterCa::new().unwrap().issue("a").unwrap();
        assert!(identity.key_pem.contains("PRIVATE KEY"));
        assert!(!format!("{identity:?}").contains("PRIVATE"));
    }

    #[test]
    fn a_damaged_identity_is_refused_by_part() {
        let good = ClusterCa::new().unwrap().issue("a").unwrap();
        assert!(server_config(&good).is_ok());
        let mut bad = good.clone();
        bad.key_pem = "no key".to_owned();
        assert!(server_config(&bad).unwrap_err().to_string().contains("private key"));
        let mut bad = good.clone();
        bad.cert_pem.clear();
        assert!(server_config(&bad).unwrap_err().to_string().contains("certificate is empty"));
        let mut bad = good;
        bad.key_pem = ClusterCa::new().unwrap().issue("b").unwrap().key_pem;
        assert!(server_config(&bad).is_err(), "a key of another certificate was accepted");
    }

    #[tokio::test]
    async fn what_is_no_address_is_refused_by_name() {
        let identity = ClusterCa::new().unwrap().issue("a").unwrap();
        let error = connect("not an address", &identity).await.unwrap_err();
        assert!(error.to_string().contains("\"not an address\""), "{error}");
    }

    #[tokio::test]
    async fn a_peer_that_accepts_and_says_nothing_is_given_up() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let identity = ClusterCa::new().unwrap().issue("a").unwrap();
        let error = connect(silent.local_addr().unwrap(), &identity).await.unwrap_err();
        assert!(error.to_string().contains("did not answer within 3 s"), "{error}");
    }
}
