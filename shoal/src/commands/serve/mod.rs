//! `shoal serve`: replicas of stage processes on this host or on nodes, and the API over them.

mod adapt;
mod cluster;
mod deployment;
mod fixed;
mod hosts;
mod links;
mod profiles;
mod replicas;
mod report;
mod session;
mod slices;

use std::collections::HashSet;
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use ::cluster::Workload;
use anyhow::{Context, Result};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use gguf::cut::{CutOptions, Uncertified};
use node::agent::WorkerSettings;
use node::{Layout, MemoryCheck, ReplicaRequest};
use orchestrator::Limits;
use orchestrator::router::PolicyName;
use protocol::node::Address;
use protocol::plan_files::WorkloadFile;
use protocol::rows::RowEncoding;

use super::nodes::node_address;
use super::planning::read_file;
use crate::cli::Globals;
pub(crate) use replicas::ReplicaArgs;
use replicas::{CutList, NodeList, RoleArg, cut_list, node_list};

/// Arguments of `shoal serve`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  shoal serve -m model.gguf                      one process, API on http://127.0.0.1:8080
  shoal serve -m SmolLM2 --stages 3              three processes that share the layers
  shoal serve -m SmolLM2 --cuts 8,20 --slots 8   blocks 0-7, 8-19 and the rest; 8 requests at once
  shoal serve -m SmolLM2 --gpu-layers 30         one process, with 30 blocks on the GPU
  shoal serve -m SmolLM2 --replicas 2            two replicas on this host: if one fails, the other goes on
  shoal serve -m SmolLM2 --replicas 2 --roles prefill,decode --cuts 10,20 --cuts 15
                                                 one computes prompts on three stages, the other answers on two
  shoal serve -m SmolLM2 --json                  a JSON object per event: starting, ready, down, links
  shoal serve -m SmolLM2 --identity me.json --node desk --node mac    one stage on each of two nodes
  shoal serve -m SmolLM2 --identity me.json --replica desk,mac --replica lab
                                                 two replicas: one on desk and mac, one on lab alone
  shoal serve -m SmolLM2 --cluster-listen 0.0.0.0        nodes can join: shoal token create
  shoal serve -m SmolLM2 --cluster --stages 2            one stage on each of two nodes that joined
  shoal serve -m SmolLM2 --cluster --plan plan.json      the replicas of a plan, on nodes that joined
  shoal serve -m SmolLM2 --cluster --plan plan.json --profiles profiles.json --adapt plan
                                                 and another plan when something else is asked for and it pays

