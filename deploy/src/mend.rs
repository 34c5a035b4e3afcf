//! A plan for fewer nodes than it was made for. Pure.
//!
//! Replicas whose nodes are all there stay as they are: nothing of them is reloaded. Of each of the others one is made of the nodes
//! that are left, its own first, with as many stages as there are nodes for. It is no good plan where hosts differ much, which
//! takes profiles; it is one that serves.

use cluster::{DeviceId, LayerRange, ModelShape, NodeId, Plan, ReplicaPlan, StagePlan};

use crate::chain::{Chain, Place, node_and_device};

/// The plan over these nodes; none if nothing can be made of them. It is `base` itself where all of its nodes are there.
pub fn mend(base: &Plan, model: &ModelShape, here: &[NodeId]) -> Option<Plan> {
    let is_whole = |replica: &ReplicaPlan| Chain::of(replica).nodes().all(|node| here.contains(node));
    let kept: Vec<Chain> = base.replicas.iter().filter(|one| is_whole(one)).map(Chain::of).collect();
    let is_taken = |node: &NodeId| kept.iter().any(|chain| chain.nodes().any(|taken| taken == node));
    let mut free: Vec<NodeId> = here.iter().filter(|node| !is_taken(node)).cloned().collect();
    let mut replicas = Vec::new();
    for replica in &base.replicas {
        if is_whole(replica) {
            replicas.push(replica.clone());
        } else if let Some(made) = made_of(replica, model, &free) {
            let used: Vec<NodeId> = Chain::of(&made).nodes().cloned().collect();
            free.retain(|node| !used.contains(node));
            replicas.push(made);
        }
    }
    if replicas.is_empty() {
        return None;
    }
    if replicas == base.replicas {
        return Some(base.clone());
    }
    let idle = free.into_iter().map(|node| DeviceId(node.0)).collect();
    Some(Plan {
        objective: format!("{} without lost nodes", base_name(base)),
        replicas,
        idle,
        ..base.clone()
    })
}

fn base_name(base: &Plan) -> &str {
    base.objective.trim_end_matches(" without lost nodes")
}

/// The same replica of other nodes.
fn made_of(replica: &ReplicaPlan, model: &ModelShape, free: &[NodeId]) -> Option<ReplicaPlan> {
    let own = Chain::of(replica);
    let (mut nodes, others): (Vec<&NodeId>, Vec<&NodeId>) =
        free.iter().partition(|node| own.nodes().any(|of_own| of_own == *node));
    nodes.extend(others);
    nodes.truncate(own.stages.len());
    let ranges: Vec<LayerRange> = if nodes.len() == own.stages.len() {
        own.stages.iter().map(|place| place.layers).collect()
    } else {
        // As few more as the model can be cut into.
        (1..=nodes.len() as u32).rev().find_map(|stages| model.split(stages).ok())?
    };
    let encoding = replica.stages.first()?.encoding;
    let stage = |(layers, node): (LayerRange, &NodeId)| {
        let held = own.stages.iter().find(|place| place.node == *node);
        StagePlan {
            device: device_of(replica, node),
            layers,
            // Its GPU is known to hold so many.
            gpu_blocks: held.map_or(0, |place: &Place| place.gpu_blocks.min(layers.len())),
            encoding,
            load: 0.0,
        }
    };
    let stages = ranges.into_iter().zip(nodes).map(stage).collect();
    Some(ReplicaPlan { stages, ..replica.clone() })
}

/// What the replica used of the node, if it did.
fn device_of(replica: &ReplicaPlan, node: &NodeId) -> DeviceId {
    let mut devices = replica.stages.iter().map(|stage| &stage.device);
    let held = devices.find(|device| node_and_device(device).0 == *node);
    held.cloned().unwrap_or_else(|| DeviceId(node.0.clone()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{model, plan_file};

    /// Two replicas of two stages, and one of one with a GPU.
    fn base() -> Plan {
        let stage = |device: &str, start: u32, end: u32, gpu: u32| {
            format!(r#"{{"device": "{device}", "start": {start}, "end": {end}, "gpu_blocks": {gpu}}}"#)
        };
        let replica = |role: &str, stages: &[String]| {
            let stages = stages.join(",");
            format!(r#"{{"role": "{role}", "slots": 4, "limit": "memory", "stages": [{stages}]}}"#)
        };
        let replicas = [
            replica("prefill", &[stage("a", 0, 12, 0), stage("b", 12, 30, 0)]),
            replica("decode", &[stage("c", 0, 15, 0), stage("d/CUDA0", 15, 30, 15)]),
            replica("mixed", &[stage("e", 0, 30, 0)]),
        ];
        plan_file(&format!("[{}]", replicas.join(","))).plan().unwrap()
    }

    fn names(text: &str) -> Vec<NodeId> {
        text.chars().map(|name| NodeId(name.to_string())).collect()
    }

    fn mended(here: &str) -> Option<Vec<String>> {
        let plan = mend(&base(), &model(30), &names(here))?;
        Some(plan.replicas.iter().map(|one| format!("{} {}", one.role, Chain::of(one))).collect())
    }

    #[test]
    fn what_is_whole_stays_and_what_is_broken_is_made_of_what_is_left() {
        let [a, c, e] = [
            "prefill a[0..12] → b[12..30], 4 slots",
            "decode c[0..15] → d[15..30], 4 slots",
            "mixed e[0..30], 4 slots",
        ];
        assert_eq!(mended("abcde").unwrap(), [a, c, e]);
        assert_eq!(
            mend(&base(), &model(30), &names("abcdef")).unwrap(),
            base(),
            "a node more changes nothing"
        );
        assert_eq!(mended("abde").unwrap(), [a, "decode d[0..30], 4 slots", e]);
        assert_eq!(mended("abe").unwrap(), [a, e]);
        assert_eq!(mended("bcdef").unwrap()[0], "prefill b[0..12] → f[12..30], 4 slots");
        assert_eq!(mended("b").unwrap(), ["prefill b[0..30], 4 slots"]);
        assert_eq!(mended(""), None);
        let plan = mend(&base(), &model(30), &names("abde")).unwrap();
        assert_eq!(
            (plan.replicas[1].stages[0].gpu_blocks, &plan.replicas[1].stages[0].device.0[..]),
            (15, "d/CUDA0")
        );
        assert_eq!(plan.objective, "by hand without lost nodes");
    }

    proptest! {
        #[test]
        fn whoever_is_left_gets_a_plan_of_the_whole_model_that_keeps_what_is_whole(here in "[a-h]{0,8}") {
            let (base, here) = (base(), names(&here));
            let Some(plan) = mend(&base, &model(30), &here) else {
                prop_assert!(here.is_empty());
                return Ok(());
            };
            for replica in &plan.replicas {
                let mut next = 0;
                for stage in &replica.stages {
                    prop_assert_eq!(stage.layers.start(), next);
                    next = stage.layers.end();
                }
                prop_assert_eq!(next, 30);
                prop_assert!(Chain::of(replica).nodes().all(|node| here.contains(node)));
            }
            for replica in &base.replicas {
                let whole = Chain::of(replica).nodes().all(|node| here.contains(node));
                prop_assert!(!whole || plan.replicas.contains(replica));
            }
        }
    }
}
