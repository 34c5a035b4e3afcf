//! Names of what a Lan leaves in the system (namespaces, cgroups), and whether their owner still lives.
//!
//! It must not know what the names are given to.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// What every name begins with, so that leftovers are found.
const MARK: &str = "shoal-lan-";

/// Lans made by this process so far.
static SEQUENCE: AtomicU32 = AtomicU32::new(0);

/// A beginning that no other Lan has: `shoal-lan-PID-STARTED-NUMBER`. The time at which the owner was started is in
/// it because process ids are used again.
pub(super) fn unique_prefix() -> Result<String> {
    let pid = std::process::id();
    let started = start_time(pid).context("reading this process's own start time")?;
    Ok(format!("{MARK}{pid}-{started}-{}", SEQUENCE.fetch_add(1, Ordering::Relaxed)))
}

/// Whether a name was given by a process that is no more.
pub(super) fn is_left_over(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(MARK) else { return false };
    let mut parts = rest.split('-');
    let Some(pid) = parts.next().and_then(|part| part.parse().ok()) else { return false };
    let Some(started) = parts.next().and_then(|part| part.parse().ok()) else { return false };
    start_time(pid) != Some(started)
}

/// When a process was started, in clock ticks since boot: field 22 of `/proc/PID/stat`, see proc(5).
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in brackets, and may itself hold blanks and brackets.
    let (_, after_command) = stat.rsplit_once(')')?;
    after_command.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_left_over_once_its_owner_is_gone() {
        let own = unique_prefix().unwrap();
        assert!(!is_left_over(&own) && !is_left_over(&format!("{own}-host")));

        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let started = start_time(child.id()).unwrap();
        let name = format!("{MARK}{}-{started}-0-a", child.id());
        assert!(!is_left_over(&name));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_left_over(&name));
    }

    #[test]
    fn a_process_that_got_the_id_of_a_dead_owner_does_not_keep_its_leftovers() {
        let pid = std::process::id();
        let earlier = start_time(pid).unwrap() - 1;
        assert!(is_left_over(&format!("{MARK}{pid}-{earlier}-0")));
    }

    #[test]
    fn names_of_others_are_never_left_over() {
        for name in ["docker0", "shoal-lan-", "shoal-lan-x-1-0", "my-shoal-lan-1-1-0"] {
            assert!(!is_left_over(name), "{name}");
        }
    }
}
