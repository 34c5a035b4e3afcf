//! A plan of the nodes that are there: by the planner, where their devices were profiled and the workload is known; else what there was,
//! mended.

use cluster::{
    Bytes, BytesPerSecond, Device, DeviceId, DeviceMemory, DeviceProfile, LinkQuality, Links, Millis,
    ModelShape, NodeId, Plan, Workload,
};
use deploy::{Goal, mend, node_and_device};
use planner::{EncodingRule, ObjectiveKind, Problem, Settings, solve};
use protocol::node::{DeviceFacts, DeviceKind, NodeFacts};
use protocol::plan_files::WorkloadFile;

use super::super::ServeArgs;
use crate::commands::planning::{read_file, settings};

/// What a host needs for itself: a fifth of its memory.
const FOR_STAGES: f64 = 0.8;

/// Gigabit Ethernet, until a link is measured.
const LAN: LinkQuality =
    LinkQuality { bandwidth: BytesPerSecond::from_mbit(920.0), one_way_latency: Millis(0.3) };

/// Makes plans.
pub(super) struct Replanner {
    model: ModelShape,
    known: Option<Known>,
    /// The last plan, and of what it was made.
    last: Option<(Vec<NodeId>, u64, Option<Plan>)>,
}

/// What the planner has to know.
struct Known {
    profiles: Vec<DeviceProfile>,
    workload: Workload,
    settings: Settings,
}

impl Replanner {
    /// With what the arguments tell; slots hold so many tokens.
    pub(super) fn new(
        args: &ServeArgs,
        profiles: &[DeviceProfile],
        (model, n_ctx): (&ModelShape, u32),
    ) -> anyhow::Result<Self> {
        let workload = args.cluster.workload.as_deref().map(read_file::<WorkloadFile>).transpose()?;
        let known = workload.filter(|_| !profiles.is_empty()).map(|workload| Known {
            profiles: profiles.to_vec(),
            workload: Workload { slot_context: n_ctx, ..Workload::from(&workload) },
            settings: Settings {
                encoding: EncodingRule::Fixed(super::desire::encoding(args)),
                ..settings(ObjectiveKind::Queue, args.prefill_chunk)
            },
        });
        Ok(Self { model: model.clone(), known, last: None })
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
        let problem = known.problem(&self.model, here)?;
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
    /// None where a node that is there was not profiled.
    fn problem(&self, model: &ModelShape, here: &[NodeFacts]) -> Option<Problem> {
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
                return None;
            }
        }
        let links = Links { measured: Vec::new(), otherwise: Some(LAN) };
        Some(Problem { model: model.clone(), devices, profiles, links, workload: self.workload.clone() })
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
    use protocol::plan_files::{ModelShapeFile, PlannerFile, ProfilesFile};

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
        let known = Known {
            profiles: ProfilesFile::from_json(&example("profiles.json")).unwrap().profiles().unwrap(),
            workload: Workload::from(&workload),
            settings: Settings { simulated_seeds: vec![1], ..settings(ObjectiveKind::Els, 256) },
        };
        let mut here = vec![
            node("workstation", gpu("GPU", DeviceKind::Gpu)),
            node("studio", gpu("Metal", DeviceKind::IntegratedGpu)),
        ];
        let problem = known.problem(&model, &here).unwrap();
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
        assert!(known.problem(&model, &here).is_none());
    }
}
