//! Plans as they are kept, and which was desired when. What is in them is not the registry's business.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::timestamp::Timestamp;

/// A plan that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRecord {
    /// Counts up.
    pub id: u64,
    /// When it was made.
    pub made: Timestamp,
    /// Of the model that it is for: SHA-256 in hex.
    pub model: String,
    /// Who made it.
    pub origin: PlanOrigin,
    /// JSON.
    pub plan: String,
}

/// A plan to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPlan<'a> {
    /// Of the model that it is for: SHA-256 in hex.
    pub model: &'a str,
    /// Who made it.
    pub origin: PlanOrigin,
    /// JSON.
    pub plan: &'a str,
}

/// A plan was desired from then on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeploymentRecord {
    /// Counts up.
    pub id: u64,
    /// When.
    pub at: Timestamp,
    /// Which.
    pub plan: u64,
    /// Why.
    pub reason: String,
}

/// Who made a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanOrigin {
    /// A person, or a program, from outside.
    Given,
    /// This process, by what it was started with.
    Started,
    /// This process, because nodes came or went.
    Replanned,
    /// This process, because something else is asked for than before.
    Adapted,
}

impl PlanOrigin {
    const ALL: [Self; 4] = [Self::Given, Self::Started, Self::Replanned, Self::Adapted];

    /// As programs see it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Started => "started",
            Self::Replanned => "replanned",
            Self::Adapted => "adapted",
        }
    }
}

impl fmt::Display for PlanOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for PlanOrigin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl FromStr for PlanOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|origin| origin.as_str() == text);
        found.ok_or_else(|| format!("{text:?} makes no plans"))
    }
}
