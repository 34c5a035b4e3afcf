//! Whether a plan can be: every fault of one, by the place where it is. Pure.
//!
//! Whether it fits into memory, nodes say when they are asked for it, with numbers.

use cluster::{LayerRange, ModelShape, NodeId, Plan};
use protocol::node::{DeviceFacts, DeviceKind};
use protocol::plan_files::{EncodingEntry, PlanFile, ReplicaEntry, StageEntry};
use thiserror::Error;

use crate::chain::node_and_device;

/// As many as llama.cpp has sequences (`LLAMA_MAX_SEQ` in `src/llama-cparams.h`).
const MOST_SLOTS: u32 = 256;

/// More than any office has hosts for.
const MOST_REPLICAS: usize = 64;

/// What a plan is checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grounds<'a> {
    /// The model that is served.
    pub(crate) model: &'a ModelShape,
    /// What it is called, its hash included.
    pub(crate) names: &'a [String],
    /// The nodes that are there; none where a plan is made before they come.
    pub(crate) nodes: Option<&'a [KnownNode]>,
}

/// A node that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownNode {
    /// Its name.
    pub name: NodeId,
    /// What it can compute on.
    pub devices: Vec<DeviceFacts>,
}

/// What is wrong with a plan.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Fault {
    #[error("the plan is for the model {asked:?}, and {served} is served")]
    OtherModel { asked: String, served: String },
    #[error("the plan has no replica")]
    NoReplica,
    #[error("the plan has {found} replicas: at most {MOST_REPLICAS} can be run")]
    TooManyReplicas { found: usize },
    #[error("replica {replica}: {fault}")]
    Replica { replica: usize, fault: ReplicaFault },
    #[error("replica {replica}, stage {stage}: {fault}")]
    Stage { replica: usize, stage: usize, fault: StageFault },
}

/// What is wrong with a replica of it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum ReplicaFault {
    #[error("it has no stage")]
    NoStage,
    #[error("it has {found} slots: there must be 1 to {MOST_SLOTS}")]
    Slots { found: u32 },
    #[error(
        "its stages end at block {end}, and the model has {n_layer}: blocks {end}..{n_layer} are nowhere"
    )]
    EndsEarly { end: u32, n_layer: u32 },
    #[error("its stages send hidden rows in different encodings: one for all can be had")]
    Encodings,
}

/// What is wrong with a stage of it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum StageFault {
    #[error("blocks {start}..{end} are none")]
    Empty { start: u32, end: u32 },
    #[error(
        "it begins at block {start}, and the stage before ends at {before}: blocks {before}..{start} are nowhere"
    )]
    Gap { start: u32, before: u32 },
    #[error(
        "it begins at block {start}, and the stage before ends at {before}: blocks {start}..{before} are twice there"
    )]
    Overlap { start: u32, before: u32 },
    #[error("it ends at block {end}, and the model has {n_layer}")]
    Beyond { end: u32, n_layer: u32 },
    #[error("{0}")]
    Cut(String),
    #[error("{gpu_blocks} blocks on the GPU are more than it has, which is {blocks}")]
    GpuBlocks { gpu_blocks: u32, blocks: u32 },
    #[error("{gpu_blocks} of its blocks are to be on a GPU, and {device} is none")]
    NoGpu { gpu_blocks: u32, device: String },
    #[error("there is no node {node}: {}", there(known))]
    UnknownNode { node: String, known: Vec<String> },
    #[error("node {node} has no device {device}: it has {}", known.join(", "))]
    UnknownDevice { node: String, device: String, known: Vec<String> },
    #[error("hidden rows cannot be sent as q8_0: f32 and f16 can be had")]
    Encoding,
}

fn there(known: &[String]) -> String {
    if known.is_empty() { "none is there".to_owned() } else { format!("{} are there", known.join(", ")) }
}

/// The plan in the cluster's nouns, or all that is wrong with it.
pub(crate) fn check(file: &PlanFile, grounds: Grounds<'_>) -> Result<Plan, Vec<Fault>> {
    let mut faults = Vec::new();
    if let Some(asked) = &file.model
        && !grounds.names.iter().any(|name| name.eq_ignore_ascii_case(asked))
    {
        let served = grounds.names.first().cloned().unwrap_or_default();
        faults.push(Fault::OtherModel { asked: asked.clone(), served });
    }
    match file.replicas.len() {
        0 => faults.push(Fault::NoReplica),
        found if found > MOST_REPLICAS => faults.push(Fault::TooManyReplicas { found }),
        _ => {}
    }
    for (number, replica) in file.replicas.iter().enumerate() {
        check_replica((number, replica), grounds, &mut faults);
    }
    match file.plan() {
        Ok(plan) if faults.is_empty() => Ok(plan),
        // Why there is none is among the faults: a stage has no blocks.
        _ => Err(faults),
    }
}

