//! What the crate's tests have in common.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use cluster::NodeId;
use protocol::certify::MemberKey;
use protocol::membership::Newcomer;
use protocol::node::Build;
use tempfile::TempDir;
use uuid::Uuid;

use crate::store::Store;

/// A database in a folder of its own.
pub(crate) struct TestStore {
    store: Store,
    path: PathBuf,
    _folder: TempDir,
}

impl TestStore {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.db");
        Self { store: Store::open(&path).unwrap(), path, _folder: folder }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for TestStore {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

/// What tests run.
pub(crate) fn build() -> Build {
    Build { version: "0.1.0".into(), llama_cpp: "b1".into(), features: vec![] }
}

/// A host that wants to join with no key.
pub(crate) fn newcomer(id: u128, name: &str) -> Newcomer {
    let (id, name) = (Uuid::from_u128(id), NodeId(name.to_owned()));
    Newcomer { id, name, build: build(), certificate_request: Vec::new() }
}

/// The same with a key of its own.
pub(crate) fn newcomer_with_key(id: u128, name: &str) -> (Newcomer, MemberKey) {
    let key = MemberKey::generate().unwrap();
    (Newcomer { certificate_request: key.request().to_vec(), ..newcomer(id, name) }, key)
}
