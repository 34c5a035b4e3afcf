//! What a node that stands for a device says of itself: the device's memory in place of the host's.

use cluster::Bytes;
use protocol::emulation::Emulation;
use protocol::node::{DeviceFacts, DeviceKind};
use protocol::plan_files::MemoryEntry;

/// The device.
pub(super) fn device(emulation: &Emulation) -> DeviceFacts {
    let (kind, memory) = match emulation.memory {
        MemoryEntry::Discrete { vram_bytes: 0, ram_bytes } => (DeviceKind::Cpu, ram_bytes),
        MemoryEntry::Discrete { vram_bytes, .. } => (DeviceKind::Gpu, vram_bytes),
        MemoryEntry::Unified { total_bytes } => (DeviceKind::IntegratedGpu, total_bytes),
    };
    DeviceFacts {
        name: emulation.profile.device.rsplit('/').next().unwrap_or_default().to_owned(),
        description: format!("emulated {}", emulation.profile.device),
        kind,
        memory_total: Bytes(memory),
        memory_free: Bytes(memory),
    }
}

/// Memory of the host that the device would be in.
pub(super) fn host_memory(emulation: &Emulation) -> Bytes {
    Bytes(match emulation.memory {
        MemoryEntry::Discrete { ram_bytes, .. } => ram_bytes,
        MemoryEntry::Unified { total_bytes } => total_bytes,
    })
}
