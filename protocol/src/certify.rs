//! Certificates for members that make their own keys: the request, what the CA makes of it, and identities that are renewed
//! while they are in use. A private key never leaves its host. Knows nothing of who may have a certificate.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cluster::NodeId;
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, KeyPair,
    KeyUsagePurpose, PublicKeyData, SerialNumber,
};
use time::OffsetDateTime;
use tokio::sync::watch;

use crate::fingerprint::{Fingerprint, hex};
use crate::tls::{ClusterCa, SERVER_NAME, TlsError, TlsIdentity, certificate_der, server_config};
use crate::token::random;

/// Largest request for a certificate: one of an RSA key of 8192 bits has 3 KiB.
pub const LARGEST_REQUEST: usize = 8 << 10;

/// A certificate is good from so long before it was issued, for hosts whose clocks are behind.
const BACKDATED: Duration = Duration::from_secs(24 * 3600);

/// A private key, and the request for a certificate for it.
#[derive(Clone)]
pub struct MemberKey {
    key_pem: String,
    request: Vec<u8>,
    fingerprint: Fingerprint,
}

/// A request for a certificate whose sender has the private key. Nothing else that it says counts.
#[derive(Debug)]
pub struct CheckedRequest {
    inner: CertificateSigningRequestParams,
}

/// From when to when a certificate is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// When it was issued.
    pub issued: SystemTime,
    /// When it expires.
    pub expires: SystemTime,
}

/// A certificate that was issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certified {
    /// As text.
    pub pem: String,
    /// Of the certificate.
    pub fingerprint: Fingerprint,
    /// Its serial number.
    pub serial: String,
}

/// A member's identity that is renewed while it is in use. Clones are the same one.
#[derive(Clone)]
pub struct LiveIdentity(Arc<watch::Sender<TlsIdentity>>);

impl MemberKey {
    /// A new key.
    pub fn generate() -> Result<Self, TlsError> {
        Self::new(&KeyPair::generate().map_err(request_failed)?)
    }

    /// A key as it was kept.
    pub fn from_pem(key_pem: &str) -> Result<Self, TlsError> {
        Self::new(&KeyPair::from_pem(key_pem).map_err(request_failed)?)
    }

    fn new(key: &KeyPair) -> Result<Self, TlsError> {
        let params = CertificateParams::default();
        let request = params.serialize_request(key).map_err(request_failed)?;
        let fingerprint = Fingerprint::of(key.der_bytes());
        Ok(Self { key_pem: key.serialize_pem(), request: request.der().to_vec(), fingerprint })
    }

    /// The private key.
    pub fn pem(&self) -> &str {
        &self.key_pem
    }

    /// PKCS #10, DER.
    pub fn request(&self) -> &[u8] {
        &self.request
    }

    /// Of the public key.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The identity that the key and its certificate make. Fails if they do not belong together.
    pub fn identity(&self, ca_pem: String, cert_pem: String) -> Result<TlsIdentity, TlsError> {
        let identity = TlsIdentity { ca_pem, cert_pem, key_pem: self.key_pem.clone() };
        server_config(&identity)?;
        Ok(identity)
    }
}

impl fmt::Debug for MemberKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberKey").field("fingerprint", &self.fingerprint).finish_non_exhaustive()
    }
}

fn request_failed(source: rcgen::Error) -> TlsError {
    TlsError::Issue { name: "a new member".to_owned(), source }
}

impl CheckedRequest {
    /// Reads a request and checks its signature.
    pub fn check(der: &[u8]) -> Result<Self, TlsError> {
        if der.len() > LARGEST_REQUEST {
            let reason = format!(
                "a request for a certificate has {} bytes, and may have {LARGEST_REQUEST}",
                der.len()
            );
            return Err(TlsError::Identity { reason });
        }
        let inner = CertificateSigningRequestParams::from_der(&der.into()).map_err(request_failed)?;
        Ok(Self { inner })
    }

    /// Of the public key.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(self.inner.public_key.der_bytes())
    }
}

