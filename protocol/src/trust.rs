//! The files of trust: the cluster's CA in a folder of whoever founded the cluster, and each member's identity.
//!
//! Private keys are written readable by their owner alone, and nothing that exists is ever replaced: a lost CA cannot be
//! had back. How an identity comes to its host is not this module's business.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::identity::{IdentityError, MemberIdentity};
use crate::node::{BadName, check_name};
use crate::tls::{CaPem, ClusterCa, TlsError, root_cause};

const CA_CERT: &str = "ca-cert.pem";
const CA_KEY: &str = "ca-key.pem";

/// An identity file is a few kilobytes; whatever is much larger is none.
const LARGEST_FILE: u64 = 1 << 20;

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// It holds a secret.
    Owner,
    /// It holds none.
    Everyone,
}

/// Why a file of trust cannot be used or made.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum TrustError {
    #[error("reading {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("writing {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} exists: it is not replaced, because members that trust it would be lost", .0.display())]
    Exists(PathBuf),
    #[error("there is no cluster CA in {}: make one with `shoal identity init`", .0.display())]
    NoCa(PathBuf),
    #[error("the cluster CA in {} cannot be used: {}", folder.display(), root_cause(source))]
    BadCa { folder: PathBuf, source: TlsError },
    #[error("{} cannot be used: {}", path.display(), with_cause(source))]
    BadIdentity { path: PathBuf, source: IdentityError },
    #[error(transparent)]
    Name(#[from] BadName),
    #[error(transparent)]
    Tls(#[from] TlsError),
}

fn with_cause(error: &IdentityError) -> String {
    let (text, cause) = (error.to_string(), root_cause(error));
    if text.ends_with(&cause) { text } else { format!("{text}: {cause}") }
}

/// Makes a folder that its owner alone can look into, unless it is there.
pub fn make_private(folder: &Path) -> Result<(), TrustError> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::DirBuilderExt;
        builder.mode(0o700);
    }
    builder.create(folder).map_err(|source| TrustError::Write { path: folder.to_owned(), source })
}

/// Makes a CA in a folder.
pub fn found_cluster(folder: &Path) -> Result<(), TrustError> {
    let (cert, key) = (folder.join(CA_CERT), folder.join(CA_KEY));
    if let Some(there) = [&cert, &key].into_iter().find(|path| path.exists()) {
        return Err(TrustError::Exists(there.clone()));
    }
    std::fs::create_dir_all(folder)
        .map_err(|source| TrustError::Write { path: folder.to_owned(), source })?;
    let pem = ClusterCa::new()?.to_pem();
    write_new(&key, &pem.key, Audience::Owner)?;
    write_new(&cert, &pem.cert, Audience::Everyone)
}

/// The CA in a folder.
pub fn open_ca(folder: &Path) -> Result<ClusterCa, TrustError> {
    let read = |name: &str| match read_text(&folder.join(name)) {
        Err(TrustError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Err(TrustError::NoCa(folder.to_owned()))
        }
        other => other,
    };
    let pem = CaPem { cert: read(CA_CERT)?, key: read(CA_KEY)? };
    ClusterCa::from_pem(&pem).map_err(|source| TrustError::BadCa { folder: folder.to_owned(), source })
}

/// The CA in a folder, which is made if there is none. Whoever may do so at the same time as others holds a lock.
pub fn open_or_found(folder: &Path) -> Result<ClusterCa, TrustError> {
    match open_ca(folder) {
        Err(TrustError::NoCa(_)) => {
            found_cluster(folder)?;
            open_ca(folder)
        }
        other => other,
    }
}

/// Makes a member's identity and writes it to a file.
pub fn issue_identity(ca: &ClusterCa, name: &str, file: &Path) -> Result<(), TrustError> {
    let identity = MemberIdentity { name: check_name(name)?, tls: ca.issue(name)? };
    let bad = |source| TrustError::BadIdentity { path: file.to_owned(), source };
    write_new(file, &identity.to_json().map_err(bad)?, Audience::Owner)
}

/// A member's identity.
pub fn read_identity(file: &Path) -> Result<MemberIdentity, TrustError> {
    let text = read_text(file)?;
    warn_if_others_can_read(file);
    MemberIdentity::from_json(&text)
        .map_err(|source| TrustError::BadIdentity { path: file.to_owned(), source })
}

/// Reads a small text file.
pub fn read_text(path: &Path) -> Result<String, TrustError> {
    use std::io::Read;
    let failed = |source| TrustError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(LARGEST_FILE).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// Writes a file that must not exist yet.
pub fn write_new(path: &Path, text: &str, audience: Audience) -> Result<(), TrustError> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(if audience == Audience::Owner { 0o600 } else { 0o644 });
    }
    #[cfg(not(unix))]
    let _ = audience;
    let written = options.open(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => TrustError::Exists(path.to_owned()),
        _ => TrustError::Write { path: path.to_owned(), source },
    })
}

fn warn_if_others_can_read(path: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = path.metadata().map_or(0, |metadata| metadata.permissions().mode());
        if mode & 0o077 != 0 {
            tracing::warn!(file = %path.display(), "other users can read this private key: chmod 600 it");
        }
    }
    #[cfg(not(unix))]
    let _ = path;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_founded_once_and_issues_identities_that_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let ca = folder.path().join("trust/ca");
        assert!(open_ca(&ca).unwrap_err().to_string().contains("shoal identity init"));
        found_cluster(&ca).unwrap();
        assert!(matches!(found_cluster(&ca), Err(TrustError::Exists(_))));
        let file = folder.path().join("desk.json");
        issue_identity(&open_ca(&ca).unwrap(), "desk", &file).unwrap();
        assert_eq!(read_identity(&file).unwrap().name.0, "desk");
        let again = issue_identity(&open_ca(&ca).unwrap(), "desk", &file);
        assert!(matches!(again, Err(TrustError::Exists(_))));
        let named = issue_identity(&open_ca(&ca).unwrap(), "a b", &folder.path().join("x"));
        assert!(matches!(named, Err(TrustError::Name(_))));
    }

    #[cfg(unix)]
    #[test]
    fn private_keys_are_readable_by_their_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        found_cluster(folder.path()).unwrap();
        let file = folder.path().join("desk.json");
        issue_identity(&open_ca(folder.path()).unwrap(), "desk", &file).unwrap();
        for secret in [folder.path().join(CA_KEY), file] {
            assert_eq!(
                secret.metadata().unwrap().permissions().mode() & 0o777,
                0o600,
                "{}",
                secret.display()
            );
        }
    }

    #[test]
    fn a_damaged_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        found_cluster(folder.path()).unwrap();
        std::fs::write(folder.path().join(CA_KEY), "no key").unwrap();
        assert!(open_ca(folder.path()).unwrap_err().to_string().contains("cannot be used"));
        let file = folder.path().join("x.json");
        assert!(read_identity(&file).unwrap_err().to_string().contains("x.json"));
        std::fs::write(&file, "{}").unwrap();
        let error = read_identity(&file).unwrap_err().to_string();
        assert!(error.contains("x.json") && error.contains("not an identity file"), "{error}");
    }
}
