//! Recognising a cluster before one is a member of it: a handshake that sends nothing but a hello and learns which CA the
//! other side belongs to. Whether to trust that CA is decided by its fingerprint; every connection that carries something
//! secret is then an ordinary one, verified against that CA.

use std::fmt::Display;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{self, CryptoProvider};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    ClientConfig, DigitallySignedStruct, Error as RustlsError, SignatureScheme, version,
};
use tonic::transport::{Certificate, Channel, ClientTlsConfig};

use crate::fingerprint::Fingerprint;
use crate::patience::peer_timeout;
use crate::tls::{ConnectError, SERVER_NAME, connect_with};

/// Characters in a line of PEM.
const PEM_LINE: usize = 64;

/// A cluster's CA as its orchestrator shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShownCa {
    /// The certificate.
    pub pem: String,
    /// Its fingerprint.
    pub fingerprint: Fingerprint,
}

/// Why a cluster was not recognised.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum PinError {
    #[error("{address} cannot be reached: {reason}")]
    Unreachable { address: String, reason: String },
    #[error("{address} is no orchestrator of a cluster: {reason}")]
    NoCluster { address: String, reason: String },
    #[error("{address} belongs to another cluster: its CA is {shown}, not {wanted}")]
    OtherCluster { address: String, shown: Fingerprint, wanted: Fingerprint },
}

/// Which CA whoever listens at an address belongs to, as it says.
pub async fn shown_ca(address: impl Display + Send) -> Result<ShownCa, PinError> {
    let address = address.to_string();
    let unreachable = |reason: String| PinError::Unreachable { address: address.clone(), reason };
    let stranger = |reason: String| PinError::NoCluster { address: address.clone(), reason };
    let config = looking_config().map_err(|error| stranger(error.to_string()))?;
    let name = ServerName::try_from(SERVER_NAME).map_err(|error| stranger(error.to_string()))?;
    let looking = async {
        let stream = TcpStream::connect(&address).await.map_err(|error| unreachable(error.to_string()))?;
        let stream = TlsConnector::from(config).connect(name, stream).await;
        let stream = stream.map_err(|error| stranger(error.to_string()))?;
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        match chain {
            [_, ca] => Ok(ShownCa { pem: to_pem(ca), fingerprint: Fingerprint::of(ca) }),
            other => {
                Err(stranger(format!("it shows {} certificates, not its own and the CA's", other.len())))
            }
        }
    };
    let late = |_| unreachable(format!("no answer within {} s", peer_timeout().as_secs()));
    tokio::time::timeout(peer_timeout(), looking).await.map_err(late)?
}

/// The CA of whoever listens at an address, which must have this fingerprint.
pub async fn pinned_ca(address: impl Display + Send, wanted: Fingerprint) -> Result<ShownCa, PinError> {
    let address = address.to_string();
    let ca = shown_ca(&address).await?;
    if ca.fingerprint != wanted {
        return Err(PinError::OtherCluster { address, shown: ca.fingerprint, wanted });
    }
    Ok(ca)
}

/// Connects to a member of a cluster whose CA is known, without being one.
pub async fn connect_as_stranger(
    address: impl Display + Send,
    ca: &ShownCa,
) -> Result<Channel, ConnectError> {
    let config =
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&ca.pem)).domain_name(SERVER_NAME);
    connect_with(address, config).await
}

fn to_pem(certificate: &CertificateDer<'_>) -> String {
    let text = STANDARD.encode(certificate);
    let lines: Vec<&str> =
        (0..text.len()).step_by(PEM_LINE).map(|at| &text[at..text.len().min(at + PEM_LINE)]).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

fn looking_config() -> Result<Arc<ClientConfig>, RustlsError> {
    let provider = Arc::new(crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Looking(provider)))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// Takes any certificate: nothing is sent over a connection that is opened to look at one. That the other side has the
/// certificate's key is checked all the same.
#[derive(Debug)]
struct Looking(Arc<CryptoProvider>);

impl ServerCertVerifier for Looking {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, RustlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        crypto::verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        crypto::verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listen::{Clients, TlsIncoming};
    use crate::tls::ClusterCa;

    #[tokio::test]
    async fn a_cluster_port_shows_its_ca_and_another_clusters_is_named() {
        let ca = ClusterCa::new().unwrap();
        let identity = ca.issue("orchestrator").unwrap();
        let local = ([127, 0, 0, 1], 0).into();
        let port = TlsIncoming::bind_live(local, &identity.into(), Clients::Strangers).await.unwrap();
        let (address, wanted) = (port.local_addr(), ca.fingerprint().unwrap());
        let shown = pinned_ca(address, wanted).await.unwrap();
        assert_eq!(shown.pem.replace('\r', ""), ca.certificate_pem().replace('\r', ""));
        let other = ClusterCa::new().unwrap().fingerprint().unwrap();
        let error = pinned_ca(address, other).await.unwrap_err();
        assert!(
            matches!(error, PinError::OtherCluster { .. }) && error.to_string().contains(&wanted.to_string())
        );
    }

    #[tokio::test]
    async fn what_is_no_cluster_is_told_from_what_is_away() {
        let ca = ClusterCa::new().unwrap();
        let identity = ca.issue("node").unwrap();
        let node = TlsIncoming::bind(([127, 0, 0, 1], 0).into(), &identity).await.unwrap();
        let error = shown_ca(node.local_addr()).await.unwrap_err();
        assert!(matches!(error, PinError::NoCluster { .. }), "{error}");
        let gone = node.local_addr();
        drop(node);
        let error = shown_ca(gone).await.unwrap_err();
        assert!(matches!(error, PinError::Unreachable { .. }), "{error}");
    }
}
