//! Which nodes are there now. Nothing of it is kept: it is true as long as their streams are open.

use std::collections::BTreeMap;
use std::time::SystemTime;

use protocol::membership::Heartbeat;
use protocol::node::{Address, NodeFacts};
use tokio::sync::watch;
use uuid::Uuid;

/// A node that attends.
#[derive(Debug, Clone, PartialEq)]
pub struct Present {
    /// What it said of itself when it came.
    pub facts: NodeFacts,
    /// Whether this process reaches it.
    pub reached: Reached,
    /// Its last sign of life.
    pub heartbeat: Heartbeat,
    /// Since when.
    pub since: SystemTime,
    /// Which of the streams that were ever opened.
    stream: u64,
}

/// Whether a node is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reached {
    /// Its addresses are being tried.
    Trying,
    /// At this one.
    At(Address),
    /// At none, and why.
    Nowhere(String),
}

impl Reached {
    /// The address, if there is one.
    pub const fn address(&self) -> Option<&Address> {
        match self {
            Self::At(address) => Some(address),
            Self::Trying | Self::Nowhere(_) => None,
        }
    }
}

/// All that are there.
pub(crate) type PresentNodes = BTreeMap<Uuid, Present>;

/// Who is there, for those who change it.
#[derive(Debug)]
pub(crate) struct Presence {
    nodes: watch::Sender<PresentNodes>,
    streams: std::sync::atomic::AtomicU64,
}

/// A node's stream. When it is dropped, the node is away, unless it has opened another one since.
#[derive(Debug)]
pub(crate) struct Attendance {
    nodes: watch::Sender<PresentNodes>,
    id: Uuid,
    stream: u64,
}

impl Presence {
    pub(crate) fn new() -> Self {
        Self { nodes: watch::Sender::new(BTreeMap::new()), streams: 0.into() }
    }

    pub(crate) fn watch(&self) -> watch::Receiver<PresentNodes> {
        self.nodes.subscribe()
    }

    /// A node is there. If it was before, its old stream counts no more: a host that was restarted is one node, not two.
    pub(crate) fn enter(&self, id: Uuid, facts: NodeFacts) -> Attendance {
        let stream = self.streams.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let heartbeat = Heartbeat { memory_available: facts.memory_available, running: Vec::new() };
        let since = SystemTime::now();
        let present = Present { facts, reached: Reached::Trying, heartbeat, since, stream };
        self.nodes.send_modify(|nodes| {
            nodes.insert(id, present);
        });
        Attendance { nodes: self.nodes.clone(), id, stream }
    }
}

impl Attendance {
    /// Its last sign of life.
    pub(crate) fn beat(&self, heartbeat: Heartbeat) {
        self.change(|present| present.heartbeat = heartbeat);
    }

    /// Whether it is reached.
    pub(crate) fn reached(&self, reached: Reached) {
        self.change(|present| present.reached = reached);
    }

    /// Whether the node has not opened another stream since.
    pub(crate) fn is_current(&self) -> bool {
        self.nodes.borrow().get(&self.id).is_some_and(|present| present.stream == self.stream)
    }

    fn change(&self, change: impl FnOnce(&mut Present)) {
        self.nodes.send_if_modified(|nodes| {
            match nodes.get_mut(&self.id).filter(|present| present.stream == self.stream) {
                Some(present) => {
                    let before = present.clone();
                    change(present);
                    *present != before
                }
                None => false,
            }
        });
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.nodes.send_if_modified(|nodes| {
            let ours = nodes.get(&self.id).is_some_and(|present| present.stream == self.stream);
            if ours {
                nodes.remove(&self.id);
            }
            ours
        });
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Bytes, NodeId};

    use super::*;
    use crate::testing::build;

    fn facts(instance: &str) -> NodeFacts {
        NodeFacts {
            name: NodeId("a".into()),
            instance: instance.into(),
            build: build(),
            devices: Vec::new(),
            memory_total: Bytes(2),
            memory_available: Bytes(1),
            addresses: Vec::new(),
            emulated: false,
        }
    }

    // Field case 4.
    #[test]
    fn case_4_a_node_that_came_back_is_one_node_and_its_ghost_takes_nothing_along() {
        let (presence, id) = (Presence::new(), Uuid::from_u128(1));
        let first = presence.enter(id, facts("first"));
        let second = presence.enter(id, facts("second"));
        first.reached(Reached::Nowhere("gone".into()));
        assert!(!first.is_current() && second.is_current());
        drop(first);
        let seen = presence.watch();
        assert_eq!(seen.borrow()[&id].facts.instance, "second");
        assert_eq!(seen.borrow()[&id].reached, Reached::Trying);
        drop(second);
        assert!(seen.borrow().is_empty());
    }
}