impl ClusterCa {
    /// A member's certificate for the key of a request, good for both ends of a connection.
    pub fn certify(
        &self,
        request: CheckedRequest,
        name: &NodeId,
        validity: Validity,
    ) -> Result<Certified, TlsError> {
        let issue = |source| TlsError::Issue { name: name.0.clone(), source };
        let mut serial = random::<16>().map_err(|error| TlsError::Identity { reason: error.to_string() })?;
        // Positive, and of full length.
        serial[0] = serial[0] & 0x7f | 0x40;
        let mut params = member_params(&name.0).map_err(issue)?;
        params.not_before = OffsetDateTime::from(validity.issued - BACKDATED);
        params.not_after = OffsetDateTime::from(validity.expires);
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        let mut inner = request.inner;
        inner.params = params;
        let cert = inner.signed_by(self.issuer()).map_err(issue)?;
        Ok(Certified { pem: cert.pem(), fingerprint: Fingerprint::of(cert.der()), serial: hex(&serial) })
    }

    /// Of the CA's certificate.
    pub fn fingerprint(&self) -> Result<Fingerprint, TlsError> {
        certificate_der(self.certificate_pem()).map(|der| Fingerprint::of(&der))
    }
}

/// What every member's certificate says.
pub(crate) fn member_params(common_name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    Ok(params)
}

impl Validity {
    /// From now on for so long.
    pub fn starting(issued: SystemTime, life: Duration) -> Self {
        Self { issued, expires: issued + life }
    }

    /// When it should be renewed: half its life is over, so that there is time to try again before two thirds are.
    pub fn renew_at(&self) -> SystemTime {
        let life = self.expires.duration_since(self.issued).unwrap_or_default();
        self.issued + life / 2
    }
}

impl LiveIdentity {
    /// As it is at first.
    pub fn new(identity: TlsIdentity) -> Self {
        Self(Arc::new(watch::Sender::new(identity)))
    }

    /// As it is now.
    pub fn now(&self) -> TlsIdentity {
        self.0.borrow().clone()
    }

    /// From now on it is this one. Connections that exist are not disturbed.
    pub fn renew(&self, identity: TlsIdentity) {
        self.0.send_replace(identity);
    }

    /// To be told when it is renewed.
    pub fn watch(&self) -> watch::Receiver<TlsIdentity> {
        self.0.subscribe()
    }
}

impl From<TlsIdentity> for LiveIdentity {
    fn from(identity: TlsIdentity) -> Self {
        Self::new(identity)
    }
}

impl fmt::Debug for LiveIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveIdentity").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn day() -> Validity {
        Validity::starting(SystemTime::now(), Duration::from_secs(24 * 3600))
    }

    #[test]
    fn a_key_that_never_left_its_host_gets_a_certificate_of_the_cluster() {
        let ca = ClusterCa::new().unwrap();
        let key = MemberKey::generate().unwrap();
        let request = CheckedRequest::check(key.request()).unwrap();
        assert_eq!(request.fingerprint(), key.fingerprint());
        let certified = ca.certify(request, &NodeId("desk".into()), day()).unwrap();
        assert!(key.identity(ca.certificate_pem().to_owned(), certified.pem.clone()).is_ok());
        let other = MemberKey::generate().unwrap();
        assert!(
            other.identity(ca.certificate_pem().to_owned(), certified.pem).is_err(),
            "another key's certificate was taken"
        );
        assert_eq!(certified.serial.len(), 32);
    }

    #[test]
    fn a_key_that_was_kept_is_the_same_key() {
        let key = MemberKey::generate().unwrap();
        assert_eq!(MemberKey::from_pem(key.pem()).unwrap().fingerprint(), key.fingerprint());
        assert!(!format!("{key:?}").contains("PRIVATE"));
    }

    #[test]
    fn a_request_that_was_tampered_with_is_refused() {
        let mut request = MemberKey::generate().unwrap().request().to_vec();
        let last = request.len() - 1;
        request[last] ^= 1;
        assert!(CheckedRequest::check(&request).is_err());
        assert!(
            CheckedRequest::check(&vec![0; LARGEST_REQUEST + 1]).unwrap_err().to_string().contains("8193")
        );
    }

    #[test]
    fn a_certificate_is_to_be_renewed_before_two_thirds_of_its_life_are_over() {
        let validity = day();
        let renew = validity.renew_at().duration_since(validity.issued).unwrap();
        assert!(renew < Duration::from_secs(16 * 3600) && renew > Duration::from_secs(8 * 3600));
    }

    proptest! {
        #[test]
        fn garbled_requests_never_panic(
            garble in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = MemberKey::generate().unwrap().request().to_vec();
            for (at, byte) in garble {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let _ = CheckedRequest::check(&bytes);
        }
    }
}