Ctrl-C stops everything within seconds; pressed twice, at once.")]
pub(crate) struct ServeArgs {
    /// A .gguf file, or the start of the name of one in the models folder.
    #[arg(short, long, env = "SHOAL_MODEL", value_name = "MODEL")]
    model: String,
    /// Name under which the API lists the model [default: the file's name without .gguf].
    #[arg(long, env = "SHOAL_MODEL_NAME", value_name = "NAME")]
    model_name: Option<String>,
    /// File with a chat template (Jinja) to use in place of the model's own.
    #[arg(long, env = "SHOAL_CHAT_TEMPLATE_FILE", value_name = "FILE")]
    chat_template_file: Option<PathBuf>,
    /// Stages, each a process with a part of the layers, split evenly by bytes.
    #[arg(long, env = "SHOAL_STAGES", value_name = "N", default_value_t = 1, conflicts_with = "cuts")]
    stages: u32,
    /// First blocks of the second and later stages, instead of an even split; once, or once for each replica.
    #[arg(long, env = "SHOAL_CUTS", value_name = "BLOCKS", value_delimiter = ';', value_parser = cut_list)]
    cuts: Vec<CutList>,
    /// Address of a node to run a stage on; repeat it for each stage. One that has no copy of the model gets its part.
    #[arg(long = "node", env = "SHOAL_NODES", value_name = "ADDRESS", value_delimiter = ',',
          value_parser = node_address, requires = "identity", conflicts_with = "stages", group = "on_nodes")]
    nodes: Vec<Address>,
    /// Nodes of a replica, one for each of its stages, separated by commas; repeat it for each replica.
    #[arg(long = "replica", env = "SHOAL_REPLICA", value_name = "ADDRESS,...", value_delimiter = ';',
          value_parser = node_list, requires = "identity", conflicts_with = "stages", group = "on_nodes")]
    replica: Vec<NodeList>,
    /// Replicas on this host, all alike: each holds the whole model, and serves requests of its own.
    #[arg(long, env = "SHOAL_REPLICAS", value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=64), conflicts_with = "on_nodes")]
    replicas: u32,
    /// What each replica is used for, in their order: prefill, decode or mixed [default: mixed, which is both].
    ///
    /// A prefill replica computes prompts and first tokens and hands them over; a decode replica goes on from there. While no
    /// replica of one of the two serves, those of the other do both. Roles are changed without a restart by
    /// POST /admin/v1/replicas/N/role with {"role": "decode"}, where nodes can join (--cluster-listen).
    #[arg(long, env = "SHOAL_ROLES", value_name = "ROLE,...", value_delimiter = ',', value_enum)]
    roles: Vec<RoleArg>,
    /// File with this member's identity, from `shoal identity issue`, to direct nodes.
    #[arg(long, env = "SHOAL_IDENTITY", value_name = "FILE")]
    identity: Option<PathBuf>,
    /// What the links between the nodes can do, as `shoal links -o` writes it [default: the nodes measure at the start].
    ///
    /// Either way they are measured again when answers take another time between the stages than the links explain.
    #[arg(long, env = "SHOAL_LINKS", value_name = "FILE", requires = "on_nodes")]
    links: Option<PathBuf>,
    /// Requests that a replica generates at once; each takes memory for a context of its own.
    #[arg(long, env = "SHOAL_SLOTS", value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    slots: u32,
    /// Tokens per slot, prompt and answer together [default: 4096, or what the model was trained for if less].
    #[arg(long, env = "SHOAL_CTX", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    ctx: Option<u32>,
    /// Address of the API. The default is this host alone, because the API asks for no key.
    #[arg(long, env = "SHOAL_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    listen: String,
    /// CPU threads of each stage [default: each host's physical cores, which its stages use in turn].
    #[arg(long, env = "SHOAL_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Prompt tokens computed at once: more is faster, but running answers wait for so many.
    #[arg(long, env = "SHOAL_PREFILL_CHUNK", value_name = "TOKENS", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    prefill_chunk: u32,
    /// Batches of answers in the pipeline at once [default: one for each host, or with --threads for each stage].
    #[arg(long, env = "SHOAL_MICRO_BATCHES", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    micro_batches: Option<u32>,
    /// Requests that may wait for a slot, of all replicas together; more are refused with 503.
    ///
    /// Requests that a prefill replica has computed wait in a second line for a decode replica. They keep its slots meanwhile, so
    /// there are no more of them than that.
    #[arg(long, env = "SHOAL_QUEUE", value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(..=65_536))]
    queue: u32,
    /// How long one of them may, in either line.
    #[arg(long, env = "SHOAL_QUEUE_TIMEOUT", value_name = "SECONDS", default_value_t = 600,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    queue_timeout: u64,
    /// How long an answer may pause for a replica to be there again after its own was lost and no other was; 0 ends it at once.
    #[arg(long, env = "SHOAL_REPLAY_TIMEOUT", value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(..=86_400))]
    replay_timeout: u64,
    /// Which replica gets a request: the one with the least predicted work (jsq), or by another rule.
    #[arg(long, env = "SHOAL_ROUTER", value_name = "POLICY", default_value_t = PolicyName::Jsq,
          value_parser = policy_parser())]
    router: PolicyName,
    /// How hidden rows travel between stages: f16 halves the traffic and changes the results slightly.
    #[arg(long, env = "SHOAL_ENCODING", value_enum, default_value_t = EncodingArg::F32)]
    encoding: EncodingArg,
    /// Blocks on a GPU, for each stage.
    #[arg(long, env = "SHOAL_GPU_LAYERS", value_name = "N,N,...", value_delimiter = ',')]
    gpu_layers: Vec<u32>,
    /// Profiles of this host's devices, as `shoal profile` writes them: /metrics then shows predicted against observed times.
    #[arg(long, env = "SHOAL_PROFILES", value_name = "FILE")]
    profiles: Option<PathBuf>,
    /// Cut architectures for which no test shows that slices compute what the whole model does.
    #[arg(long, env = "SHOAL_ALLOW_UNCERTIFIED")]
    allow_uncertified: bool,
    /// Start even if the model seems not to fit. If it does not, the system swaps, or ends a stage.
    #[arg(long, env = "SHOAL_IGNORE_MEMORY")]
    ignore_memory: bool,
    /// Print an event per line as JSON on stdout instead of words on stderr.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: cluster::ClusterArgs,
    #[command(flatten)]
    adapt: adapt::AdaptArgs,
    #[command(flatten)]
    slices: slices::SliceArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum EncodingArg {
    /// Exact.
    F32,
    /// Half the bytes.
    F16,
}

