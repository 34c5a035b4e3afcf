//! Nodes: who asked, who is a member, who has left. The rules of admission are here, each in one transaction, so that two
//! processes cannot decide differently about one node.

use cluster::NodeId;
use protocol::fingerprint::Fingerprint;
use protocol::membership::Newcomer;
use protocol::node::{Address, Build, NodeFacts, check_name};
use protocol::token::TokenId;
use rusqlite::{OptionalExtension, Row, Transaction};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{NewCertificate, Result, Store, certificates, content, events, read_addresses, to_json, tokens};
use crate::error::RegistryError;
use crate::event::EventKind;
use crate::member::{MemberState, NodeRecord};
use crate::timestamp::Timestamp;

/// Hosts that may wait for somebody to decide. More is a flood.
const MOST_PENDING: u32 = 64;

/// A host that waits asks every few seconds; one that has not for so long is forgotten.
const PENDING_SECONDS: u64 = 3600;

/// Members, and those that left. Somebody with a token could add them without end.
const MOST_NODES: u32 = 4096;

/// Numbers that are tried to make a taken name unique.
const MOST_NAMESAKES: u32 = 1000;

const COLUMNS: &str = "id, name, state, code, build, addresses, reached, asked, last_seen, \
                       (SELECT max(expires) FROM certificates WHERE node = nodes.id)";

/// How a newcomer asks.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Asking<'a> {
    /// With a token that was found good.
    WithToken(TokenId),
    /// With nothing; people compare this code.
    WithCode(&'a str),
    /// With nothing, where everybody is let in.
    Freely,
}

/// What is decided about a newcomer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is a member by this name, and gets a certificate.
    Admitted(NodeId),
    /// Somebody has to decide.
    Pending,
    /// It is not let in.
    Refused(&'static str),
}

/// A build as it is kept.
#[derive(Serialize, Deserialize)]
struct BuildColumn {
    version: String,
    llama_cpp: String,
    features: Vec<String>,
}

struct Known {
    name: String,
    state: MemberState,
    asked_key: Option<Fingerprint>,
}

impl Store {
    /// Decides about a newcomer with this key.
    pub(crate) fn ask(
        &self,
        newcomer: &Newcomer,
        key: &Fingerprint,
        asking: Asking<'_>,
        now: Timestamp,
    ) -> Result<Verdict> {
        self.change(|transaction| {
            let admission = AdmissionOf { transaction, newcomer, key, now };
            match known(transaction, &newcomer.id)? {
                Some(node) if node.state == MemberState::Approved => admission.again(node, asking),
                Some(node) => admission.of_known(&node, asking),
                None => admission.of_unknown(asking),
            }
        })
    }

    /// Remembers the certificate that a member got.
    pub(crate) fn certified(&self, id: &Uuid, certificate: &NewCertificate, kind: EventKind) -> Result<()> {
        self.change(|transaction| {
            certificates::add(transaction, id, certificate)?;
            let name = name_of(transaction, id)?;
            let text = match kind {
                EventKind::CertificateRenewed => format!("{name} has a new certificate"),
                _ => format!("{name} has joined"),
            };
            events::add(transaction, kind, Some(&name), &text)
        })
    }

    /// Makes a node a member that asked, or that had left.
    pub(crate) fn approve(&self, id: &Uuid) -> Result<NodeRecord> {
        self.change(|transaction| {
            let node = known(transaction, id)?.ok_or_else(|| RegistryError::NoNode(id.to_string()))?;
            if node.state != MemberState::Approved {
                let name = free_name(transaction, &node.name, id)?;
                // Its old name may be another's by now.
                rename(transaction, id, &name)?;
                set_state(transaction, id, MemberState::Approved)?;
                let text = format!("{name} was approved");
                events::add(transaction, EventKind::NodeApproved, Some(&name), &text)?;
            }
            find(transaction, id)
        })
    }

    /// Makes a node no member any more. Its certificates are worth nothing here from now on.
    pub(crate) fn remove(&self, id: &Uuid) -> Result<NodeRecord> {
        self.change(|transaction| {
            let node = known(transaction, id)?.ok_or_else(|| RegistryError::NoNode(id.to_string()))?;
            if node.state != MemberState::Left {
                set_state(transaction, id, MemberState::Left)?;
                certificates::forget(transaction, id)?;
                let text = format!("{} is no member any more", node.name);
                events::add(transaction, EventKind::NodeLeft, Some(&node.name), &text)?;
            }
            find(transaction, id)
        })
    }

    /// All nodes, by name.
    pub(crate) fn nodes(&self) -> Result<Vec<NodeRecord>> {
        let connection = self.lock();
        let mut query = connection.prepare(&format!("SELECT {COLUMNS} FROM nodes ORDER BY name, id"))?;
        let rows = query.query_map([], |row| Ok(read(row)))?;
        rows.map(|row| row?).collect()
    }

