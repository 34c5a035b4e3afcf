//! Why the registry did not do what it was asked to.

use std::io;
use std::path::PathBuf;

use protocol::tls::TlsError;
use protocol::token::NoRandomness;
use protocol::trust::TrustError;
use thiserror::Error;

/// Why something cannot be looked up or changed.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum RegistryError {
    #[error("the user has no home folder: say with --state where the cluster's state is kept")]
    NoHome,
    #[error(
        "there is no cluster in {}: `shoal serve --cluster-listen` founds one, and so does `shoal token create`",
        .0.display()
    )]
    NoCluster(PathBuf),
    #[error("{doing} {}: {source}", path.display())]
    Folder { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("the cluster's database {} cannot be opened: {source}", path.display())]
    Open { path: PathBuf, source: rusqlite::Error },
    #[error(
        "the cluster's database {} was written by a newer shoal, or is damaged: {reason}; use that shoal, or another --state",
        path.display()
    )]
    Migrate { path: PathBuf, reason: String },
    #[error("the cluster's database: {0}")]
    Database(#[from] rusqlite::Error),
    #[error("the cluster's database has {what} that cannot be read: {reason}")]
    Content { what: &'static str, reason: String },
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Random(#[from] NoRandomness),
    #[error("there is no token {0:?}: `shoal token list` shows all")]
    NoToken(String),
    #[error("there is no node {0:?}: `shoal node list` shows all")]
    NoNode(String),
    #[error("there is no plan {0}")]
    NoPlan(u64),
    #[error("{start:?} is the start of several nodes' ids: {}", ids.join(", "))]
    SeveralNodes { start: String, ids: Vec<String> },
    #[error("the name {name} is taken by another node, {id}: remove that one first")]
    NameTaken { name: String, id: String },
    #[error("the work was cut off: {0}")]
    CutOff(String),
}

impl RegistryError {
    /// Whether what was named is not there, or not named clearly.
    pub fn is_unknown_name(&self) -> bool {
        matches!(self, Self::NoToken(_) | Self::NoNode(_) | Self::NoPlan(_) | Self::SeveralNodes { .. })
    }
}
