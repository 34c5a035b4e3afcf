//! What makes a replica the one it is: while that stays, nothing of it has to be loaded anew. Pure.

use std::fmt;

use cluster::{DeviceId, LayerRange, NodeId, ReplicaPlan, StagePlan};

/// A replica's stages and slots. Its role and what is predicted of it are no part of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chain {
    /// In order; the last is the master.
    pub stages: Vec<Place>,
    /// Sequences it has room for.
    pub slots: u32,
}

/// One stage of a chain.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The node that runs it.
    pub node: NodeId,
    /// The device of that node that computes it; none where that is the CPU.
    pub gpu: Option<String>,
    /// Its blocks.
    pub layers: LayerRange,
    /// How many of them are on the GPU.
    pub gpu_blocks: u32,
}

impl Chain {
    /// Of a planned replica.
    pub fn of(replica: &ReplicaPlan) -> Self {
        Self { stages: replica.stages.iter().map(Place::of).collect(), slots: replica.slots }
    }

    /// The nodes of its stages, in order.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeId> {
        self.stages.iter().map(|place| &place.node)
    }
}

impl Place {
    fn of(stage: &StagePlan) -> Self {
        let (node, device) = node_and_device(&stage.device);
        let gpu = device.filter(|_| stage.gpu_blocks > 0).map(str::to_owned);
        Self { node, gpu, layers: stage.layers, gpu_blocks: stage.gpu_blocks }
    }
}

/// The node of a device, which is called `node/device`; or `node` alone, for the device that the node would choose.
pub fn node_and_device(device: &DeviceId) -> (NodeId, Option<&str>) {
    match device.0.split_once('/') {
        Some((node, device)) => (NodeId(node.to_owned()), Some(device)),
        None => (NodeId(device.0.clone()), None),
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, place) in self.stages.iter().enumerate() {
            let arrow = if i == 0 { "" } else { " → " };
            write!(f, "{arrow}{place}")?;
        }
        let s = if self.slots == 1 { "" } else { "s" };
        write!(f, ", {} slot{s}", self.slots)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.node, self.layers)
    }
}
