//! Who a node is, what it runs and what it has.

use cluster::{Bytes, NodeId};
use thiserror::Error;

use super::{Address, BadMessage, Peer, check_addresses, check_name, check_text, limit};
use crate::v1;

const WHAT: &str = "a node's description";

/// Devices of one node.
const MOST_DEVICES: usize = 64;

/// Backends of llama.cpp.
const MOST_FEATURES: usize = 32;

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its name.
    pub name: NodeId,
    /// Drawn anew by every process.
    pub instance: String,
    /// What it runs.
    pub build: Build,
    /// What it can compute on.
    pub devices: Vec<DeviceFacts>,
    /// The host's memory.
    pub memory_total: Bytes,
    /// Of which processes started now can use this much.
    pub memory_available: Bytes,
    /// Where it may be reached, the likeliest first.
    pub addresses: Vec<Address>,
    /// Whether its workers sleep instead of computing.
    pub emulated: bool,
}

/// A build of Shoal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Build {
    /// Shoal's version.
    pub version: String,
    /// llama.cpp's version, as it names itself.
    pub llama_cpp: String,
    /// llama.cpp's backends.
    pub features: Vec<String>,
}

/// Two processes of different builds, whose stages would not compute alike or not understand each other.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("it runs {theirs}, but this is {ours}: use the same shoal everywhere")]
pub struct VersionMismatch {
    /// The peer's.
    pub theirs: String,
    /// This process's.
    pub ours: String,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// ggml's name, unique in the node.
    pub name: String,
    /// The product's name.
    pub description: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Its memory.
    pub memory_total: Bytes,
    /// Of which this much is free.
    pub memory_free: Bytes,
}

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host's processors and memory.
    Cpu,
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
}

impl Build {
    /// Whether another build can be part of the same replica.
    pub fn check_same(&self, theirs: &Self) -> Result<(), VersionMismatch> {
        let name = |build: &Self| format!("shoal {} with llama.cpp {}", build.version, build.llama_cpp);
        if (&self.version, &self.llama_cpp) == (&theirs.version, &theirs.llama_cpp) {
            return Ok(());
        }
        Err(VersionMismatch { theirs: name(theirs), ours: name(self) })
    }
}

impl Build {
    /// Checks a received one.
    pub(crate) fn check(build: v1::BuildDescription) -> Result<Self, BadMessage> {
        let v1::BuildDescription { version, llama_cpp, features } = build;
        limit(WHAT, "features", features.len(), MOST_FEATURES)?;
        Ok(Self {
            version: check_text(WHAT, version)?,
            llama_cpp: check_text(WHAT, llama_cpp)?,
            features: features.into_iter().map(|text| check_text(WHAT, text)).collect::<Result<_, _>>()?,
        })
    }
}

impl From<Build> for v1::BuildDescription {
    fn from(Build { version, llama_cpp, features }: Build) -> Self {
        Self { version, llama_cpp, features }
    }
}

impl NodeFacts {
    /// The node as a peer of others, who may reach it at `first` too.
    pub fn peer(&self, first: &Address) -> Peer {
        let others = self.addresses.iter().filter(|address| *address != first);
        Peer {
            name: self.name.clone(),
            instance: self.instance.clone(),
            addresses: [first].into_iter().chain(others).cloned().collect(),
        }
    }

    /// Checks a received description.
    pub fn check(description: v1::NodeDescription) -> Result<Self, BadMessage> {
        let missing = BadMessage::Missing { what: WHAT, field: "its build" };
        let build = Build::check(description.build.ok_or(missing)?)?;
        limit(WHAT, "devices", description.devices.len(), MOST_DEVICES)?;
        Ok(Self {
            name: check_name(&description.name)?,
            instance: check_text(WHAT, description.instance)?,
            build,
            devices: description.devices.into_iter().map(DeviceFacts::check).collect::<Result<_, _>>()?,
            memory_total: Bytes(description.memory_total),
            memory_available: Bytes(description.memory_available),
            addresses: check_addresses(WHAT, &description.addresses)?,
            emulated: description.emulated,
        })
    }
}

