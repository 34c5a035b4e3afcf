//! What a node keeps over restarts: who it is, and of which cluster it is a member. The folder is one process's at a time.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use protocol::certify::{MemberKey, Validity};
use protocol::fingerprint::Fingerprint;
use protocol::identity::MemberIdentity;
use protocol::membership::{from_unix, to_unix};
use protocol::node::{Address, check_name};
use protocol::tls::{TlsError, TlsIdentity, ca_fingerprint, server_config};
use protocol::trust::{self, TrustError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use thiserror::Error;
use uuid::Uuid;

/// Version of both files. Raise it with every change to them.
const VERSION: u32 = 1;

const MEMBER: &str = "member.json";
const APPLICANT: &str = "applicant.json";
const LOCK: &str = ".lock";

/// Why a membership cannot be read or kept.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum MembershipError {
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("another shoal node uses {}: give this one another folder with --state", .0.display())]
    InUse(PathBuf),
    #[error("writing {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} cannot be used: {reason}; if nothing else helps, remove it and join anew", path.display())]
    Bad { path: PathBuf, reason: String },
}

/// A membership of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// The host's id.
    pub id: Uuid,
    /// Its name and certificate.
    pub identity: MemberIdentity,
    /// Where the orchestrator may be, the likeliest first.
    pub orchestrators: Vec<Address>,
    /// Of the certificate.
    pub validity: Validity,
}

