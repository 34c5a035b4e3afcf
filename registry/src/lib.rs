//! Who is a member of the cluster: its certificate authority, tokens, nodes and events, kept in a folder of the
//! orchestrator's host, and the port at which nodes join, attend and renew their certificates.
//!
//! It decides who is let in and knows who is there, and keeps plans for who makes them. It knows nothing of models, stages or
//! HTTP, and starts nothing.
#![forbid(unsafe_code)]

mod attempts;
mod error;
mod event;
mod folder;
mod member;
mod plan;
mod presence;
mod registry;
mod service;
mod store;
#[cfg(test)]
mod testing;
mod timestamp;
mod view;

pub use error::RegistryError;
pub use event::{Event, EventKind};
pub use folder::StateFolder;
pub use member::{MemberState, NodeRecord, TokenRecord};
pub use plan::{DeploymentRecord, NewPlan, PlanOrigin, PlanRecord};
pub use presence::{Present, Reached};
pub use registry::{Member, Registry};
pub use service::{Announce, Approval, ClusterPort, ClusterPortConfig, PortError};
pub use timestamp::Timestamp;
pub use view::NodeView;
