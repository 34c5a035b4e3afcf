//! A plan of the nodes that are there: by the planner, where their devices were profiled and the workload is known; else what there was,
//! mended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use cluster::{
    Bytes, BytesPerSecond, Device, DeviceId, DeviceMemory, DeviceProfile, Link, LinkQuality, Links, Millis,
    ModelShape, NodeId, Plan, Workload,
};
use deploy::{Deployment, Goal, mend, node_and_device};
use node::links::{RingNews, SurveyedLink};
use orchestrator::Fleet;
use planner::{EncodingRule, ObjectiveKind, Problem, Settings, solve};
use protocol::node::{DeviceFacts, DeviceKind, NodeFacts};

use super::super::ServeArgs;
use super::super::adapt::{AdaptArgs, open_workload};
use crate::commands::planning::settings;

/// What a host needs for itself: a fifth of its memory.
const FOR_STAGES: f64 = 0.8;

/// Gigabit Ethernet, until a link is measured.
const LAN: LinkQuality =
    LinkQuality { bandwidth: BytesPerSecond::from_mbit(920.0), one_way_latency: Millis(0.3) };

/// Makes plans.
pub(super) struct Replanner {
    model: ModelShape,
    known: Option<Arc<Known>>,
    /// Where it is counted what is asked for, and what of it is enough to go by.
    demand: (Fleet, AdaptArgs),
    /// The last plan, and of what it was made.
    last: Option<(Vec<NodeId>, u64, Option<Plan>)>,
}

/// What the planner has to know.
pub(in super::super) struct Known {
    profiles: Vec<DeviceProfile>,
    /// What is asked for, if anybody said so.
    pub(in super::super) planned: Option<Workload>,
    /// What is asked of a workload that nobody planned.
    pub(in super::super) like: Workload,
    pub(in super::super) settings: Settings,
    /// As the running replicas' nodes measured them.
    pub(super) links: MeasuredLinks,
}

/// Links between nodes, as they were last measured. Clones are handles of the same.
#[derive(Debug, Clone, Default)]
pub(super) struct MeasuredLinks(Arc<Mutex<BTreeMap<(NodeId, NodeId), LinkQuality>>>);

impl MeasuredLinks {
    /// Some were measured.
    pub(super) fn note(&self, news: &RingNews) {
        let mut links = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for SurveyedLink { from, to, outcome, .. } in &news.links {
            if let Ok(quality) = outcome {
                links.insert((from.clone(), to.clone()), *quality);
            }
        }
    }

    fn links(&self) -> Links {
        let links = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let link = |((from, to), quality): (&(NodeId, NodeId), &LinkQuality)| Link {
            from: from.clone(),
            to: to.clone(),
            quality: *quality,
        };
        Links { measured: links.iter().map(link).collect(), otherwise: Some(LAN) }
    }
}

impl Replanner {
    /// Of this model, by what is known, for what is asked for of late.
    pub(super) fn new(model: &ModelShape, known: Option<Arc<Known>>, demand: (Fleet, AdaptArgs)) -> Self {
        Self { model: model.clone(), known, demand, last: None }
    }

    /// The plan over the nodes that are there; `base` itself where all of its are. None if there can be none.
    pub(super) async fn plan(&mut self, base: &Goal, here: &[NodeFacts]) -> Option<Plan> {
        let names: Vec<NodeId> = here.iter().map(|node| node.name.clone()).collect();
        if let Some((of, base_id, plan)) = &self.last
            && (of, *base_id) == (&names, base.id)
        {
            return plan.clone();
        }
        let is_whole =
            base.replicas.iter().flat_map(|one| one.chain.nodes()).all(|node| names.contains(node));
        let solved = if is_whole { Some(base.plan.clone()) } else { self.solve(here).await };
        let plan = solved.or_else(|| mend(&base.plan, &self.model, &names));
        self.last = Some((names, base.id, plan.clone()));
        plan
    }

    async fn solve(&self, here: &[NodeFacts]) -> Option<Plan> {
        let known = self.known.as_ref()?;
        let (fleet, args) = &self.demand;
        let observed = fleet.recent_demand(args.enough());
        let observed = observed.and_then(|demand| demand.workload(&known.like, Millis::from(args.window())));
        let workload = observed.or_else(|| known.planned.clone())?;
        let problem = known.problem_of(&self.model, here, &workload).ok()?;
        let settings = known.settings.clone();
        let solved = tokio::task::spawn_blocking(move || solve(&problem, &settings)).await;
        match solved {
            Ok(Ok(solution)) => Some(solution.plan),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the planner has no plan of the nodes that are there; the last one is mended");
                None
            }
            Err(error) => {
                tracing::error!(%error, "the planner failed");
                None
            }
        }
    }
}

impl Known {
    /// What the arguments tell; slots hold so many tokens. None without profiles.
    pub(super) fn new(
        args: &ServeArgs,
        profiles: &[DeviceProfile],
        n_ctx: u32,
    ) -> anyhow::Result<Option<Self>> {
        let planned = args.planned_workload(n_ctx)?;
        Ok((!profiles.is_empty()).then(|| Self {
            profiles: profiles.to_vec(),
            like: planned.clone().unwrap_or_else(|| open_workload(n_ctx)),
            planned,
            settings: Settings {
                encoding: EncodingRule::Fixed(super::desire::encoding(args)),
                ..settings(ObjectiveKind::Queue, args.prefill_chunk)
            },
            links: MeasuredLinks::default(),
        }))
    }