    /// A node, if it is known.
    pub(crate) fn node(&self, id: &Uuid) -> Result<Option<NodeRecord>> {
        let connection = self.lock();
        let sql = format!("SELECT {COLUMNS} FROM nodes WHERE id = ?1");
        connection.query_row(&sql, [id.to_string()], |row| Ok(read(row))).optional()?.transpose()
    }

    /// A node was there.
    pub(crate) fn seen(&self, id: &Uuid, now: Timestamp) -> Result<()> {
        let sql = "UPDATE nodes SET last_seen = ?2 WHERE id = ?1";
        self.lock().execute(sql, (id.to_string(), now.0 as i64))?;
        Ok(())
    }

    /// What a node that attends says of itself.
    pub(crate) fn attends(&self, id: &Uuid, facts: &NodeFacts, now: Timestamp) -> Result<()> {
        let sql = "UPDATE nodes SET build = ?2, addresses = ?3, last_seen = ?4 WHERE id = ?1";
        let addresses: Vec<String> = facts.addresses.iter().map(ToString::to_string).collect();
        let (build, addresses) = (build_column(&facts.build)?, to_json(&addresses)?);
        self.lock().execute(sql, (id.to_string(), build, addresses, now.0 as i64))?;
        Ok(())
    }

    /// Where a node was reached.
    pub(crate) fn reached(&self, id: &Uuid, address: &Address) -> Result<()> {
        let sql = "UPDATE nodes SET reached = ?2 WHERE id = ?1";
        self.lock().execute(sql, (id.to_string(), address.to_string()))?;
        Ok(())
    }
}

/// A newcomer before its judge.
struct AdmissionOf<'a> {
    transaction: &'a Transaction<'a>,
    newcomer: &'a Newcomer,
    key: &'a Fingerprint,
    now: Timestamp,
}

impl AdmissionOf<'_> {
    /// A member gets another certificate for a key that it had, or that it was approved with.
    fn again(&self, node: Known, asking: Asking<'_>) -> Result<Verdict> {
        let its_own = node.asked_key == Some(*self.key)
            || certificates::is_key_of(self.transaction, &self.newcomer.id, self.key)?;
        if !its_own {
            return Ok(Verdict::Refused(
                "a member has this host's id and another key: if that was this host, let it be removed first",
            ));
        }
        if let Asking::WithToken(token) = asking {
            tokens::used(self.transaction, token)?;
        }
        Ok(Verdict::Admitted(NodeId(node.name)))
    }

    /// A host that asked before, or that had left.
    fn of_known(&self, node: &Known, asking: Asking<'_>) -> Result<Verdict> {
        match (asking, node.state) {
            (Asking::WithToken(_), _) => self.admit(asking),
            (_, MemberState::Left) => Ok(Verdict::Refused("this host was removed from the cluster")),
            // Whoever looks at the code must not approve another key than the one that it is of.
            _ if node.asked_key.as_ref() != Some(self.key) => {
                Ok(Verdict::Refused("somebody else asks under this host's id"))
            }
            (Asking::Freely, _) => self.admit(asking),
            (Asking::WithCode(_), _) => {
                let sql = "UPDATE nodes SET last_seen = ?2 WHERE id = ?1";
                self.transaction.execute(sql, (self.newcomer.id.to_string(), self.now.0 as i64))?;
                Ok(Verdict::Pending)
            }
        }
    }

    fn of_unknown(&self, asking: Asking<'_>) -> Result<Verdict> {
        let Asking::WithCode(code) = asking else { return self.admit(asking) };
        self.forget_silent()?;
        if self.count("state = 'pending'")? >= MOST_PENDING {
            return Ok(Verdict::Refused("too many hosts wait for somebody to decide"));
        }
        if self.count("1")? >= MOST_NODES {
            return Ok(Verdict::Refused("the cluster is full"));
        }
        let name = free_name(self.transaction, &self.newcomer.name.0, &self.newcomer.id)?;
        self.put(&name, MemberState::Pending, Some(code))?;
        let text = format!("{name} asks to join; its code is {code}");
        events::add(self.transaction, EventKind::NodeAsked, Some(&name), &text)?;
        Ok(Verdict::Pending)
    }

    fn admit(&self, asking: Asking<'_>) -> Result<Verdict> {
        if self.count("1")? >= MOST_NODES {
            return Ok(Verdict::Refused("the cluster is full"));
        }
        let name = free_name(self.transaction, &self.newcomer.name.0, &self.newcomer.id)?;
        self.put(&name, MemberState::Approved, None)?;
        if let Asking::WithToken(token) = asking {
            tokens::used(self.transaction, token)?;
        }
        Ok(Verdict::Admitted(NodeId(name)))
    }

    fn put(&self, name: &str, state: MemberState, code: Option<&str>) -> Result<()> {
        let sql = "INSERT INTO nodes (id, name, state, asked_key, code, build, asked) \
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) \
                   ON CONFLICT (id) DO UPDATE SET name = excluded.name, state = excluded.state, \
                   asked_key = excluded.asked_key, code = excluded.code, build = excluded.build";
        let (id, build) = (self.newcomer.id.to_string(), build_column(&self.newcomer.build)?);
        let values = (id, name, state.as_str(), self.key.0, code, build, self.now.0 as i64);
        self.transaction.execute(sql, values)?;
        Ok(())
    }

    fn forget_silent(&self) -> Result<()> {
        let before = self.now.0.saturating_sub(PENDING_SECONDS) as i64;
        let sql = "DELETE FROM nodes WHERE state = 'pending' AND coalesce(last_seen, asked) < ?1";
        self.transaction.execute(sql, [before])?;
        Ok(())
    }

    fn count(&self, condition: &str) -> Result<u32> {
        let sql = format!("SELECT count(*) FROM nodes WHERE {condition}");
        Ok(self.transaction.query_row(&sql, [], |row| row.get(0))?)
    }
}

