//! Processes: the binary under test, its children, and signals to them.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// The `shoal` binary that was built with the running test.
pub fn shoal_binary() -> Result<PathBuf> {
    let test = std::env::current_exe().context("finding the running test")?;
    let profile = test.ancestors().nth(2).context("the test runs outside a target folder")?;
    let binary = profile.join("shoal");
    ensure!(binary.is_file(), "{} is missing: run `cargo build --release -p shoal` first", binary.display());
    Ok(binary)
}

/// The direct children of a process, oldest first.
pub fn children_of(pid: u32) -> Vec<u32> {
    let output = Command::new("pgrep").args(["-P", &pid.to_string()]).output();
    let Ok(output) = output else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    let mut pids: Vec<u32> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
    pids.sort_unstable();
    pids
}

/// The TCP ports at which processes listen.
pub fn listening_ports(pids: &[u32]) -> Result<Vec<u16>> {
    let output = Command::new("ss").args(["-tlnpH"]).output().context("listing ports with ss")?;
    let text = String::from_utf8(output.stdout)?;
    let of_ours = |line: &&str| pids.iter().any(|pid| line.contains(&format!("pid={pid},")));
    let port = |line: &str| line.split_whitespace().nth(3)?.rsplit(':').next()?.parse().ok();
    Ok(text.lines().filter(of_ours).filter_map(port).collect())
}

/// Sends a signal by its name without `SIG`.
pub fn signal(pid: u32, name: &str) -> Result<()> {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status()?;
    ensure!(status.success(), "kill -{name} {pid} failed");
    Ok(())
}

/// Whether a process exists and is not a zombie.
pub fn is_alive(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| state != 'Z')
}

/// The letter that ps(1) shows for a process's state, such as `T` for one that is stopped; none if there is no such
/// process.
pub fn state_of(pid: u32) -> Option<char> {
    let output = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().chars().next()
}

/// Polls `condition` until it gives something, or fails after `deadline`, naming `what` was waited for.
pub async fn eventually<T>(
    what: &str,
    deadline: Duration,
    mut condition: impl AsyncFnMut() -> Option<T>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = condition().await {
            return Ok(value);
        }
        if start.elapsed() > deadline {
            bail!("{what}: not within {deadline:?}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