/// The folder.
#[derive(Debug)]
pub struct NodeState {
    folder: PathBuf,
    _lock: File,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemberFile {
    version: u32,
    id: Uuid,
    name: String,
    ca_pem: String,
    cert_pem: String,
    key_pem: String,
    orchestrators: Vec<String>,
    issued: u64,
    expires: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ApplicantFile {
    version: u32,
    id: Uuid,
    key_pem: String,
}

impl Membership {
    /// Of the cluster's CA.
    pub fn cluster(&self) -> Result<Fingerprint, TlsError> {
        ca_fingerprint(&self.identity.tls)
    }
}

impl NodeState {
    /// Takes the folder, which is made if it is not there.
    pub fn open(folder: &Path) -> Result<Self, MembershipError> {
        trust::make_private(folder)?;
        let path = folder.join(LOCK);
        let failed = |source| MembershipError::Write { path: path.clone(), source };
        let lock = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
        match fs4::FileExt::try_lock(&lock) {
            Ok(()) => Ok(Self { folder: folder.to_owned(), _lock: lock }),
            Err(fs4::TryLockError::WouldBlock) => Err(MembershipError::InUse(folder.to_owned())),
            Err(fs4::TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    /// The membership, if there is one.
    pub fn member(&self) -> Result<Option<Membership>, MembershipError> {
        Self::read_member(&self.folder)
    }

    /// The membership that a folder has, whoever uses the folder: it is always whole.
    pub fn read_member(folder: &Path) -> Result<Option<Membership>, MembershipError> {
        let path = folder.join(MEMBER);
        let Some(file) = read::<MemberFile>(&path)? else { return Ok(None) };
        let bad = |reason: String| MembershipError::Bad { path: path.clone(), reason };
        let time = |seconds| from_unix(seconds).ok_or_else(|| bad(format!("{seconds} is no time")));
        let MemberFile { id, name, ca_pem, cert_pem, key_pem, orchestrators, issued, expires, .. } = file;
        let tls = TlsIdentity { ca_pem, cert_pem, key_pem };
        server_config(&tls).map_err(|error| bad(error.to_string()))?;
        let orchestrators = orchestrators.iter().map(|address| Address::parse(address));
        Ok(Some(Membership {
            id,
            identity: MemberIdentity {
                name: check_name(&name).map_err(|error| bad(error.to_string()))?,
                tls,
            },
            orchestrators: orchestrators.collect::<Result<_, _>>().map_err(|error| bad(error.to_string()))?,
            validity: Validity { issued: time(issued)?, expires: time(expires)? },
        }))
    }

    /// Keeps a membership in place of what was kept before.
    pub fn keep(&self, membership: &Membership) -> Result<(), MembershipError> {
        let Membership { id, identity: MemberIdentity { name, tls }, orchestrators, validity } = membership;
        let TlsIdentity { ca_pem, cert_pem, key_pem } = tls.clone();
        let file = MemberFile {
            version: VERSION,
            id: *id,
            name: name.0.clone(),
            ca_pem,
            cert_pem,
            key_pem,
            orchestrators: orchestrators.iter().map(ToString::to_string).collect(),
            issued: to_unix(validity.issued),
            expires: to_unix(validity.expires),
        };
        self.write(MEMBER, &file)
    }

    /// The host is no member any more. It asks under a new id the next time.
    pub fn forget(&self) -> Result<(), MembershipError> {
        for path in [MEMBER, APPLICANT].map(|name| self.folder.join(name)) {
            match std::fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(MembershipError::Write { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// With which id and key the host asks to join. The same over restarts, so that what somebody approved is still it.
    pub fn applicant(&self) -> Result<(Uuid, MemberKey), MembershipError> {
        let path = self.folder.join(APPLICANT);
        if let Some(ApplicantFile { id, key_pem, .. }) = read(&path)? {
            return Ok((id, MemberKey::from_pem(&key_pem)?));
        }
        let (id, key) = (Uuid::new_v4(), MemberKey::generate()?);
        self.write(APPLICANT, &ApplicantFile { version: VERSION, id, key_pem: key.pem().to_owned() })?;
        Ok((id, key))
    }

    /// Whole or not at all, and readable by its owner alone: temporary files are.
    fn write(&self, name: &str, value: &impl Serialize) -> Result<(), MembershipError> {
        let path = self.folder.join(name);
        let written = || -> io::Result<()> {
            let mut file = NamedTempFile::new_in(&self.folder)?;
            file.write_all(&serde_json::to_vec_pretty(value)?)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        written().map_err(|source| MembershipError::Write { path, source })
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, MembershipError> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    if !path.exists() {
        return Ok(None);
    }
    let text = trust::read_text(path)?;
    let bad = |reason: String| MembershipError::Bad { path: path.to_owned(), reason };
    let not_json = |error: serde_json::Error| bad(error.to_string());
    let Versioned { version } = serde_json::from_str(&text).map_err(not_json)?;
    if version != VERSION {
        return Err(bad(format!("it has version {version}, but this shoal reads version {VERSION}")));
    }
    serde_json::from_str(&text).map(Some).map_err(not_json)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use cluster::NodeId;
    use protocol::tls::ClusterCa;

    use super::*;

    fn membership() -> Membership {
        let issued = from_unix(to_unix(SystemTime::now())).unwrap();
        Membership {
            id: Uuid::new_v4(),
            identity: MemberIdentity {
                name: NodeId("desk".into()),
                tls: ClusterCa::new().unwrap().issue("desk").unwrap(),
            },
            orchestrators: vec![Address::parse("[fd00::1]:8471").unwrap()],
            validity: Validity::starting(issued, Duration::from_secs(60)),
        }
    }

    #[test]
    fn a_host_is_the_same_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/node");
        let state = NodeState::open(&path).unwrap();
        assert!(state.member().unwrap().is_none());
        let (id, key) = state.applicant().unwrap();
        let membership = membership();
        state.keep(&membership).unwrap();
        drop(state);
        let state = NodeState::open(&path).unwrap();
        let again = state.applicant().unwrap();
        assert_eq!((again.0, again.1.fingerprint()), (id, key.fingerprint()));
        assert_eq!(state.member().unwrap(), Some(membership));
        state.forget().unwrap();
        assert!(state.member().unwrap().is_none());
        assert_ne!(state.applicant().unwrap().0, id);
    }

    #[test]
    fn two_processes_do_not_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = NodeState::open(folder.path()).unwrap();
        assert!(matches!(NodeState::open(folder.path()), Err(MembershipError::InUse(_))));
        drop(first);
        assert!(NodeState::open(folder.path()).is_ok());
    }

    #[test]
    fn a_damaged_or_newer_file_is_named_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let state = NodeState::open(folder.path()).unwrap();
        let path = folder.path().join(MEMBER);
        for text in ["{", "{\"version\": 9}", "{\"version\": 1}"] {
            std::fs::write(&path, text).unwrap();
            let error = state.member().unwrap_err().to_string();
            assert!(error.contains("member.json") && path.exists(), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn nobody_else_can_read_the_key() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let state = NodeState::open(folder.path()).unwrap();
        state.applicant().unwrap();
        state.keep(&membership()).unwrap();
        for name in [MEMBER, APPLICANT] {
            let mode = folder.path().join(name).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }
}
