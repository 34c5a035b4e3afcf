//! `shoal node`: this host as a part of a cluster.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use cluster::{Bytes, NodeId};
use node::{NodeConfig, RunningNode};
use protocol::emulation::{DeviceFile, Emulation};
use protocol::node::{Address, DeviceFacts, DeviceKind, check_name};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::model;
use super::nodes::{IdentityArg, NODE_PORT, build, node_address};
use crate::cli::Globals;
use crate::interrupt::{exit_at_second_request, stop_asked};
use crate::output;
use crate::programs::this_program;

/// Arguments of `shoal node`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal node --identity desk.json                          on all addresses, port 8470
  shoal node --identity desk.json --bind 10.0.0.5:9000     on one
  shoal node --identity desk.json --advertise desk.lan     reached by others under this name
  shoal node --identity x.json --emulate device.json       takes the time that the profiled device would

Ctrl-C stops the node and all that it runs for others.")]
pub(crate) struct NodeArgs {
    #[command(flatten)]
    identity: IdentityArg,
    /// Address to listen at. Only members of the cluster get past the handshake.
    #[arg(long, env = "SHOAL_BIND", value_name = "ADDRESS", default_value = "0.0.0.0:8470")]
    bind: String,
    /// Address at which others reach this node; may be repeated [default: the host's own addresses].
    #[arg(long, env = "SHOAL_ADVERTISE", value_name = "ADDRESS", value_delimiter = ',', value_parser = node_address)]
    advertise: Vec<Address>,
    /// The node's name, unique in the cluster [default: the identity's].
    #[arg(long, env = "SHOAL_NODE_NAME", value_name = "NAME", value_parser = name)]
    name: Option<NodeId>,
    /// Stand for the device in this file instead of computing: a profile, the device's memory and the model's shape.
    #[arg(long, env = "SHOAL_EMULATE", value_name = "FILE")]
    emulate: Option<PathBuf>,
    /// Seconds that a second of the emulated device takes: 0.1 runs ten times as fast as the device would.
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "emulate")]
    time_scale: f64,
    /// Print an event per line as JSON on stdout instead of words on stderr.
    #[arg(long)]
    json: bool,
}

fn name(text: &str) -> Result<NodeId, String> {
    check_name(text).map_err(|error| error.to_string())
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    Listening { name: &'a str, port: u16, addresses: Vec<String> },
}

/// Serves until Ctrl-C.
pub(crate) fn run(args: NodeArgs, globals: &Globals) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.context("starting the async runtime")?.block_on(serve(args, globals))
}

async fn serve(args: NodeArgs, globals: &Globals) -> Result<()> {
    let mut identity = args.identity.read()?;
    identity.name = args.name.unwrap_or(identity.name);
    let bind = resolve(&args.bind).await?;
    let emulation = args.emulate.as_deref().map(|file| read_device(file, args.time_scale)).transpose()?;
    let devices = tokio::task::spawn_blocking(ask_for_devices).await.context("listing the devices")??;
    let node = RunningNode::bind(NodeConfig {
        identity,
        bind,
        advertise: args.advertise,
        build: build(),
        devices,
        workers: this_program(globals, "stage-worker")?,
        profile: this_program(globals, "profile")?,
        folders: model::folders(globals)?,
        emulation,
    });
    let node = node.await.context("starting the node")?;
    let facts = node.facts();
    let addresses: Vec<String> = facts.addresses.iter().map(ToString::to_string).collect();
    if args.json {
        let port = node.port();
        output::print_json_line(&Event::Listening { name: &facts.name.0, port, addresses })?;
    } else {
        output::note(&format!("node {} is reached at {}", facts.name, addresses.join(", ")))?;
    }
    let stop = CancellationToken::new();
    let asked = stop.clone();
    tokio::spawn(async move {
        stop_asked().await;
        asked.cancel();
        exit_at_second_request().await;
    });
    Ok(node.serve(stop).await?)
}

fn read_device(file: &Path, time_scale: f64) -> Result<Emulation> {
    let read = || format!("reading the device {}", file.display());
    let text = std::fs::read_to_string(file).with_context(read)?;
    DeviceFile::from_either(&text).and_then(|device| device.emulation(time_scale)).with_context(read)
}

async fn resolve(text: &str) -> Result<SocketAddr> {
    let text = if text.parse::<std::net::IpAddr>().is_ok() {
        format!("{text}:{NODE_PORT}")
    } else {
        text.to_owned()
    };
    let mut found = tokio::net::lookup_host(&text).await.map_err(|e| {
        anyhow!("--bind {text}: {e}; give a host and a port, such as 0.0.0.0:8470 or [::]:8470")
    })?;
    found.next().with_context(|| format!("--bind {text} is no address of any host"))
}

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
