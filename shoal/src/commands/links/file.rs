//! `cluster.json`: what was found, put into what the file said before.
//!
//! A link is as it was last measured; one that failed is taken out, so that nobody plans with it. Nodes and devices that
//! the file has are left as they are: their budgets may have been set by hand.

use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use cluster::{Bytes, Device, DeviceId, DeviceMemory};
use node::links::LinkOutcome;
use protocol::node::{DeviceKind, NodeFacts};
use protocol::plan_files::{ClusterFile, LinkEntry, PlannerFile};

use super::Found;

/// Reads the file; an empty cluster where there is none.
pub(super) fn read(path: &Path) -> Result<ClusterFile> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(ClusterFile::from_json(&text).with_context(|| format!("reading {}", path.display()))?),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(ClusterFile::new(&[], &Default::default())),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}

/// Writes what was found over what was known.
pub(super) fn write(path: &Path, known: ClusterFile, found: &Found) -> Result<()> {
    let facts: Vec<&NodeFacts> = found.nodes.iter().map(node::NodeClient::facts).collect();
    let file = update(known, &facts, &found.links);
    let text = serde_json::to_string_pretty(&file)? + "\n";
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Written beside and renamed, so that nobody reads half a file and a full disk loses nothing.
    let written = tempfile::NamedTempFile::new_in(folder).and_then(|mut beside| {
        beside.write_all(text.as_bytes())?;
        beside.persist(path)?;
        Ok(())
    });
    written.with_context(|| format!("writing {}", path.display()))
}

fn update(mut file: ClusterFile, nodes: &[&NodeFacts], links: &[LinkOutcome]) -> ClusterFile {
    let devices: Vec<Device> = nodes.iter().flat_map(|facts| devices(facts)).collect();
    for found in ClusterFile::new(&devices, &Default::default()).nodes {
        match file.nodes.iter_mut().find(|node| node.name == found.name) {
            None => file.nodes.push(found),
            Some(node) => {
                let is_new = |name: &String| node.devices.iter().all(|known| known.name != *name);
                let new: Vec<_> = found.devices.into_iter().filter(|device| is_new(&device.name)).collect();
                node.devices.extend(new);
            }
        }
    }
    for LinkOutcome { from, to, outcome } in links {
        file.links.measured.retain(|link| (&link.from, &link.to) != (&from.0, &to.0));
        if let Ok(settled) = outcome {
            file.links.measured.push(LinkEntry::new(from, to, settled.quality));
        }
    }
    file
}