fn check_replica((number, replica): (usize, &ReplicaEntry), grounds: Grounds<'_>, faults: &mut Vec<Fault>) {
    let mut fault = |fault| faults.push(Fault::Replica { replica: number, fault });
    if !(1..=MOST_SLOTS).contains(&replica.slots) {
        fault(ReplicaFault::Slots { found: replica.slots });
    }
    let Some(last) = replica.stages.last() else { return fault(ReplicaFault::NoStage) };
    let n_layer = grounds.model.n_layer();
    if last.end < n_layer {
        fault(ReplicaFault::EndsEarly { end: last.end, n_layer });
    }
    if replica.stages.iter().any(|stage| stage.encoding != last.encoding) {
        fault(ReplicaFault::Encodings);
    }
    let mut before = 0;
    for (place, stage) in replica.stages.iter().enumerate() {
        let mut fault = |fault| faults.push(Fault::Stage { replica: number, stage: place, fault });
        check_layers((stage, before), grounds.model, &mut fault);
        check_device(stage, grounds.nodes, &mut fault);
        if stage.encoding == EncodingEntry::Q8_0 {
            fault(StageFault::Encoding);
        }
        before = stage.end;
    }
}

fn check_layers((stage, before): (&StageEntry, u32), model: &ModelShape, fault: &mut dyn FnMut(StageFault)) {
    let &StageEntry { start, end, gpu_blocks, .. } = stage;
    match start.cmp(&before) {
        std::cmp::Ordering::Less => fault(StageFault::Overlap { start, before }),
        std::cmp::Ordering::Greater => fault(StageFault::Gap { start, before }),
        std::cmp::Ordering::Equal => {}
    }
    let Ok(layers) = LayerRange::new(start, end) else { return fault(StageFault::Empty { start, end }) };
    if gpu_blocks > layers.len() {
        fault(StageFault::GpuBlocks { gpu_blocks, blocks: layers.len() });
    }
    let n_layer = model.n_layer();
    if end > n_layer {
        return fault(StageFault::Beyond { end, n_layer });
    }
    if let Err(refusal) = model.check_range(layers) {
        fault(StageFault::Cut(refusal.to_string()));
    }
}