/// The wanted name, or that with a number.
fn free_name(transaction: &Transaction<'_>, wanted: &str, id: &Uuid) -> Result<String> {
    let sql = "SELECT id FROM nodes WHERE name = ?1 AND state <> 'left' AND id <> ?2";
    let holder = |name: &str| -> Result<Option<String>> {
        Ok(transaction.query_row(sql, (name, id.to_string()), |row| row.get(0)).optional()?)
    };
    let Some(first) = holder(wanted)? else { return Ok(wanted.to_owned()) };
    for number in 2..MOST_NAMESAKES {
        let ending = format!("-{number}");
        // A name has 63 characters at most, all of them ASCII.
        let name = format!("{}{ending}", &wanted[..wanted.len().min(63 - ending.len())]);
        if holder(&name)?.is_none() {
            return Ok(name);
        }
    }
    Err(RegistryError::NameTaken { name: wanted.to_owned(), id: first })
}

fn known(transaction: &Transaction<'_>, id: &Uuid) -> Result<Option<Known>> {
    let sql = "SELECT name, state, asked_key FROM nodes WHERE id = ?1";
    let row = transaction.query_row(sql, [id.to_string()], |row| {
        Ok((row.get(0)?, row.get::<_, String>(1)?, row.get::<_, Option<[u8; 32]>>(2)?))
    });
    let Some((name, state, key)) = row.optional()? else { return Ok(None) };
    let state = state.parse().map_err(|error| content("a node", error))?;
    Ok(Some(Known { name, state, asked_key: key.map(Fingerprint) }))
}

fn set_state(transaction: &Transaction<'_>, id: &Uuid, state: MemberState) -> Result<()> {
    let sql = "UPDATE nodes SET state = ?2 WHERE id = ?1";
    transaction.execute(sql, (id.to_string(), state.as_str()))?;
    Ok(())
}

fn rename(transaction: &Transaction<'_>, id: &Uuid, name: &str) -> Result<()> {
    transaction.execute("UPDATE nodes SET name = ?2 WHERE id = ?1", (id.to_string(), name))?;
    Ok(())
}

fn name_of(transaction: &Transaction<'_>, id: &Uuid) -> Result<String> {
    let name = known(transaction, id)?.map(|node| node.name);
    name.ok_or_else(|| RegistryError::NoNode(id.to_string()))
}

fn find(transaction: &Transaction<'_>, id: &Uuid) -> Result<NodeRecord> {
    let sql = format!("SELECT {COLUMNS} FROM nodes WHERE id = ?1");
    transaction.query_row(&sql, [id.to_string()], |row| Ok(read(row)))?
}

fn build_column(build: &Build) -> Result<String> {
    let Build { version, llama_cpp, features } = build.clone();
    to_json(&BuildColumn { version, llama_cpp, features })
}

fn read(row: &Row<'_>) -> Result<NodeRecord> {
    let time = |column| -> Result<Option<Timestamp>> {
        Ok(row.get::<_, Option<i64>>(column)?.map(|at| Timestamp(at.unsigned_abs())))
    };
    let node = |error: String| content("a node", error);
    let BuildColumn { version, llama_cpp, features } =
        serde_json::from_str(&row.get::<_, String>(4)?).map_err(|error| content("a build", error))?;
    let reached: Option<String> = row.get(6)?;
    let reached = reached.map(|text| Address::parse(&text)).transpose();
    Ok(NodeRecord {
        id: read_id(&row.get::<_, String>(0)?)?,
        name: check_name(&row.get::<_, String>(1)?).map_err(|error| node(error.to_string()))?,
        state: row.get::<_, String>(2)?.parse().map_err(node)?,
        code: row.get(3)?,
        build: Build { version, llama_cpp, features },
        addresses: read_addresses(&row.get::<_, String>(5)?)?,
        reached: reached.map_err(|error| content("an address", error))?,
        asked: time(7)?.unwrap_or(Timestamp(0)),
        last_seen: time(8)?,
        certificate_expires: time(9)?,
    })
}

pub(super) fn read_id(text: &str) -> Result<Uuid> {
    Uuid::try_parse(text).map_err(|error| content("a node's id", error))
}

#[cfg(test)]
mod tests;