/// What stages of a node run on: each GPU with its share of the host's memory, or the CPU alone. A GPU within the CPU
/// counts where there is no other.
fn devices(facts: &NodeFacts) -> Vec<Device> {
    let of_kind =
        |kind: DeviceKind| facts.devices.iter().filter(move |device| device.kind == kind).collect::<Vec<_>>();
    let (gpus, integrated) = (of_kind(DeviceKind::Gpu), of_kind(DeviceKind::IntegratedGpu));
    let device = |name: &str, memory| Device {
        id: DeviceId(format!("{}/{}", facts.name, name.to_ascii_lowercase())),
        node: facts.name.clone(),
        memory,
    };
    let available = facts.memory_available;
    match (gpus.as_slice(), integrated.as_slice()) {
        ([], []) => vec![device("cpu", DeviceMemory::Discrete { vram: Bytes::ZERO, ram: available })],
        ([], [first, ..]) => vec![device(&first.name, DeviceMemory::Unified { total: available })],
        (gpus, _) => {
            let ram = Bytes(available.0 / gpus.len() as u64);
            let discrete = |vram| DeviceMemory::Discrete { vram, ram };
            gpus.iter().map(|gpu| device(&gpu.name, discrete(gpu.memory_free))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use cluster::{BytesPerSecond, LinkQuality, Millis, NodeId};
    use node::links::SettledLink;
    use protocol::node::{Address, Build, DeviceFacts};
    use protocol::plan_files::MemoryEntry;

    use super::*;

    fn node(name: &str, devices: &[(&str, DeviceKind)]) -> NodeFacts {
        let device = |(name, kind): &(&str, DeviceKind)| DeviceFacts {
            name: (*name).to_owned(),
            description: String::new(),
            kind: *kind,
            memory_total: Bytes(12),
            memory_free: Bytes(10),
        };
        NodeFacts {
            name: NodeId(name.to_owned()),
            instance: String::new(),
            build: Build { version: String::new(), llama_cpp: String::new(), features: vec![] },
            devices: devices.iter().map(device).collect(),
            memory_total: Bytes(64),
            memory_available: Bytes(48),
            addresses: vec![],
            emulated: false,
        }
    }

    fn link(from: &str, to: &str, mbit: Option<f64>) -> LinkOutcome {
        let settled = |mbit| SettledLink {
            address: Address::parse("x:1").unwrap(),
            quality: LinkQuality {
                bandwidth: BytesPerSecond::from_mbit(mbit),
                one_way_latency: Millis(0.25),
            },
            round_trip: Millis(0.5),
            round_trip_p99: Millis(0.9),
            bandwidth_spread: 0.0,
            frames: vec![],
            measurements: 2,
        };
        let outcome = mbit.map(settled).ok_or_else(|| "lost".to_owned());
        LinkOutcome { from: NodeId(from.to_owned()), to: NodeId(to.to_owned()), outcome }
    }

    #[test]
    fn a_new_file_has_nodes_devices_and_links_and_reads_back() {
        let cpu = [("CPU", DeviceKind::Cpu)];
        let gpus = [("CUDA0", DeviceKind::Gpu), ("CUDA1", DeviceKind::Gpu), ("CPU", DeviceKind::Cpu)];
        let metal = [("Metal", DeviceKind::IntegratedGpu), ("CPU", DeviceKind::Cpu)];
        let nodes = [node("a", &cpu), node("b", &gpus), node("c", &metal)];
        let empty = ClusterFile::new(&[], &Default::default());
        let file = update(empty, &nodes.each_ref(), &[link("a", "b", Some(900.0)), link("b", "a", None)]);
        let file = ClusterFile::from_json(&serde_json::to_string(&file).unwrap()).unwrap();
        let names: Vec<String> = file.devices().into_iter().map(|device| device.id.0).collect();
        assert_eq!(names, ["a/cpu", "b/cuda0", "b/cuda1", "c/metal"]);
        assert_eq!(file.nodes[1].devices[0].memory, MemoryEntry::Discrete { vram_bytes: 10, ram_bytes: 24 });
        assert_eq!(file.nodes[2].devices[0].memory, MemoryEntry::Unified { total_bytes: 48 });
        let (a, b) = (NodeId("a".into()), NodeId("b".into()));
        assert_eq!(file.links().between(&a, &b).unwrap().one_way_latency, Millis(0.25));
        assert_eq!(file.links().between(&b, &a), None, "a link that failed is not planned with");
    }

    #[test]
    fn what_was_set_by_hand_stays_and_what_was_measured_is_replaced() {
        let cpu = [("CPU", DeviceKind::Cpu)];
        let empty = ClusterFile::new(&[], &Default::default());
        let mut file =
            update(empty, &[&node("a", &cpu)], &[link("a", "b", Some(1.0)), link("a", "z", Some(2.0))]);
        file.nodes[0].devices[0].memory = MemoryEntry::Discrete { vram_bytes: 0, ram_bytes: 7 };
        let nodes = [node("a", &cpu), node("b", &cpu)];
        let file = update(file, &nodes.each_ref(), &[link("a", "b", Some(900.0))]);
        assert_eq!(file.nodes[0].devices[0].memory, MemoryEntry::Discrete { vram_bytes: 0, ram_bytes: 7 });
        assert_eq!(file.nodes.len(), 2);
        let rates: Vec<_> = file.links.measured.iter().map(|l| (l.to.as_str(), l.mbit_per_s)).collect();
        assert_eq!(rates, [("z", 2.0), ("b", 900.0)]);
    }
}
