//! `shoal node`, as it runs: it becomes a member, listens, and attends until Ctrl-C.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use cluster::{Bytes, BytesPerSecond, NodeId};
use node::membership::{Attendance, AttendanceNews};
use node::{NodeConfig, RunningNode, SliceLimits};
use protocol::certify::LiveIdentity;
use protocol::emulation::{DeviceFile, Emulation};
use protocol::node::{Address, check_name};
use protocol::token::JoinToken;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::devices::ask_for_devices;
use super::membership::{Wanted, become_member};
use crate::cli::Globals;
use crate::commands::model;
use crate::commands::nodes::{NODE_PORT, build, node_address, read_identity};
use crate::interrupt::{exit_at_second_request, stop_asked};
use crate::output;
use crate::programs::this_program;
use crate::sizes::{parse_bytes, parse_rate};

pub(super) const EXAMPLES: &str = "\
Examples:
  shoal node --join shoal1-AbC...                          with a token from `shoal token create`
  shoal node                                               again after a restart; or without a token on a LAN: it asks,
                                                           and waits for `shoal node approve` on the orchestrator's host
  shoal node --bind 10.0.0.5:9000                          on one address instead of all, and at another port than 8470
  shoal node --advertise desk.lan                          reached by others under this name
  shoal node --identity desk.json                          in a cluster made by hand, with `shoal identity`
  shoal node --slice-cache 50GB --slice-rate 50MB/s        needs no copy of a model: it gets its part, within these limits
  shoal node --emulate device.json                         takes the time that the profiled device would
  shoal node list                                          on the orchestrator's host: who is there

Ctrl-C stops the node and all that it runs for others.";

/// Arguments of a node that runs.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// Token from `shoal token create`, needed once: the host stays a member over restarts.
    #[arg(
        long,
        env = "SHOAL_JOIN",
        value_name = "TOKEN",
        hide_env_values = true,
        conflicts_with = "identity"
    )]
    join: Option<JoinToken>,
    /// File with this member's identity, from `shoal identity issue`, in a cluster without an orchestrator.
    #[arg(long, env = "SHOAL_IDENTITY", value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Address to listen at. Only members of the cluster get past the handshake.
    #[arg(long, env = "SHOAL_BIND", value_name = "ADDRESS", default_value = "0.0.0.0:8470")]
    bind: String,
    /// Address at which others reach this node; may be repeated [default: the host's own addresses].
    #[arg(long, env = "SHOAL_ADVERTISE", value_name = "ADDRESS", value_delimiter = ',', value_parser = node_address)]
    advertise: Vec<Address>,
    /// The node's name, unique in the cluster [default: the identity's, or the host's].
    #[arg(long, env = "SHOAL_NODE_NAME", value_name = "NAME", value_parser = name)]
    name: Option<NodeId>,
    /// Disk space that slices of models may take, such as 50GB; those that are not used longest go first [default: what is
    /// free. When the disk is full, too, unused ones go].
    #[arg(long, env = "SHOAL_SLICE_CACHE", value_name = "BYTES", value_parser = parse_bytes)]
    slice_cache: Option<Bytes>,
    /// Bytes per second of slices that this node receives at most, and that it gives to others, such as 50MB/s [default: as
    /// fast as it goes].
    #[arg(long, env = "SHOAL_SLICE_RATE", value_name = "RATE", value_parser = parse_rate)]
    slice_rate: Option<BytesPerSecond>,
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

/// What programs are told.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    Listening { name: &'a str, port: u16, addresses: Vec<String> },
    Attends { orchestrator: String },
    Reached { address: &'a str },
    Unreachable { reason: &'a str },
    Away { reason: &'a str },
    CertificateRenewed,
}

/// Serves until Ctrl-C.
pub(super) fn run(args: RunArgs, globals: &Globals) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.context("starting the async runtime")?.block_on(serve(args, globals))
}

async fn serve(args: RunArgs, globals: &Globals) -> Result<()> {
    let stop = CancellationToken::new();
    let asked = stop.clone();
    tokio::spawn(async move {
        stop_asked().await;
        asked.cancel();
        exit_at_second_request().await;
    });
    let emulation = args.emulate.as_deref().map(|file| read_device(file, args.time_scale)).transpose()?;
    let bind = resolve(&args.bind).await?;
    let (identity, membership) = match &args.identity {
        Some(file) => {
            let mut identity = read_identity(file)?;
            identity.name = args.name.unwrap_or(identity.name);
            (identity, None)
        }
        None => {
            let wanted = Wanted { token: args.join.as_ref(), name: args.name, json: args.json };
            let member = tokio::select! {
                member = become_member(wanted, globals) => member?,
                () = stop.cancelled() => return Ok(()),
            };
            (member.1.identity.clone(), Some(member))
        }
    };
    let live = LiveIdentity::new(identity.tls);
    let devices = tokio::task::spawn_blocking(ask_for_devices).await.context("listing the devices")??;
    let node = RunningNode::bind(NodeConfig {
        name: identity.name,
        identity: live.clone(),
        bind,
        advertise: args.advertise,
        build: build(),
        devices,
        workers: this_program(globals, "stage-worker")?,
        profile: this_program(globals, "profile")?,
        folders: model::folders(globals)?,
        limits: SliceLimits { cache: args.slice_cache, rate: args.slice_rate },
        emulation,
    });
    let node = node.await.context("starting the node")?;
    listening(&node, args.json)?;
    let words = node.words();
    let ends = stop.clone();
    let serving = async {
        let served = node.serve(stop.clone()).await;
        ends.cancel();
        Ok(served?)
    };
    let attending = async {
        let Some((state, membership)) = membership else { return Ok(()) };
        let attendance = Attendance::new(state, membership, live, words);
        let attended = attendance.run(stop.clone(), &mut |news| tell(&news, args.json)).await;
        // Without a place in the cluster there is nothing to serve.
        if attended.is_err() {
            stop.cancel();
        }
        Ok(attended?)
    };
    let (served, attended): (Result<()>, Result<()>) = tokio::join!(serving, attending);
    attended.and(served)
}

fn listening(node: &RunningNode, json: bool) -> Result<()> {
    let facts = node.facts();
    let addresses: Vec<String> = facts.addresses.iter().map(ToString::to_string).collect();
    if json {
        let port = node.port();
        output::print_json_line(&Event::Listening { name: &facts.name.0, port, addresses })?;
    } else {
        output::note(&format!("node {} is reached at {}", facts.name, addresses.join(", ")))?;
    }
    Ok(())
}

fn tell(news: &AttendanceNews, json: bool) {
    let (event, words) = match news {
        AttendanceNews::Attends { orchestrator } => {
            let orchestrator = orchestrator.to_string();
            let words = format!("the orchestrator at {orchestrator} knows that this node is here");
            (Event::Attends { orchestrator }, words)
        }
        AttendanceNews::Reached(address) => {
            (Event::Reached { address }, format!("the orchestrator reaches this node at {address}"))
        }
        AttendanceNews::Unreachable(reason) => {
            let words = format!(
                "the orchestrator cannot reach this node, which is of no use then: {reason}; is port {NODE_PORT} \
                 open? --advertise tells another address"
            );
            (Event::Unreachable { reason }, words)
        }
        AttendanceNews::Away(reason) => {
            (Event::Away { reason }, format!("the orchestrator is away; it is looked for: {reason}"))
        }
        AttendanceNews::Renewed => {
            (Event::CertificateRenewed, "this node's certificate was renewed".to_owned())
        }
    };
    // News that cannot be written is not worth a failure.
    let _ = if json { output::print_json_line(&event) } else { output::note(&words) };
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
