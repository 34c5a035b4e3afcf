//! What the operating system says this process holds.

use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

/// Resident bytes of this process; 0 where the system does not tell.
pub(crate) fn resident() -> u64 {
    let Ok(pid) = sysinfo::get_current_pid() else {
        return 0;
    };
    let mut system = System::new();
    let only_memory = ProcessRefreshKind::nothing().with_memory().without_tasks();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, only_memory);
    system.process(pid).map_or(0, sysinfo::Process::memory)
}

#[cfg(test)]
mod tests {
    #[test]
    fn touched_memory_becomes_resident() {
        let before = super::resident();
        let touched = std::hint::black_box(vec![1_u8; 64 << 20]);
        let grown = super::resident() - before;
        assert!(grown >= 63 << 20, "grew by {grown} after touching {} bytes", touched.len());
    }
}
