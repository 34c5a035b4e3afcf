//! Identifiers. Each is a type of its own and is never parsed back out of a longer string.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

number_id! {
    /// Room for one sequence in every stage of a replica, numbered from 0.
    SlotId(u32), "slot "
}
number_id! {
    /// A stage's place in its replica's chain, numbered from 0; the last is the master.
    StageIndex(u32), "stage "
}
number_id! {
    /// One incarnation of a replica. Frames of another epoch are refused, so a stage that was away cannot serve
    /// a replica that has moved on.
    Epoch(u64), "epoch "
}
number_id! {
    /// One step of a replica's pipeline: the frame with this number passes every stage once.
    StepId(u64), "step "
}

/// A client's request, unique within the orchestrator that admitted it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestId(pub String);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// SHA-256 of a model's GGUF bytes (of all parts in order, where it is split).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelHash(pub [u8; 32]);

impl fmt::Display for ModelHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