impl From<EncodingArg> for RowEncoding {
    fn from(encoding: EncodingArg) -> Self {
        match encoding {
            EncodingArg::F32 => Self::F32,
            EncodingArg::F16 => Self::F16,
        }
    }
}

fn policy_parser() -> impl TypedValueParser<Value = PolicyName> {
    PossibleValuesParser::new(PolicyName::ALL.map(PolicyName::name))
        .try_map(|name| name.parse::<PolicyName>())
}

impl ServeArgs {
    /// Whether this host runs no stage.
    fn is_on_nodes(&self) -> bool {
        !self.nodes.is_empty() || !self.replica.is_empty() || self.cluster.on_its_nodes()
    }

    fn memory_check(&self) -> MemoryCheck {
        match (self.ignore_memory, self.is_on_nodes()) {
            (true, _) => MemoryCheck::Warn,
            (false, false) => MemoryCheck::Enforce,
            (false, true) => MemoryCheck::Elsewhere,
        }
    }

    /// What a replica is asked to be.
    fn request(&self, replica: usize) -> ReplicaRequest {
        let nodes = self.replica_nodes().get(replica).map_or(0, |nodes| nodes.len());
        let layout = match (self.cuts_of(replica), nodes) {
            (Some(cuts), _) => Layout::Cuts(cuts.to_vec()),
            (None, 0) => Layout::Stages(self.stages),
            (None, nodes) => Layout::Stages(nodes as u32),
        };
        let uncertified = if self.allow_uncertified { Uncertified::Allow } else { Uncertified::Refuse };
        ReplicaRequest {
            layout,
            gpu_layers: self.gpu_layers.clone(),
            slots: self.slots,
            n_ctx: self.ctx,
            prefill_chunk: self.prefill_chunk,
            options: CutOptions { uncertified },
            replicas_here: if self.is_on_nodes() { 1 } else { self.replicas },
            memory_check: self.memory_check(),
            memory_costs: None,
        }
    }

    /// Hosts of a replica whose nodes were named.
    fn hosts_of(&self, replica: usize) -> Option<u32> {
        let nodes = self.replica_nodes();
        let hosts: HashSet<&Address> = nodes.get(replica).into_iter().copied().flatten().collect();
        u32::try_from(hosts.len()).ok().filter(|&hosts| hosts > 0)
    }

    /// What was said to be asked for; slots hold so many tokens.
    fn planned_workload(&self, n_ctx: u32) -> Result<Option<Workload>> {
        let file = self.cluster.workload.as_deref().map(read_file::<WorkloadFile>).transpose()?;
        Ok(file.map(|file| Workload { slot_context: n_ctx, ..Workload::from(&file) }))
    }

    /// What adapting goes by.
    fn basis(&self, n_ctx: u32) -> Result<adapt::Basis> {
        let planned = self.planned_workload(n_ctx)?;
        Ok(adapt::Basis {
            args: self.adapt.clone(),
            like: planned.clone().unwrap_or_else(|| adapt::open_workload(n_ctx)),
            planned,
            prefill_chunk: self.prefill_chunk,
        })
    }

    /// How workers run of a replica of so many stages on so many hosts.
    fn settings(&self, stages: u32, hosts: u32, (slots, encoding): (u32, RowEncoding)) -> WorkerSettings {
        // By default stages of one host take turns.
        let at_once = if self.threads.is_some() { stages } else { hosts };
        WorkerSettings {
            threads: self.threads,
            micro_batches: self.micro_batches.unwrap_or(at_once),
            // Requests wait in the orchestrator. This is for those that get a slot there a moment before the engine learns that
            // the client who had it has left.
            queue_limit: slots,
            encoding,
            keep: Duration::ZERO,
        }
    }
}

/// What the orchestrator bounds, over so many slots.
fn limits(args: &ServeArgs, slots: usize) -> Limits {
    let defaults = Limits::default();
    Limits {
        // The queue's limit is the user's to set; this one must not be met before it.
        max_open_requests: defaults.max_open_requests.max(slots + args.queue as usize),
        queue: args.queue as usize,
        queue_timeout: Duration::from_secs(args.queue_timeout),
        replay_timeout: Duration::from_secs(args.replay_timeout),
        ..defaults
    }
}

/// Serves until Ctrl-C.
pub(crate) fn run(args: ServeArgs, globals: &Globals) -> Result<()> {
    args.check()?;
    // HTTP, gRPC to local workers, supervision: little work that must never wait for each other.
    let threads = std::thread::available_parallelism().map_or(2, NonZero::get).clamp(2, 4);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    runtime.context("starting the async runtime")?.block_on(session::serve(&args, globals))
}
