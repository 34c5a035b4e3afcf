//! Certificates that were issued, by which a connection's member is known, and a member's keys.

use protocol::fingerprint::Fingerprint;
use rusqlite::{OptionalExtension, Transaction};
use uuid::Uuid;

use super::nodes::read_id;
use super::{Result, Store};
use crate::timestamp::Timestamp;

/// Certificates of one node that are remembered. It renews them at half their life, so more of them are good only if it
/// asked for them without need.
const REMEMBERED: u32 = 8;

/// Of so many the keys are taken for the node's: the newest, and the one before, in case the newest never arrived.
const TRUSTED_KEYS: u32 = 2;

/// A certificate that was issued.
#[derive(Debug, Clone)]
pub(crate) struct NewCertificate {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) key: Fingerprint,
    pub(crate) serial: String,
    pub(crate) issued: Timestamp,
    pub(crate) expires: Timestamp,
}

impl Store {
    /// Whose certificate it is.
    pub(crate) fn holder(&self, certificate: &Fingerprint) -> Result<Option<Uuid>> {
        let sql = "SELECT node FROM certificates WHERE fingerprint = ?1";
        let id: Option<String> = self.lock().query_row(sql, [certificate.0], |row| row.get(0)).optional()?;
        id.map(|id| read_id(&id)).transpose()
    }
}

/// Remembers a certificate of a node.
pub(super) fn add(transaction: &Transaction<'_>, node: &Uuid, certificate: &NewCertificate) -> Result<()> {
    let NewCertificate { fingerprint, key, serial, issued, expires } = certificate;
    let sql = "INSERT INTO certificates (fingerprint, node, key, serial, issued, expires) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let node = node.to_string();
    transaction.execute(sql, (fingerprint.0, &node, key.0, serial, issued.0 as i64, expires.0 as i64))?;
    let sql = "DELETE FROM certificates WHERE node = ?1 AND fingerprint NOT IN \
               (SELECT fingerprint FROM certificates WHERE node = ?1 ORDER BY issued DESC, serial LIMIT ?2) \
               AND fingerprint <> ?3";
    transaction.execute(sql, (&node, REMEMBERED, fingerprint.0))?;
    // The key with which it once asked has done its service.
    transaction.execute("UPDATE nodes SET asked_key = ?2, code = NULL WHERE id = ?1", (&node, key.0))?;
    Ok(())
}

/// Whether a key is the one that was last certified for a node, or the one before.
pub(super) fn is_key_of(transaction: &Transaction<'_>, node: &Uuid, key: &Fingerprint) -> Result<bool> {
    let sql = "SELECT 1 FROM (SELECT key FROM certificates WHERE node = ?1 ORDER BY issued DESC, serial LIMIT ?2) \
               WHERE key = ?3";
    let values = (node.to_string(), TRUSTED_KEYS, key.0);
    Ok(transaction.query_row(sql, values, |_| Ok(())).optional()?.is_some())
}

/// Nobody is known by a node's certificates any more.
pub(super) fn forget(transaction: &Transaction<'_>, node: &Uuid) -> Result<()> {
    transaction.execute("DELETE FROM certificates WHERE node = ?1", [node.to_string()])?;
    Ok(())
}
