//! `cluster.json`: hosts, their devices and memory, and the links between them.

use cluster::{
    Bytes, BytesPerSecond, Device, DeviceId, DeviceMemory, Link, LinkQuality, Links, Millis, NodeId,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{PlannerFile, current};

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Version of the format.
    #[serde(default = "current")]
    pub version: u32,
    /// The hosts.
    pub nodes: Vec<NodeEntry>,
    /// The links between them.
    pub links: LinksEntry,
}

/// A host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeEntry {
    /// Its name, unique.
    pub name: String,
    /// What it can compute on: GPUs, each with a share of the host's RAM, or the CPU alone.
    pub devices: Vec<DeviceEntry>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceEntry {
    /// Its name, unique in the cluster.
    pub name: String,
    /// Memory that a stage may use.
    pub memory: MemoryEntry,
}

/// Memory budgets, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "snake_case", tag = "kind")]
pub enum MemoryEntry {
    /// A GPU with memory of its own and a share of the host's.
    Discrete {
        /// On the GPU; 0 where there is none.
        vram_bytes: u64,
        /// On the host.
        ram_bytes: u64,
    },
    /// One memory for both.
    Unified {
        /// All of it.
        total_bytes: u64,
    },
}

/// The links.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinksEntry {
    /// Links of pairs that are not listed; without it such pairs cannot talk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub otherwise: Option<LinkQualityEntry>,
    /// Links that were measured, one way each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<LinkEntry>,
}

/// What a link can do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkQualityEntry {
    /// Megabits per second that one stream gets through.
    pub mbit_per_s: f64,
    /// From send to receipt of a small message, in milliseconds.
    pub one_way_ms: f64,
}

/// The link from one host to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkEntry {
    /// The sending host.
    pub from: String,
    /// The receiving host.
    pub to: String,
    /// Megabits per second that one stream gets through.
    pub mbit_per_s: f64,
    /// From send to receipt of a small message, in milliseconds.
    pub one_way_ms: f64,
}

impl From<LinkQuality> for LinkQualityEntry {
    fn from(quality: LinkQuality) -> Self {
        Self { mbit_per_s: quality.bandwidth.mbit(), one_way_ms: quality.one_way_latency.0 }
    }
}

impl LinkEntry {
    /// The entry of a link that was measured.
    pub fn new(from: &NodeId, to: &NodeId, quality: LinkQuality) -> Self {
        let LinkQualityEntry { mbit_per_s, one_way_ms } = quality.into();
        Self { from: from.0.clone(), to: to.0.clone(), mbit_per_s, one_way_ms }
    }
}

impl From<MemoryEntry> for DeviceMemory {
    fn from(entry: MemoryEntry) -> Self {
        match entry {
            MemoryEntry::Discrete { vram_bytes, ram_bytes } => {
                Self::Discrete { vram: Bytes(vram_bytes), ram: Bytes(ram_bytes) }
            }
            MemoryEntry::Unified { total_bytes } => Self::Unified { total: Bytes(total_bytes) },
        }
    }
}

impl From<DeviceMemory> for MemoryEntry {
    fn from(memory: DeviceMemory) -> Self {
        match memory {
            DeviceMemory::Discrete { vram, ram } => Self::Discrete { vram_bytes: vram.0, ram_bytes: ram.0 },
            DeviceMemory::Unified { total } => Self::Unified { total_bytes: total.0 },
        }
    }
}

impl PlannerFile for ClusterFile {
    const WHAT: &'static str = "the cluster file";

    fn version(&self) -> u32 {
        self.version
    }
}

impl ClusterFile {
    /// The devices of all hosts.
    pub fn devices(&self) -> Vec<Device> {
        let of_node = |node: &NodeEntry| {
            let name = NodeId(node.name.clone());
            node.devices
                .iter()
                .map(|device| Device {
                    id: DeviceId(device.name.clone()),
                    node: name.clone(),
                    memory: device.memory.into(),
                })
                .collect::<Vec<_>>()
        };
        self.nodes.iter().flat_map(of_node).collect()
    }

    /// The links.
    pub fn links(&self) -> Links {
        let quality = |mbit_per_s, one_way_ms| LinkQuality {
            bandwidth: BytesPerSecond::from_mbit(mbit_per_s),
            one_way_latency: Millis(one_way_ms),
        };
        let measured = self.links.measured.iter().map(|link| Link {
            from: NodeId(link.from.clone()),
            to: NodeId(link.to.clone()),
            quality: quality(link.mbit_per_s, link.one_way_ms),
        });
        let otherwise = self.links.otherwise.map(|link| quality(link.mbit_per_s, link.one_way_ms));
        Links { measured: measured.collect(), otherwise }
    }

    /// The file of a cluster. Devices stay in their order: those of a node that do not follow each other are listed apart.
    pub fn new(devices: &[Device], links: &Links) -> Self {
        let mut nodes: Vec<NodeEntry> = Vec::new();
        for device in devices {
            let entry = DeviceEntry { name: device.id.0.clone(), memory: device.memory.into() };
            match nodes.last_mut().filter(|node| node.name == device.node.0) {
                Some(node) => node.devices.push(entry),
                None => nodes.push(NodeEntry { name: device.node.0.clone(), devices: vec![entry] }),
            }
        }
        let measured = links.measured.iter().map(|link| LinkEntry::new(&link.from, &link.to, link.quality));
        let otherwise = links.otherwise.map(LinkQualityEntry::from);
        Self { version: current(), nodes, links: LinksEntry { otherwise, measured: measured.collect() } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"{
        "version": 1,
        "nodes": [
            {"name": "desk", "devices": [
                {"name": "desk/gpu", "memory": {"kind": "discrete", "vram_bytes": 12000000000, "ram_bytes": 56000000000}}
            ]},
            {"name": "mac", "devices": [{"name": "mac", "memory": {"kind": "unified", "total_bytes": 22900000000}}]}
        ],
        "links": {
            "otherwise": {"mbit_per_s": 920, "one_way_ms": 0.15},
            "measured": [{"from": "desk", "to": "mac", "mbit_per_s": 400, "one_way_ms": 1.5}]
        }
    }"#;

    #[test]
    fn a_cluster_survives_the_way_into_nouns_and_back() {
        let file = ClusterFile::from_json(EXAMPLE).unwrap();
        let (devices, links) = (file.devices(), file.links());
        assert_eq!(devices.len(), 2);
        assert_eq!(
            links.between(&NodeId("desk".into()), &NodeId("mac".into())).unwrap().one_way_latency.0,
            1.5
        );
        assert_eq!(ClusterFile::new(&devices, &links), file);
    }
}
