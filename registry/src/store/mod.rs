//! The cluster's database: SQLite with a write-ahead log, so that `shoal token` and a running orchestrator use it at the same
//! time. Every change is one transaction; whoever has to wait for another process's waits, for seconds at most.

mod certificates;
mod events;
mod nodes;
mod plans;
mod tokens;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use protocol::node::Address;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};
use rusqlite_migration::{M, Migrations};

pub(crate) use certificates::NewCertificate;
pub(crate) use nodes::{Asking, Verdict};
pub(crate) use tokens::TokenRefusal;

use crate::error::RegistryError;

/// Changes take milliseconds; another process would have to hang to make anybody wait so long.
const BUSY: Duration = Duration::from_secs(5);

/// Each is applied once, in this order, and never changed after it was released.
const MIGRATIONS: &[M<'_>] = &[
    M::up(include_str!("../../migrations/1-members.sql")),
    M::up(include_str!("../../migrations/2-plans.sql")),
    M::up(include_str!("../../migrations/3-event-facts.sql")),
];

/// The setting with the orchestrator's addresses.
const ADDRESSES: &str = "addresses";

type Result<T> = std::result::Result<T, RegistryError>;

/// The database.
#[derive(Debug)]
pub(crate) struct Store(Mutex<Connection>);

impl Store {
    /// Opens it, and brings it up to date.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |source| RegistryError::Open { path: path.to_owned(), source };
        let mut connection = Connection::open(path).map_err(failed)?;
        connection.busy_timeout(BUSY).map_err(failed)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(failed)?;
        // What is written is rare and must survive a power cut: a node must not lose its membership.
        connection.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
        connection.pragma_update(None, "foreign_keys", true).map_err(failed)?;
        let migrated = Migrations::from_slice(MIGRATIONS).to_latest(&mut connection);
        migrated.map_err(|error| migration_failed(path, &error))?;
        Ok(Self(Mutex::new(connection)))
    }

    /// Remembers where the orchestrator is reached, for tokens that are made while it does not run.
    pub(crate) fn set_addresses(&self, addresses: &[Address]) -> Result<()> {
        let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let sql = "INSERT INTO settings (name, value) VALUES (?1, ?2) \
                   ON CONFLICT (name) DO UPDATE SET value = excluded.value";
        self.lock().execute(sql, (ADDRESSES, to_json(&texts)?))?;
        Ok(())
    }

    /// Where it was reached when it last ran.
    pub(crate) fn addresses(&self) -> Result<Vec<Address>> {
        let sql = "SELECT value FROM settings WHERE name = ?1";
        let text: Option<String> = self.lock().query_row(sql, [ADDRESSES], |row| row.get(0)).optional()?;
        text.map_or(Ok(Vec::new()), |text| read_addresses(&text))
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic in the middle of a transaction rolled it back.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does several things or none.
    fn change<T>(&self, work: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut connection = self.lock();
        // Locked from the start: a read that becomes a write could fail after another process's write.
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = work(&transaction)?;
        transaction.commit()?;
        Ok(done)
    }
}

fn migration_failed(path: &Path, error: &rusqlite_migration::Error) -> RegistryError {
    RegistryError::Migrate { path: PathBuf::from(path), reason: error.to_string() }
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| content("a value", error))
}

fn content(what: &'static str, reason: impl std::fmt::Display) -> RegistryError {
    RegistryError::Content { what, reason: reason.to_string() }
}

fn read_addresses(text: &str) -> Result<Vec<Address>> {
    let texts: Vec<String> = serde_json::from_str(text).map_err(|error| content("addresses", error))?;
    texts.iter().map(|text| Address::parse(text).map_err(|error| content("an address", error))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestStore;

    #[test]
    fn migrations_are_valid_and_a_newer_database_is_refused_by_name() {
        Migrations::from_slice(MIGRATIONS).validate().unwrap();
        let store = TestStore::new();
        store.lock().pragma_update(None, "user_version", 999).unwrap();
        let error = Store::open(store.path()).unwrap_err().to_string();
        assert!(error.contains("newer shoal") && error.contains("cluster.db"), "{error}");
    }

    #[test]
    fn what_is_no_database_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.db");
        std::fs::write(&path, "x".repeat(5000)).unwrap();
        assert!(Store::open(&path).unwrap_err().to_string().contains("cluster.db"));
    }

    #[test]
    fn two_processes_see_each_others_changes() {
        let ours = TestStore::new();
        let theirs = Store::open(ours.path()).unwrap();
        assert_eq!(theirs.addresses().unwrap(), []);
        let address = Address::parse("[fd00::1]:8471").unwrap();
        ours.set_addresses(std::slice::from_ref(&address)).unwrap();
        assert_eq!(theirs.addresses().unwrap(), [address]);
    }
}
