//! What this host is: its name, its memory, its caches, its processors.

use cluster::Bytes;
use protocol::node::{DeviceFacts, DeviceKind};
use protocol::plan_files::{HostEntry, ProcessorFactsEntry, ProcessorKindEntry};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

/// Where the system does not tell the size of its caches.
const USUAL_CACHE: Bytes = Bytes::from_mib(32);

/// A host.
#[derive(Debug, Clone)]
pub struct Host {
    /// Its name in the network.
    pub name: String,
    /// All its RAM.
    pub ram: Bytes,
    /// RAM that new processes can use, without swap.
    pub available: Bytes,
    /// Its processors, as llama.cpp finds them.
    pub processors: Vec<DeviceFacts>,
}

impl Host {
    /// This host, with the processors that llama.cpp finds there.
    pub fn here(processors: Vec<DeviceFacts>) -> Self {
        let ram = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
        Self {
            name: System::host_name().unwrap_or_else(|| "localhost".to_owned()),
            ram: Bytes(System::new_with_specifics(ram).total_memory()),
            available: node::available_memory(),
            processors,
        }
    }

    pub(crate) fn entry(&self, reserve: Bytes) -> HostEntry {
        let facts = |device: &DeviceFacts| ProcessorFactsEntry {
            name: device.name.clone(),
            description: device.description.clone(),
            kind: match device.kind {
                DeviceKind::Cpu => ProcessorKindEntry::Cpu,
                DeviceKind::Gpu => ProcessorKindEntry::Gpu,
                DeviceKind::IntegratedGpu => ProcessorKindEntry::UnifiedGpu,
            },
            memory_total_bytes: device.memory_total.0,
            memory_free_bytes: device.memory_free.0,
        };
        HostEntry {
            name: self.name.clone(),
            ram_total_bytes: self.ram.0,
            ram_available_bytes: self.available.0,
            reserve_bytes: reserve.0,
            processors: self.processors.iter().map(facts).collect(),
        }
    }
}

/// The size of the CPU's largest cache.
pub(crate) fn last_level_cache() -> Bytes {
    let caches = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").into_iter().flatten();
    let sizes = caches.filter_map(|cache| {
        let text = std::fs::read_to_string(cache.ok()?.path().join("size")).ok()?;
        let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
        Some(Bytes(kib * 1024))
    });
    sizes.max().unwrap_or(USUAL_CACHE)
}
