//! Nodes as programs see them: the JSON of the admin API and of `shoal node list --json`.

use protocol::membership::RunningStage;
use protocol::node::{Address, DeviceFacts, DeviceKind};
use serde::Serialize;

use crate::member::MemberState;
use crate::presence::{Present, Reached};
use crate::registry::Member;
use crate::timestamp::Timestamp;

/// A node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeView {
    id: String,
    name: String,
    state: MemberState,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    version: String,
    llama_cpp: String,
    features: Vec<String>,
    addresses: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reached: Option<String>,
    asked: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_seen: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate_expires: Option<Timestamp>,
    /// As it is there; missing while it is away.
    #[serde(skip_serializing_if = "Option::is_none")]
    present: Option<PresentView>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct PresentView {
    since: Timestamp,
    /// Missing until it is reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// Why it is reached nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    unreachable: Option<String>,
    memory_total_bytes: u64,
    memory_available_bytes: u64,
    emulated: bool,
    devices: Vec<DeviceView>,
    running: Vec<RunningView>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct DeviceView {
    name: String,
    description: String,
    kind: &'static str,
    memory_total_bytes: u64,
    memory_free_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct RunningView {
    model: String,
    stage: u32,
    n_stages: u32,
    first_block: u32,
    end_block: u32,
}

impl From<&Member> for NodeView {
    fn from(member: &Member) -> Self {
        let record = &member.record;
        Self {
            id: record.id.to_string(),
            name: record.name.0.clone(),
            state: record.state,
            code: record.code.clone(),
            version: record.build.version.clone(),
            llama_cpp: record.build.llama_cpp.clone(),
            features: record.build.features.clone(),
            addresses: record.addresses.iter().map(Address::to_string).collect(),
            reached: record.reached.as_ref().map(Address::to_string),
            asked: record.asked,
            last_seen: record.last_seen,
            certificate_expires: record.certificate_expires,
            present: member.present.as_ref().map(PresentView::from),
        }
    }
}

impl From<&Present> for PresentView {
    fn from(present: &Present) -> Self {
        let unreachable = match &present.reached {
            Reached::Nowhere(reason) => Some(reason.clone()),
            Reached::Trying | Reached::At(_) => None,
        };
        Self {
            since: present.since.into(),
            address: present.reached.address().map(Address::to_string),
            unreachable,
            memory_total_bytes: present.facts.memory_total.0,
            memory_available_bytes: present.heartbeat.memory_available.0,
            emulated: present.facts.emulated,
            devices: present.facts.devices.iter().map(DeviceView::from).collect(),
            running: present.heartbeat.running.iter().map(RunningView::from).collect(),
        }
    }
}

impl From<&DeviceFacts> for DeviceView {
    fn from(device: &DeviceFacts) -> Self {
        let kind = match device.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Gpu => "gpu",
            DeviceKind::IntegratedGpu => "integrated_gpu",
        };
        Self {
            name: device.name.clone(),
            description: device.description.clone(),
            kind,
            memory_total_bytes: device.memory_total.0,
            memory_free_bytes: device.memory_free.0,
        }
    }
}

impl From<&RunningStage> for RunningView {
    fn from(running: &RunningStage) -> Self {
        let RunningStage { model, stage, n_stages, layers } = running;
        Self {
            model: model.clone(),
            stage: *stage,
            n_stages: *n_stages,
            first_block: layers.start(),
            end_block: layers.end(),
        }
    }
}
