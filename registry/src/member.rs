//! Tokens and nodes as they are kept.

use std::fmt;
use std::str::FromStr;

use cluster::NodeId;
use protocol::node::{Address, Build};
use protocol::token::TokenId;
use serde::Serialize;
use uuid::Uuid;

use crate::timestamp::Timestamp;

/// An invitation that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRecord {
    /// Which.
    pub id: TokenId,
    /// When it was made.
    pub made: Timestamp,
    /// When it expires.
    pub expires: Timestamp,
    /// When it was revoked.
    pub revoked: Option<Timestamp>,
    /// Hosts that joined with it.
    pub uses: u32,
}

/// How far a node has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    /// It asked, and nobody has decided.
    Pending,
    /// It is a member.
    Approved,
    /// It was one, or was turned away.
    Left,
}

/// A node that is or was known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRecord {
    /// The id that its host keeps.
    pub id: Uuid,
    /// What it is called; unique among those that have not left.
    pub name: NodeId,
    /// How far it has come.
    pub state: MemberState,
    /// What a pending node shows too, for people to compare.
    pub code: Option<String>,
    /// What it ran when it was last heard of.
    pub build: Build,
    /// Where it said it may be reached.
    pub addresses: Vec<Address>,
    /// Where it was last reached.
    pub reached: Option<Address>,
    /// When it first asked.
    pub asked: Timestamp,
    /// When it was last there.
    pub last_seen: Option<Timestamp>,
    /// When its newest certificate expires.
    pub certificate_expires: Option<Timestamp>,
}

impl MemberState {
    /// As it is kept.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Approved => "approved",
            Self::Left => "left",
        }
    }
}

impl fmt::Display for MemberState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for MemberState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Pending, Self::Approved, Self::Left]
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| format!("{text:?} is no state of a node"))
    }
}
