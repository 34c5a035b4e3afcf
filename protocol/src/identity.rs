//! The file that makes a process a member of a cluster: its name, its certificate and key, and the CA to check others by.
//! Whoever has it is that member. Where it lies, and who may read it, is not decided here.

use cluster::NodeId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::node::{BadName, check_name};
use crate::tls::{TlsError, TlsIdentity, server_config};

/// Version of the file. Raise it with every change to it.
pub const VERSION: u32 = 1;

/// A member's identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberIdentity {
    /// The member's name, which is also in its certificate.
    pub name: NodeId,
    /// What it proves its membership with.
    pub tls: TlsIdentity,
}

/// Why a text is no identity.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum IdentityError {
    #[error("it is not an identity file: {0}")]
    Json(#[from] serde_json::Error),
    #[error("it has version {0}, but this shoal reads version {VERSION}: issue the identity anew")]
    Version(u32),
    #[error(transparent)]
    Name(#[from] BadName),
    #[error("its certificates cannot be used")]
    Tls(#[from] TlsError),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IdentityFile {
    version: u32,
    name: String,
    ca_pem: String,
    cert_pem: String,
    key_pem: String,
}

impl MemberIdentity {
    /// Reads the file's text, and checks that its parts belong together.
    pub fn from_json(text: &str) -> Result<Self, IdentityError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = serde_json::from_str(text)?;
        if version != VERSION {
            return Err(IdentityError::Version(version));
        }
        let IdentityFile { name, ca_pem, cert_pem, key_pem, .. } = serde_json::from_str(text)?;
        let tls = TlsIdentity { ca_pem, cert_pem, key_pem };
        server_config(&tls)?;
        Ok(Self { name: check_name(&name)?, tls })
    }

    /// The file's text. It holds the private key.
    pub fn to_json(&self) -> Result<String, IdentityError> {
        let TlsIdentity { ca_pem, cert_pem, key_pem } = self.tls.clone();
        let name = self.name.0.clone();
        Ok(serde_json::to_string_pretty(&IdentityFile { version: VERSION, name, ca_pem, cert_pem, key_pem })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::ClusterCa;

    fn identity() -> MemberIdentity {
        MemberIdentity { name: NodeId("desk".into()), tls: ClusterCa::new().unwrap().issue("desk").unwrap() }
    }

    #[test]
    fn an_identity_survives_the_way_to_a_file_and_back() {
        let identity = identity();
        assert_eq!(MemberIdentity::from_json(&identity.to_json().unwrap()).unwrap(), identity);
    }

    #[test]
    fn what_is_no_identity_is_refused_with_the_reason() {
        let refusal = |text: &str| MemberIdentity::from_json(text).unwrap_err().to_string();
        let good = identity().to_json().unwrap();
        assert!(refusal("BEGIN").contains("not an identity file"));
        assert!(refusal(&good[..good.len() / 2]).contains("not an identity file"));
        assert!(refusal(&good.replacen("\"version\": 1", "\"version\": 7", 1)).contains("has version 7"));
        assert!(refusal(&good.replacen("desk", "a b", 1)).contains("\"a b\""));
        assert!(refusal(&good.replace("PRIVATE KEY", "OTHER")).contains("certificates"));
    }
}