impl DeviceFacts {
    fn check(device: v1::DeviceDescription) -> Result<Self, BadMessage> {
        let kind = match device.kind() {
            v1::DeviceKind::Cpu => DeviceKind::Cpu,
            v1::DeviceKind::Gpu => DeviceKind::Gpu,
            v1::DeviceKind::IntegratedGpu => DeviceKind::IntegratedGpu,
            v1::DeviceKind::Unspecified => {
                return Err(BadMessage::Other {
                    what: WHAT,
                    reason: format!("device kind {} is unknown", device.kind),
                });
            }
        };
        Ok(Self {
            name: check_text(WHAT, device.name)?,
            description: check_text(WHAT, device.description)?,
            kind,
            memory_total: Bytes(device.memory_total),
            memory_free: Bytes(device.memory_free),
        })
    }
}

impl From<NodeFacts> for v1::NodeDescription {
    fn from(facts: NodeFacts) -> Self {
        Self {
            name: facts.name.0,
            instance: facts.instance,
            build: Some(facts.build.into()),
            devices: facts.devices.into_iter().map(Into::into).collect(),
            memory_total: facts.memory_total.0,
            memory_available: facts.memory_available.0,
            addresses: facts.addresses.iter().map(ToString::to_string).collect(),
            emulated: facts.emulated,
        }
    }
}

impl From<DeviceFacts> for v1::DeviceDescription {
    fn from(device: DeviceFacts) -> Self {
        let kind = match device.kind {
            DeviceKind::Cpu => v1::DeviceKind::Cpu,
            DeviceKind::Gpu => v1::DeviceKind::Gpu,
            DeviceKind::IntegratedGpu => v1::DeviceKind::IntegratedGpu,
        };
        Self {
            name: device.name,
            description: device.description,
            kind: kind.into(),
            memory_total: device.memory_total.0,
            memory_free: device.memory_free.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn facts() -> NodeFacts {
        NodeFacts {
            name: NodeId("desk".into()),
            instance: "7".into(),
            build: Build { version: "0.1.0".into(), llama_cpp: "b1".into(), features: vec!["cuda".into()] },
            devices: vec![DeviceFacts {
                name: "CUDA0".into(),
                description: "a GPU".into(),
                kind: DeviceKind::Gpu,
                memory_total: Bytes(2),
                memory_free: Bytes(1),
            }],
            memory_total: Bytes(4),
            memory_available: Bytes(3),
            addresses: vec![Address::parse("desk:1").unwrap(), Address::parse("10.0.0.1:1").unwrap()],
            emulated: true,
        }
    }

    #[test]
    fn a_description_survives_the_wire() {
        assert_eq!(NodeFacts::check(facts().into()).unwrap(), facts());
    }

    #[test]
    fn the_address_at_which_a_node_was_reached_comes_first_and_once() {
        let reached = Address::parse("10.0.0.1:1").unwrap();
        let peer = facts().peer(&reached);
        assert_eq!(peer.addresses, [reached, Address::parse("desk:1").unwrap()]);
    }

    // Field case 16.
    #[test]
    fn another_build_is_refused_with_both_versions() {
        let ours = facts().build;
        let theirs = Build { version: "0.2.0".into(), ..ours.clone() };
        let error = ours.check_same(&theirs).unwrap_err().to_string();
        assert!(error.contains("0.2.0") && error.contains("0.1.0"), "{error}");
        let features = Build { features: vec![], ..ours.clone() };
        assert!(ours.check_same(&features).is_ok(), "hosts have different backends");
    }

    #[test]
    fn a_description_that_makes_no_sense_is_refused() {
        let broken = |change: fn(&mut v1::NodeDescription)| {
            let mut description = facts().into();
            change(&mut description);
            NodeFacts::check(description).unwrap_err().to_string()
        };
        assert!(broken(|d| d.build = None).contains("lacks its build"));
        assert!(broken(|d| d.devices[0].kind = 9).contains("device kind 9"));
        assert!(broken(|d| d.devices = vec![d.devices[0].clone(); 65]).contains("65 devices"));
        assert!(broken(|d| d.instance = "\u{1b}[2J".into()).contains("control characters"));
        assert!(broken(|d| d.addresses.push("nowhere".into())).contains("nowhere"));
    }

    proptest! {
        #[test]
        fn garbled_descriptions_never_panic(
            garble in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = v1::NodeDescription::from(facts()).encode_to_vec();
            for (at, byte) in garble {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(Ok(facts)) = v1::NodeDescription::decode(&bytes[..]).map(NodeFacts::check) {
                prop_assert!(facts.addresses.len() <= 64 && facts.devices.len() <= MOST_DEVICES);
            }
        }
    }
}
