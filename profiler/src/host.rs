//! What this host is: its name, its memory, its caches, its processors.

use cluster::Bytes;
use node::agent::WorkerCommand;
use protocol::plan_files::{HostEntry, ProcessorFactsEntry, ProcessorKindEntry};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use crate::session::{Session, SessionError, SessionSpec};
use crate::wire::{Command, DeviceFacts, FactsKind, Outcome, Processor, Setup};

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
    /// Looks at this host. Processors are listed by a process of their own: drivers can end the process that asks.
    pub(crate) fn look(command: &WorkerCommand) -> Result<Self, SessionError> {
        let setup =
            Setup { processor: Processor::Cpu, threads: 1, cold_bytes: 0, n_embd: 1, embedding: None };
        let spec = SessionSpec { setup, slices: Vec::new(), contexts: Vec::new() };
        let reply = Session::new(command, spec).ask(&Command::Devices)?;
        let Outcome::Devices(processors) = reply.outcome else {
            return Err(SessionError::Unable("the measuring process listed no processors".to_owned()));
        };
        let ram = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
        Ok(Self {
            name: System::host_name().unwrap_or_else(|| "localhost".to_owned()),
            ram: Bytes(System::new_with_specifics(ram).total_memory()),
            available: node::available_memory(),
            processors,
        })
    }

    pub(crate) fn entry(&self, reserve: Bytes) -> HostEntry {
        let facts = |device: &DeviceFacts| ProcessorFactsEntry {
            name: device.name.clone(),
            description: device.description.clone(),
            kind: match device.kind {
                FactsKind::Cpu => ProcessorKindEntry::Cpu,
                FactsKind::Gpu => ProcessorKindEntry::Gpu,
                FactsKind::UnifiedGpu => ProcessorKindEntry::UnifiedGpu,
            },
            memory_total_bytes: device.memory_total,
            memory_free_bytes: device.memory_free,
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
