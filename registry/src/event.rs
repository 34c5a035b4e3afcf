//! What happened to the cluster: to its membership, and to what runs on it.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    /// Counts up; later events have larger ones.
    pub id: u64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// What kind of thing.
    pub kind: EventKind,
    /// The node's name, where it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// For people.
    pub text: String,
    /// Its numbers, for programs, where it has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub facts: Option<serde_json::Value>,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $text:literal,)*) => {
        /// Kinds of events.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum EventKind {
            $($(#[$doc])* $kind,)*
        }

        impl EventKind {
            const ALL: &[Self] = &[$(Self::$kind,)*];

            /// As programs see it.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$kind => $text,)*
                }
            }
        }
    };
}

kinds! {
    /// A token was made.
    TokenMade = "token_made",
    /// A token was revoked.
    TokenRevoked = "token_revoked",
    /// A host was refused.
    JoinRefused = "join_refused",
    /// A host asks to join.
    NodeAsked = "node_asked",
    /// Somebody approved a node.
    NodeApproved = "node_approved",
    /// A node got its certificate.
    NodeJoined = "node_joined",
    /// A node got a new certificate.
    CertificateRenewed = "certificate_renewed",
    /// A node attends.
    NodeHere = "node_here",
    /// A node attends and is reached at none of its addresses.
    NodeUnreachable = "node_unreachable",
    /// A node attends no more.
    NodeAway = "node_away",
    /// A node left, or was removed.
    NodeLeft = "node_left",
    /// A plan was made.
    PlanMade = "plan_made",
    /// A plan is desired from now on.
    PlanDesired = "plan_desired",
    /// All that the desired plan asks for is as it asks.
    PlanReached = "plan_reached",
    /// A plan was looked for because nodes came or went, and what came of it.
    Replanned = "replanned",
    /// What is asked for has left the range that the present roles and plan were made for.
    WorkloadLeft = "workload_left",
    /// Roles or the plan were changed for what is asked for, or a plan is proposed.
    Adapted = "adapted",
    /// They were not, and why.
    AdaptationDeclined = "adaptation_declined",
    /// A replica is started.
    ReplicaStarted = "replica_started",
    /// A replica serves.
    ReplicaServes = "replica_serves",
    /// A replica that served does not.
    ReplicaDown = "replica_down",
    /// A replica's role is another.
    ReplicaRole = "replica_role",
    /// A replica gets no more requests.
    ReplicaDrained = "replica_drained",
    /// A replica that was to go stays.
    ReplicaKept = "replica_kept",
    /// A replica was stopped.
    ReplicaStopped = "replica_stopped",
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for EventKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl FromStr for EventKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().copied().find(|kind| kind.as_str() == text);
        found.ok_or_else(|| format!("{text:?} is no kind of event"))
    }
}
