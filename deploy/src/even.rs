//! The plan that needs no profile: replicas alike, one stage on each node, cut evenly by bytes. Pure.

use cluster::{
    DeviceId, LayerRange, LayerRangeError, Limit, LinkEncoding, Millis, ModelShape, NodeId, Plan, Prediction,
    ReplicaPlan, Role, StagePlan, TokensPerSecond,
};

/// What the plan is chosen by, in the plan.
const OBJECTIVE: &str = "even";

/// The replicas that are asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Even {
    /// How many.
    pub replicas: usize,
    /// Stages of each.
    pub stages: u32,
    /// First blocks of the second and later stages, instead of an even cut.
    pub cuts: Option<Vec<u32>>,
    /// Blocks on a GPU, by stage; stages not listed have none.
    pub gpu_blocks: Vec<u32>,
    /// Of each replica.
    pub slots: u32,
    /// How hidden rows travel.
    pub encoding: LinkEncoding,
}

impl Even {
    /// Nodes that it takes.
    pub fn nodes(&self) -> usize {
        self.replicas * self.stages as usize
    }

    /// The plan over the first nodes of these.
    pub fn plan(&self, model: &ModelShape, nodes: &[NodeId]) -> Result<Plan, LayerRangeError> {
        let ranges = match &self.cuts {
            Some(cuts) => LayerRange::from_cuts(cuts, model.n_layer())?,
            None => model.split(self.stages)?,
        };
        let groups = nodes.chunks(ranges.len()).filter(|group| group.len() == ranges.len());
        let replicas = groups.take(self.replicas).map(|group| self.replica(&ranges, group)).collect();
        let idle = nodes.iter().skip(self.nodes()).map(|node| DeviceId(node.0.clone())).collect();
        Ok(Plan { objective: OBJECTIVE.to_owned(), replicas, idle, prediction: Prediction::default() })
    }

    fn replica(&self, ranges: &[LayerRange], nodes: &[NodeId]) -> ReplicaPlan {
        let stage = |(place, (layers, node)): (usize, (&LayerRange, &NodeId))| StagePlan {
            device: DeviceId(node.0.clone()),
            layers: *layers,
            gpu_blocks: self.gpu_blocks.get(place).copied().unwrap_or(0),
            encoding: self.encoding,
            load: 0.0,
        };
        ReplicaPlan {
            role: Role::Mixed,
            stages: ranges.iter().zip(nodes).enumerate().map(stage).collect(),
            slots: self.slots,
            // Nothing is known of its speed.
            prefill_rate: TokensPerSecond(0.0),
            decode_rate: TokensPerSecond(0.0),
            tpot: Millis(0.0),
            limit: Limit::SlotCap,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model;

    fn even(replicas: usize, stages: u32) -> Even {
        Even { replicas, stages, cuts: None, gpu_blocks: Vec::new(), slots: 4, encoding: LinkEncoding::F32 }
    }

    fn nodes(n: usize) -> Vec<NodeId> {
        (0..n).map(|i| NodeId(format!("n{i}"))).collect()
    }

    fn shape_of(even: &Even, n: usize) -> Vec<Vec<String>> {
        let plan = even.plan(&model(30), &nodes(n)).unwrap();
        let stages =
            |replica: &ReplicaPlan| replica.stages.iter().map(|stage| stage.device.0.clone()).collect();
        plan.replicas.iter().map(stages).collect()
    }

    #[test]
    fn every_stage_has_a_node_of_its_own_and_the_rest_are_idle() {
        assert_eq!(shape_of(&even(2, 2), 5), [["n0", "n1"], ["n2", "n3"]]);
        let plan = even(2, 2).plan(&model(30), &nodes(5)).unwrap();
        assert_eq!(plan.idle, [DeviceId("n4".into())]);
        assert_eq!(plan.replicas[0].stages[1].layers.end(), 30);
        assert!(even(1, 40).plan(&model(30), &nodes(40)).is_err());
    }
}