    /// What there is to plan, with as many slots allowed as the desired plan has. Why it cannot be planned, if it cannot.
    pub(in super::super) fn problem(
        &self,
        deployment: &Deployment,
        goal: &Goal,
        workload: &Workload,
    ) -> Result<Problem, String> {
        let slots = goal.replicas.iter().map(|one| one.chain.slots).max().unwrap_or(1);
        let workload = Workload { max_slots: workload.max_slots.max(slots), ..workload.clone() };
        self.problem_of(&deployment.model().shape, &deployment.facts(), &workload)
    }

    /// The same plan with its devices called as their profiles call them.
    pub(in super::super) fn named(&self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        for stage in plan.replicas.iter_mut().flat_map(|one| &mut one.stages) {
            let is_known = self.profiles.iter().any(|profile| profile.device == stage.device);
            let (node, _) = node_and_device(&stage.device);
            let of_node = |profile: &&DeviceProfile| node_and_device(&profile.device).0 == node;
            if let Some(profile) = self.profiles.iter().find(of_node).filter(|_| !is_known) {
                stage.device = profile.device.clone();
            }
        }
        plan
    }

    fn problem_of(
        &self,
        model: &ModelShape,
        here: &[NodeFacts],
        workload: &Workload,
    ) -> Result<Problem, String> {
        let (mut devices, mut profiles) = (Vec::new(), Vec::new());
        for node in here {
            let before = devices.len();
            for profile in &self.profiles {
                let (of, name) = node_and_device(&profile.device);
                if of == node.name {
                    devices.push(device(&profile.device, node, name));
                    profiles.push(profile.clone());
                }
            }
            if devices.len() == before {
                return Err(format!("node {} was not profiled", node.name));
            }
        }
        Ok(Problem {
            model: model.clone(),
            devices,
            profiles,
            links: self.links.links(),
            workload: workload.clone(),
        })
    }
}

/// A device of a node, with what of its memory stages may use.
fn device(id: &DeviceId, node: &NodeFacts, name: Option<&str>) -> Device {
    let budget = |memory: Bytes| Bytes((memory.0 as f64 * FOR_STAGES) as u64);
    let is_gpu = |facts: &&DeviceFacts| facts.kind != DeviceKind::Cpu;
    let facts = match name {
        Some(name) => node.devices.iter().find(|facts| facts.name.eq_ignore_ascii_case(name)),
        None => node.devices.iter().find(is_gpu),
    };
    let ram = budget(node.memory_total);
    let memory = match facts.filter(is_gpu) {
        Some(gpu) if gpu.kind == DeviceKind::IntegratedGpu => DeviceMemory::Unified { total: ram },
        Some(gpu) => DeviceMemory::Discrete { vram: budget(gpu.memory_total), ram },
        None => DeviceMemory::Discrete { vram: Bytes::ZERO, ram },
    };
    Device { id: id.clone(), node: node.name.clone(), memory }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use protocol::node::Build;
    use protocol::plan_files::{ModelShapeFile, PlannerFile, ProfilesFile, WorkloadFile};

    use super::*;

    fn example(name: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples").join(name);
        std::fs::read_to_string(path).unwrap()
    }

    fn node(name: &str, gpu: Option<DeviceFacts>) -> NodeFacts {
        NodeFacts {
            name: NodeId(name.into()),
            instance: name.into(),
            build: Build { version: "1".into(), llama_cpp: "1".into(), features: Vec::new() },
            devices: gpu.into_iter().collect(),
            memory_total: Bytes(32_000_000_000),
            memory_available: Bytes(30_000_000_000),
            addresses: Vec::new(),
            emulated: false,
        }
    }

    fn gpu(name: &str, kind: DeviceKind) -> Option<DeviceFacts> {
        let memory = Bytes(24_000_000_000);
        let description = String::new();
        Some(DeviceFacts { name: name.into(), description, kind, memory_total: memory, memory_free: memory })
    }

    #[test]
    fn the_nodes_that_are_there_are_planned_for_if_all_were_profiled() {
        let model = ModelShapeFile::from_json(&example("model.json")).unwrap().shape().unwrap();
        let workload = WorkloadFile::from_toml(&example("workload.toml")).unwrap();
        let workload = Workload::from(&workload);
        let known = Known {
            profiles: ProfilesFile::from_json(&example("profiles.json")).unwrap().profiles().unwrap(),
            planned: None,
            like: workload.clone(),
            settings: Settings { simulated_seeds: vec![1], ..settings(ObjectiveKind::Els, 256) },
            links: MeasuredLinks::default(),
        };
        let mut here = vec![
            node("workstation", gpu("GPU", DeviceKind::Gpu)),
            node("studio", gpu("Metal", DeviceKind::IntegratedGpu)),
        ];
        let problem = known.problem_of(&model, &here, &workload).unwrap();
        let memory: Vec<DeviceMemory> = problem.devices.iter().map(|device| device.memory).collect();
        let ram = Bytes(25_600_000_000);
        assert_eq!(
            memory,
            [
                DeviceMemory::Discrete { vram: Bytes(19_200_000_000), ram },
                DeviceMemory::Unified { total: ram }
            ]
        );
        let plan = solve(&problem, &known.settings).unwrap().plan;
        let used = plan.replicas.iter().flat_map(|one| &one.stages);
        assert!(
            used.map(|stage| node_and_device(&stage.device).0)
                .all(|node| here.iter().any(|one| one.name == node))
        );
        here.push(node("newcomer", None));
        let error = known.problem_of(&model, &here, &workload).unwrap_err();
        assert_eq!(error, "node newcomer was not profiled");
        let mut unnamed = plan.clone();
        let device = &mut unnamed.replicas[0].stages[0].device.0;
        *device = device.split('/').next().unwrap().to_owned();
        assert_eq!((known.named(&unnamed), known.named(&plan)), (plan.clone(), plan));
    }
}
