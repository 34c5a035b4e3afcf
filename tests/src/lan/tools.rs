//! Runs the system's tools (`ip`, `bridge`, `tc`, `nft`) with a list of commands on standard input.
//!
//! It must not know what the commands are for.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Runs a batch of `ip` commands in the calling thread's network namespace.
pub(super) fn ip(commands: &str) -> Result<()> {
    run(Command::new("ip").args(["-batch", "-"]), commands)
}

/// Runs a batch of `bridge` commands.
pub(super) fn bridge(commands: &str) -> Result<()> {
    run(Command::new("bridge").args(["-batch", "-"]), commands)
}

/// Runs a batch of `tc` commands.
pub(super) fn tc(commands: &str) -> Result<()> {
    run(Command::new("tc").args(["-batch", "-"]), commands)
}

/// Loads nftables statements, all or none of them.
pub(super) fn nft(statements: &str) -> Result<()> {
    run(Command::new("nft").args(["-f", "-"]), statements)
}

/// Whether a tool is in the search path.
pub(super) fn is_installed(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(tool).is_file())
}

fn run(command: &mut Command, input: &str) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.with_context(|| format!("starting {name}"))?;
    let Some(mut stdin) = child.stdin.take() else { bail!("{name} has no standard input") };
    // A tool that refuses a line early closes its input; what it says on standard error is then the better message.
    let written = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output()?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} refused: {}\nin:\n{}", complaint.trim(), input.trim());
    written.with_context(|| format!("writing to {name}"))
}
