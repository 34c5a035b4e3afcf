//! `shoal bench memory`: whether stages hold what they are estimated to hold. Stages run in processes of their own, as they
//! serve, and a prompt that fills a slot passes through them, so that all buffers have been in use.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use cluster::{Bytes, MemoryCosts, ReplicaState, RequestId, StageMemory, StageReport};
use comfy_table::{Table, presets};
use gguf::cut::CutOptions;
use node::agent::{Agent, Outlook, ReplicaConfig, WorkerSettings};
use node::{Layout, MemoryCheck, ReplicaPlan, ReplicaRequest, TurnsFile, default_threads, resident_memory};
use profiler::memory_costs;
use protocol::rows::RowEncoding;
use protocol::sampling::{Generation, Sampling};
use protocol::tls::{ClusterCa, TlsIdentity, connect};
use protocol::v1::engine_client::EngineClient;
use protocol::v1::generate_event::Event;
use serde::Serialize;
use tokio::sync::watch;

use super::parts::{Parts, Terms};
use crate::cli::Globals;
use crate::commands::{model, stage_worker};
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::ProgressView;

/// A prompt of a few thousand tokens takes seconds, on a busy host a minute.
const PROMPT_DEADLINE: Duration = Duration::from_secs(300);

/// Arguments of `shoal bench memory`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench memory -m SmolLM2
  shoal bench memory -m SmolLM2 --stages 2 --ubatch 512 --ctx 4096 --json

The estimate is the one that `shoal serve` and the planner make, with the costs that `shoal profile` measures.")]
pub(crate) struct MemoryArgs {
    #[command(flatten)]
    model: model::ModelArg,
    /// Numbers of stages.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 3], value_parser = clap::value_parser!(u32).range(1..))]
    stages: Vec<u32>,
    /// Rows computed at once.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [128, 512, 2048], value_parser = clap::value_parser!(u32).range(1..=65536))]
    ubatch: Vec<u32>,
    /// Slots.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    slots: u32,
    /// Tokens per slot.
    #[arg(long, value_name = "N", default_value_t = 2304, value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    ctx: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    model: String,
    slots: u32,
    n_ctx: u32,
    worst_error: f64,
    stages: Vec<Compared>,
}

/// One stage of one replica.
#[derive(Serialize)]
struct Compared {
    stages: u32,
    n_ubatch: u32,
    layers: String,
    estimated: StageMemory,
    estimated_bytes: u64,
    resident_bytes: u64,
    /// `|estimated / resident − 1|`.
    error: f64,
}

/// Measures and prints.
pub(crate) fn run(args: &MemoryArgs, globals: &Globals) -> Result<()> {
    let interrupt = Interrupt::listen()?;
    let terms = Terms { threads: default_threads(1), n_ctx: args.ctx, budget: None };
    // As a profile measures them.
    let parts = Parts::cut(&args.model, &terms, globals, &interrupt)?;
    let costs = memory_costs(&parts.request())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.context("starting the async runtime")?;
    let mut view = ProgressView::new();
    let (mut compared, mut done) = (Vec::new(), 0);
    for &stages in &args.stages {
        for &n_ubatch in &args.ubatch {
            model::go_on(&interrupt)?;
            view.show_share("replicas", done, (args.stages.len() * args.ubatch.len()) as u64);
            let case = Case { args, globals, costs, stages, n_ubatch };
            compared.extend(runtime.block_on(case.compare())?);
            done += 1;
        }
    }
    view.finish();
    let worst_error = compared.iter().map(|stage: &Compared| stage.error).fold(0.0, f64::max);
    let report = Report {
        model: parts.file.name(),
        slots: args.slots,
        n_ctx: args.ctx,
        worst_error,
        stages: compared,
    };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&table(&report))?
    }
    Ok(())
}

/// One replica.
struct Case<'a> {
    args: &'a MemoryArgs,
    globals: &'a Globals,
    costs: MemoryCosts,
    stages: u32,
    n_ubatch: u32,
}

