//! What this host offers: memory and cores.

use std::num::NonZero;
use std::path::Path;

use cluster::Bytes;
use sysinfo::{MemoryRefreshKind, Pid, ProcessRefreshKind, ProcessesToUpdate, RefreshKind, System};

/// Memory that processes started now can use: what the operating system calls available, or less where this
/// process runs under a control group's limit (a container).
pub fn available_memory() -> Bytes {
    let ram = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let system = System::new_with_specifics(ram);
    let available = Bytes(system.available_memory());
    // Pages of files count against the limit until the kernel needs them, so only anonymous memory is taken off.
    let limit =
        system.cgroup_limits().map(|group| Bytes(group.total_memory).saturating_sub(Bytes(group.rss)));
    limit.map_or(available, |limit| limit.min(available))
}

/// Memory of the host, or what a control group leaves of it.
pub(crate) fn total_memory() -> Bytes {
    let ram = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let system = System::new_with_specifics(ram);
    let total = Bytes(system.total_memory());
    system.cgroup_limits().map_or(total, |group| Bytes(group.total_memory).min(total))
}

/// Of the disk that a folder is on, or will be: what is free, and all; none if that cannot be found out.
pub fn disk_space(folder: &Path) -> Option<(Bytes, Bytes)> {
    let there = folder.ancestors().find(|folder| folder.exists())?;
    let (free, all) = (fs4::available_space(there).ok()?, fs4::total_space(there).ok()?);
    Some((Bytes(free.min(all)), Bytes(all)))
}

/// What the host calls itself.
pub fn host_name() -> Option<String> {
    System::host_name()
}

/// Memory that a process of this host holds; none if there is no such process.
pub fn resident_memory(pid: u32) -> Option<Bytes> {
    let pid = Pid::from_u32(pid);
    let mut system = System::new();
    let only_memory = ProcessRefreshKind::nothing().with_memory().without_tasks();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, only_memory);
    system.process(pid).map(|process| Bytes(process.memory()))
}

/// Threads for each of `stages` stages that compute at once on this host: the physical cores, shared out.
///
/// llama.cpp's threads spin at a barrier after every operation of the graph. Two stages that each take all cores
/// therefore do not share them but stall each other; a second hardware thread of a core adds nothing either.
pub fn default_threads(stages: u32) -> u32 {
    let allowed = std::thread::available_parallelism().map_or(1, NonZero::get);
    let cores = System::physical_core_count().map_or(allowed, |cores| cores.min(allowed));
    (u32::try_from(cores).unwrap_or(u32::MAX) / stages.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_always_gets_a_thread() {
        assert!(default_threads(1) >= 1);
        assert_eq!(default_threads(100_000), 1);
    }

    #[test]
    fn a_process_holds_memory_and_one_that_is_not_there_none() {
        assert!(resident_memory(std::process::id()).unwrap() > Bytes::from_mib(1));
        assert_eq!(resident_memory(u32::MAX - 1), None);
    }

    #[test]
    fn some_memory_is_available() {
        assert!(available_memory() > Bytes::from_mib(1));
    }
}
