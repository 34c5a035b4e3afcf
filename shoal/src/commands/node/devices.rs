//! What llama.cpp can compute on, asked for by a process of its own.

use std::process::Command;

use anyhow::{Context, Result, bail};
use cluster::Bytes;
use protocol::node::{DeviceFacts, DeviceKind};
use serde::{Deserialize, Serialize};

use crate::output;

/// A device on its way from the process that asks llama.cpp.
#[derive(Serialize, Deserialize)]
struct DeviceLine {
    name: String,
    description: String,
    kind: KindLine,
    memory_total: u64,
    memory_free: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum KindLine {
    Cpu,
    Gpu,
    IntegratedGpu,
}

/// Prints what llama.cpp can compute on. In a process of its own, since a driver may end the process that asks.
pub(crate) fn list_devices() -> Result<()> {
    let line = |device: llama::Device| {
        let kind = match device.kind {
            llama::DeviceKind::Cpu => KindLine::Cpu,
            llama::DeviceKind::Gpu => KindLine::Gpu,
            llama::DeviceKind::IntegratedGpu => KindLine::IntegratedGpu,
            // A library that helps the CPU is not counted beside it.
            llama::DeviceKind::Other => return None,
        };
        let llama::Device { name, description, memory_total, memory_free, .. } = device;
        Some(DeviceLine { name, description, kind, memory_total, memory_free })
    };
    Ok(output::print_json_line(&llama::devices().into_iter().filter_map(line).collect::<Vec<_>>())?)
}

/// What llama.cpp can compute on, asked for by another process.
pub(crate) fn ask_for_devices() -> Result<Vec<DeviceFacts>> {
    let program = std::env::current_exe().context("finding this program, to list the devices")?;
    let listed = Command::new(program).arg("device-list").output().context("listing the devices")?;
    if !listed.status.success() {
        bail!("the process that lists the devices ended with {}", listed.status);
    }
    let lines: Vec<DeviceLine> = serde_json::from_slice(&listed.stdout).context("listing the devices")?;
    let facts = lines.into_iter().map(|DeviceLine { name, description, kind, memory_total, memory_free }| {
        let kind = match kind {
            KindLine::Cpu => DeviceKind::Cpu,
            KindLine::Gpu => DeviceKind::Gpu,
            KindLine::IntegratedGpu => DeviceKind::IntegratedGpu,
        };
        let (memory_total, memory_free) = (Bytes(memory_total), Bytes(memory_free));
        DeviceFacts { name, description, kind, memory_total, memory_free }
    });
    Ok(facts.collect())
}