fn check_device(stage: &StageEntry, nodes: Option<&[KnownNode]>, fault: &mut dyn FnMut(StageFault)) {
    let Some(nodes) = nodes else { return };
    let id = cluster::DeviceId(stage.device.clone());
    let (node, device) = node_and_device(&id);
    let Some(known) = nodes.iter().find(|known| known.name == node) else {
        let known = nodes.iter().map(|known| known.name.0.clone()).collect();
        return fault(StageFault::UnknownNode { node: node.0, known });
    };
    let is_gpu = |facts: &DeviceFacts| facts.kind != DeviceKind::Cpu;
    let has_gpu = match device {
        None => known.devices.iter().any(is_gpu),
        Some(device) => match known.devices.iter().find(|facts| facts.name.eq_ignore_ascii_case(device)) {
            Some(facts) => is_gpu(facts),
            None => {
                let known = known.devices.iter().map(|facts| facts.name.clone()).collect();
                return fault(StageFault::UnknownDevice { node: node.0, device: device.to_owned(), known });
            }
        },
    };
    if stage.gpu_blocks > 0 && !has_gpu {
        fault(StageFault::NoGpu { gpu_blocks: stage.gpu_blocks, device: stage.device.clone() });
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Bytes, RangeRule};

    use super::*;
    use crate::testing::{model, plan_file};

    fn node(name: &str, gpu: Option<&str>) -> KnownNode {
        let device = |name: &str, kind| DeviceFacts {
            name: name.into(),
            description: String::new(),
            kind,
            memory_total: Bytes(1),
            memory_free: Bytes(1),
        };
        let gpu = gpu.map(|name| device(name, DeviceKind::Gpu));
        let devices = gpu.into_iter().chain([device("CPU", DeviceKind::Cpu)]).collect();
        KnownNode { name: NodeId(name.into()), devices }
    }

    fn faults_of(file: &PlanFile, change: impl Fn(&mut ModelShape)) -> Vec<String> {
        let mut model = model(30);
        change(&mut model);
        let names = ["fish".to_owned(), "ab12".to_owned()];
        let nodes = [node("a", None), node("b", Some("CUDA0"))];
        let grounds = Grounds { model: &model, names: &names, nodes: Some(&nodes) };
        match check(file, grounds) {
            Ok(plan) => {
                assert_eq!(&PlanFile { model: file.model.clone(), ..PlanFile::new(&plan) }, file);
                Vec::new()
            }
            Err(faults) => faults.iter().map(ToString::to_string).collect(),
        }
    }

    fn faults(replicas: &str) -> Vec<String> {
        faults_of(&plan_file(replicas), |_| {})
    }

    #[test]
    fn a_plan_without_fault_is_one() {
        let two = r#"[
            {"role": "prefill", "slots": 2, "limit": {"stage": 0}, "stages": [
                {"device": "a", "start": 0, "end": 10, "gpu_blocks": 0},
                {"device": "b/cuda0", "start": 10, "end": 30, "gpu_blocks": 20}]},
            {"role": "decode", "slots": 256, "limit": {"stage": 0},
             "stages": [{"device": "b", "start": 0, "end": 30, "gpu_blocks": 1}]}
        ]"#;
        assert_eq!(faults(two), Vec::<String>::new());
        let named = |name: &str| PlanFile { model: Some(name.into()), ..plan_file(two) };
        assert_eq!(faults_of(&named("Fish"), |_| {}), Vec::<String>::new());
        assert!(faults_of(&named("whale"), |_| {})[0].contains("\"whale\", and fish is served"));
    }

    #[test]
    fn every_fault_is_named_at_once_with_its_place_and_numbers() {
        let broken = r#"[
            {"role": "mixed", "slots": 0, "stages": [
                {"device": "a", "start": 1, "end": 10, "gpu_blocks": 0},
                {"device": "nowhere", "start": 8, "end": 20, "gpu_blocks": 0},
                {"device": "b/CUDA7", "start": 22, "end": 22, "gpu_blocks": 0},
                {"device": "a/CPU", "start": 22, "end": 29, "gpu_blocks": 8, "encoding": "q8_0"}]},
            {"role": "mixed", "slots": 257, "stages": []},
            {"role": "mixed", "slots": 1, "stages": [{"device": "b", "start": 0, "end": 31, "gpu_blocks": 0}]}
        ]"#;
        let said = faults(broken);
        for part in [
            "replica 0: it has 0 slots",
            "replica 0: its stages end at block 29, and the model has 30: blocks 29..30 are nowhere",
            "replica 0: its stages send hidden rows in different encodings",
            "replica 0, stage 0: it begins at block 1, and the stage before ends at 0: blocks 0..1 are nowhere",
            "replica 0, stage 1: it begins at block 8, and the stage before ends at 10: blocks 8..10 are twice",
            "replica 0, stage 1: there is no node nowhere: a, b are there",
            "replica 0, stage 2: it begins at block 22, and the stage before ends at 20",
            "replica 0, stage 2: blocks 22..22 are none",
            "replica 0, stage 2: node b has no device CUDA7: it has CUDA0, CPU",
            "replica 0, stage 3: 8 blocks on the GPU are more than it has, which is 7",
            "replica 0, stage 3: 8 of its blocks are to be on a GPU, and a/CPU is none",
            "replica 0, stage 3: hidden rows cannot be sent as q8_0",
            "replica 1: it has 257 slots",
            "replica 1: it has no stage",
            "replica 2, stage 0: it ends at block 31, and the model has 30",
        ] {
            assert!(said.iter().any(|fault| fault.starts_with(part)), "{part} is missing in {said:#?}");
        }
        assert_eq!(said.len(), 15, "{said:#?}");
        assert_eq!(faults("[]"), ["the plan has no replica"]);
    }

    #[test]
    fn what_llama_cpp_cannot_cut_is_refused_and_nodes_that_are_yet_to_come_are_not() {
        let file = plan_file(
            r#"[{"role": "mixed", "slots": 1, "limit": {"stage": 0}, "stages": [
                {"device": "x", "start": 0, "end": 7, "gpu_blocks": 0},
                {"device": "y", "start": 7, "end": 30, "gpu_blocks": 0}]}]"#,
        );
        let mut model = model(30);
        let names = ["fish".to_owned()];
        assert!(check(&file, Grounds { model: &model, names: &names, nodes: None }).is_ok());
        model.range_rules = vec![RangeRule::StartMultiple { step: 6 }];
        let faults = check(&file, Grounds { model: &model, names: &names, nodes: None }).unwrap_err();
        assert!(faults[0].to_string().contains("multiple of 6"), "{faults:?}");
    }
}
