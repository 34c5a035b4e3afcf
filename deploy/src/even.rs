//! The plan that needs no profile: one stage on each node, cut evenly by bytes or as was said. Pure.

use cluster::{
    DeviceId, LayerRange, LayerRangeError, Limit, LinkEncoding, Millis, ModelShape, NodeId, Plan, Prediction,
    ReplicaPlan, Role, StagePlan, TokensPerSecond,
};

/// What the plan is chosen by, in the plan.
const OBJECTIVE: &str = "even";

/// The replicas that are asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Even {
    /// In their order.
    pub replicas: Vec<EvenReplica>,
    /// Blocks on a GPU, by stage; stages not listed have none.
    pub gpu_blocks: Vec<u32>,
    /// Of each replica.
    pub slots: u32,
    /// How hidden rows travel.
    pub encoding: LinkEncoding,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvenReplica {
    /// What it is used for.
    pub role: Role,
    /// How it is cut.
    pub cut: Cut,
}

/// How a replica is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// Evenly, into so many stages.
    Even(u32),
    /// At these first blocks of the second and later stages.
    At(Vec<u32>),
}

impl Cut {
    /// Stages that there will be.
    pub fn stages(&self) -> usize {
        match self {
            Self::Even(stages) => *stages as usize,
            Self::At(cuts) => cuts.len() + 1,
        }
    }

    fn ranges(&self, model: &ModelShape) -> Result<Vec<LayerRange>, LayerRangeError> {
        match self {
            Self::Even(stages) => model.split(*stages),
            Self::At(cuts) => LayerRange::from_cuts(cuts, model.n_layer()),
        }
    }
}

impl Even {
    /// Nodes that it takes.
    pub fn nodes(&self) -> usize {
        self.replicas.iter().map(|replica| replica.cut.stages()).sum()
    }

    /// The plan over the first nodes of these: as many of its replicas as they are enough for.
    pub fn plan(&self, model: &ModelShape, nodes: &[NodeId]) -> Result<Plan, LayerRangeError> {
        let mut free = nodes;
        let mut replicas = Vec::new();
        for EvenReplica { role, cut } in &self.replicas {
            let ranges = cut.ranges(model)?;
            let Some((taken, rest)) = free.split_at_checked(ranges.len()) else { break };
            replicas.push(self.replica(*role, &ranges, taken));
            free = rest;
        }
        let idle = free.iter().map(|node| DeviceId(node.0.clone())).collect();
        Ok(Plan { objective: OBJECTIVE.to_owned(), replicas, idle, prediction: Prediction::default() })
    }

    fn replica(&self, role: Role, ranges: &[LayerRange], nodes: &[NodeId]) -> ReplicaPlan {
        let stage = |(place, (layers, node)): (usize, (&LayerRange, &NodeId))| StagePlan {
            device: DeviceId(node.0.clone()),
            layers: *layers,
            gpu_blocks: self.gpu_blocks.get(place).copied().unwrap_or(0),
            encoding: self.encoding,
            load: 0.0,
        };
        ReplicaPlan {
            role,
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
        let replica = EvenReplica { role: Role::Mixed, cut: Cut::Even(stages) };
        let replicas = vec![replica; replicas];
        Even { replicas, gpu_blocks: Vec::new(), slots: 4, encoding: LinkEncoding::F32 }
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

    #[test]
    fn replicas_are_cut_and_used_each_in_its_way() {
        let mut even = even(2, 1);
        even.replicas[1] = EvenReplica { role: Role::Decode, cut: Cut::At(vec![10, 20]) };
        assert_eq!(even.nodes(), 4);
        let plan = even.plan(&model(30), &nodes(4)).unwrap();
        assert_eq!((plan.replicas[0].role, plan.replicas[1].role), (Role::Mixed, Role::Decode));
        assert_eq!(plan.replicas[1].stages[1].layers, LayerRange::new(10, 20).unwrap());
        assert_eq!(
            even.plan(&model(30), &nodes(3)).unwrap().replicas.len(),
            1,
            "three nodes are enough for one"
        );
    }
}