impl Case<'_> {
    async fn compare(&self) -> Result<Vec<Compared>> {
        let folders = model::folders(self.globals)?;
        let plan = ReplicaPlan::new(self.args.model.open(&folders)?, &self.request())?;
        let prepared = plan.prepare(&folders, &mut |_| ControlFlow::Continue(()))?;
        let estimates: Vec<StageMemory> = prepared.stages.iter().map(|stage| stage.predicted).collect();
        let ca = ClusterCa::new().context("making the cluster's certificate authority")?;
        let settings = WorkerSettings {
            threads: None,
            micro_batches: 1,
            queue_limit: 0,
            encoding: RowEncoding::F32,
            keep: Duration::ZERO,
        };
        let config = ReplicaConfig {
            command: stage_worker::command(self.globals)?,
            replica: prepared,
            settings,
            emulations: Vec::new(),
            profiles: Vec::new(),
            beside: 0,
            turns: Arc::new(TurnsFile::new()?),
        };
        let loading = ReplicaState::Loading { progress: 0.0, waiting_for: String::new() };
        let outlook = Outlook::new(watch::Sender::new(loading));
        let agent = Agent::start(config, &ca, outlook)?;
        let measured = self.measure(&agent, &ca.issue("bench")?).await;
        agent.shutdown().await;
        let stages = measured?.into_iter().zip(estimates);
        Ok(stages.map(|(stage, estimated)| self.compared(&stage, estimated)).collect())
    }

    fn request(&self) -> ReplicaRequest {
        ReplicaRequest {
            layout: Layout::Stages(self.stages),
            gpu_layers: Vec::new(),
            slots: self.args.slots,
            n_ctx: Some(self.args.ctx),
            prefill_chunk: self.n_ubatch,
            options: CutOptions::default(),
            replicas_here: 1,
            memory_check: MemoryCheck::Enforce,
            memory_costs: Some(self.costs),
        }
    }

    /// Fills a slot, and looks at what the stages hold then.
    async fn measure(&self, agent: &Agent, identity: &TlsIdentity) -> Result<Vec<StageReport>> {
        let mut reports = agent.ready().await?;
        let ReplicaState::Ready { master, .. } = *agent.state().borrow() else {
            bail!("the replica is no longer ready")
        };
        let mut client = EngineClient::new(connect(master, identity).await?);
        let generation = Generation {
            request: RequestId("bench".to_owned()),
            prompt: vec![1; self.args.ctx.saturating_sub(2).max(1) as usize],
            replayed: 0,
            max_tokens: 1,
            sampling: Sampling::greedy(),
            top_logprobs: None,
            ignore_eos: true,
            hand_off: protocol::hand_off::HandOff::None,
        };
        let mut events = client.generate(protocol::v1::GenerateRequest::from(generation)).await?.into_inner();
        let fill = async {
            while let Some(event) = events.message().await? {
                if let Some(Event::Failed(failed)) = event.event {
                    bail!(failed.message);
                }
            }
            Ok(())
        };
        tokio::time::timeout(PROMPT_DEADLINE, fill).await.context("the prompt took too long")??;
        for report in &mut reports {
            report.resident = resident_memory(report.pid)
                .ok_or_else(|| anyhow!("the process of {} is gone", report.stage))?;
        }
        Ok(reports)
    }

    fn compared(&self, stage: &StageReport, estimated: StageMemory) -> Compared {
        let total = estimated.total();
        Compared {
            stages: self.stages,
            n_ubatch: self.n_ubatch,
            layers: stage.layers.to_string(),
            estimated,
            estimated_bytes: total.0,
            resident_bytes: stage.resident.0,
            error: (total.0 as f64 / stage.resident.0.max(1) as f64 - 1.0).abs(),
        }
    }
}

fn table(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    let sizes = ["weights", "cache", "compute", "runtime", "estimated", "held", "error"];
    table.set_header(["stages", "ubatch", "layers"].into_iter().chain(sizes));
    for stage in &report.stages {
        let StageMemory { weights, cache, compute, runtime } = stage.estimated;
        let (estimated, held) = (Bytes(stage.estimated_bytes), Bytes(stage.resident_bytes));
        let mut row = vec![stage.stages.to_string(), stage.n_ubatch.to_string(), stage.layers.clone()];
        row.extend([weights, cache, compute, runtime, estimated, held].map(|bytes| bytes.to_string()));
        row.push(format!("{:.1} %", stage.error * 100.0));
        table.add_row(row);
    }
    let worst = report.worst_error * 100.0;
    format!(
        "{}, {} slots of {} tokens\n{table}\nworst error {worst:.1} %",
        report.model, report.slots, report.n_ctx
    )
}
