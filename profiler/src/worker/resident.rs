//! What the operating system says this process holds, now and at most.

/// Bytes now, and the most ever. Where the system keeps no such record, the most is that of all looks so far.
#[derive(Debug, Default)]
pub(super) struct Resident {
    seen: u64,
}

impl Resident {
    /// Looks.
    pub(super) fn look(&mut self) -> (u64, u64) {
        let (now, peak) = recorded().unwrap_or_else(|| (asked(), 0));
        self.seen = self.seen.max(now).max(peak);
        (now, self.seen)
    }
}

/// Linux keeps both in `/proc/self/status`, in kibibytes.
fn recorded() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}

fn asked() -> u64 {
    node::resident_memory(std::process::id()).map_or(0, |bytes| bytes.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_stays_when_memory_is_given_back() {
        let mut resident = Resident::default();
        let (before, _) = resident.look();
        let touched = std::hint::black_box(vec![1_u8; 64 << 20]);
        let (during, _) = resident.look();
        assert!(during >= before + (60 << 20), "{before} {during} with {}", touched.len());
        drop(touched);
        let (_, peak) = resident.look();
        assert!(peak >= during);
    }
}
