//! An order to run a stage on a node.

use cluster::{LayerRange, ModelHash, ModelShape};

use super::{BadMessage, Peer, check_text, limit};
use crate::plan_files::{ModelShapeFile, PlannerFile};
use crate::slices::SliceForm;
use crate::v1;

const WHAT: &str = "a stage's order";

/// Longest description of a model: some hundred bytes for each block.
const LONGEST_SHAPE: usize = 200 << 10;

/// Places in which the parts of a model may be: all nodes of a cluster, and the orchestrator.
const MOST_SOURCES: usize = 65;

/// A stage to be run: what its host adds makes it a [`WorkerConfig`](crate::worker::WorkerConfig), whose own check
/// bounds the numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageOrder {
    /// How the node finds its copy of the model …
    pub model: String,
    /// … and how it knows that it is the right one.
    pub model_hash: ModelHash,
    /// Place in the chain.
    pub stage: u32,
    /// Stages of the replica.
    pub n_stages: u32,
    /// Its blocks.
    pub layers: LayerRange,
    /// Blocks on a GPU.
    pub gpu_layers: u32,
    /// Sequences.
    pub slots: u32,
    /// Positions per sequence.
    pub n_ctx: u32,
    /// Rows per frame.
    pub n_batch: u32,
    /// CPU threads; else the node shares its cores out over `stages_here`.
    pub threads: Option<u32>,
    /// Stages of the replica on the same node.
    pub stages_here: u32,
    /// Decode frames in flight.
    pub micro_batches: u32,
    /// Requests that may wait for a slot.
    pub queue_limit: u32,
    /// Prompt tokens per prefill frame.
    pub prefill_chunk: u32,
    /// Seconds a step may be in flight.
    pub step_deadline_secs: u32,
    /// Cut an architecture that no test covers.
    pub allow_uncertified: bool,
    /// Start even if it seems not to fit.
    pub ignore_memory: bool,
    /// For a node that has no copy of the model.
    pub supply: Option<Supply>,
    /// For so many seconds after the stream of orders broke the worker is kept, for whoever orders the same stage again.
    pub keep_secs: u32,
}

/// How a node gets its part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supply {
    /// What the model is.
    pub shape: ModelShape,
    /// The file that holds the blocks.
    pub slice: SliceForm,
    /// The first stage's second one.
    pub embedding: SliceForm,
    /// Who may have them, the likeliest first; the last is whoever gives the order.
    pub sources: Vec<Peer>,
}

impl Supply {
    fn check(supply: v1::Supply) -> Result<Self, BadMessage> {
        let v1::Supply { model_shape, slice, embedding, sources } = supply;
        limit(WHAT, "bytes about its model", model_shape.len(), LONGEST_SHAPE)?;
        let shape = ModelShapeFile::from_json(&model_shape).and_then(|file| file.shape());
        let shape = shape.map_err(|error| BadMessage::Other { what: WHAT, reason: error.to_string() })?;
        if sources.is_empty() {
            return Err(BadMessage::Missing { what: WHAT, field: "sources" });
        }
        limit(WHAT, "sources", sources.len(), MOST_SOURCES)?;
        let sources = sources.into_iter().map(|peer| Peer::check(Some(peer))).collect::<Result<_, _>>()?;
        Ok(Self { shape, slice: SliceForm::check(slice)?, embedding: SliceForm::check(embedding)?, sources })
    }
}

impl From<Supply> for v1::Supply {
    fn from(supply: Supply) -> Self {
        let Supply { shape, slice, embedding, sources } = supply;
        // Numbers, names and lists of them: there is nothing that could not be written.
        let model_shape =
            serde_json::to_string(&ModelShapeFile::new(String::new(), &shape)).unwrap_or_default();
        let sources = sources.into_iter().map(Into::into).collect();
        Self { model_shape, slice: Some(slice.into()), embedding: Some(embedding.into()), sources }
    }
}

impl StageOrder {
    /// Checks what has no check further on.
    pub fn check(order: v1::StageOrder) -> Result<Self, BadMessage> {
        let bad = |reason| BadMessage::Other { what: WHAT, reason };
        let hash = <[u8; 32]>::try_from(&order.model_hash[..]).map_err(|_| {
            bad(format!("its model's hash has {} bytes instead of 32", order.model_hash.len()))
        })?;
        let layers = LayerRange::new(order.first_block, order.end_block).map_err(|e| bad(e.to_string()))?;
        if order.stage >= order.n_stages {
            return Err(bad(format!("stage {} is not one of {} stages", order.stage, order.n_stages)));
        }
        if order.model.is_empty() {
            return Err(BadMessage::Missing { what: WHAT, field: "its model" });
        }
        Ok(Self {
            supply: order.supply.map(Supply::check).transpose()?,
            model: check_text(WHAT, order.model)?,
            model_hash: ModelHash(hash),
            stage: order.stage,
            n_stages: order.n_stages,
            layers,
            gpu_layers: order.gpu_layers,
            slots: order.slots,
            n_ctx: order.n_ctx,
            n_batch: order.n_batch,
            threads: (order.threads > 0).then_some(order.threads),
            stages_here: order.stages_here,
            micro_batches: order.micro_batches,
            queue_limit: order.queue_limit,
            prefill_chunk: order.prefill_chunk,
            step_deadline_secs: order.step_deadline_secs,
            allow_uncertified: order.allow_uncertified,
            ignore_memory: order.ignore_memory,
            keep_secs: order.keep_secs,
        })
    }
}

impl From<StageOrder> for v1::StageOrder {
    fn from(order: StageOrder) -> Self {
        Self {
            model: order.model,
            model_hash: order.model_hash.0.to_vec().into(),
            stage: order.stage,
            n_stages: order.n_stages,
            first_block: order.layers.start(),
            end_block: order.layers.end(),
            gpu_layers: order.gpu_layers,
            slots: order.slots,
            n_ctx: order.n_ctx,
            n_batch: order.n_batch,
            threads: order.threads.unwrap_or(0),
            stages_here: order.stages_here,
            micro_batches: order.micro_batches,
            queue_limit: order.queue_limit,
            prefill_chunk: order.prefill_chunk,
            step_deadline_secs: order.step_deadline_secs,
            allow_uncertified: order.allow_uncertified,
            ignore_memory: order.ignore_memory,
            supply: order.supply.map(Into::into),
            keep_secs: order.keep_secs,
        }
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Bytes, NodeId};
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::node::Address;

    const SHAPE: &str = r#"{ "model": "", "architecture": "llama", "n_embd": 64, "head_bytes": 9,
        "blocks": [{ "count": 30, "kind": { "attention": { "type": "full" }, "feed_forward": "dense" },
                     "weight_bytes": 90, "kv_elements_per_token": 8 }] }"#;

    fn form(byte: u8) -> SliceForm {
        SliceForm { bytes: Bytes(100), tensor_bytes: Bytes(90), header_sha256: [byte; 32] }
    }

    fn order() -> StageOrder {
        let addresses = vec![Address::parse("10.0.0.1:8470").unwrap()];
        let supply = Supply {
            shape: ModelShapeFile::from_json(SHAPE).unwrap().shape().unwrap(),
            slice: form(1),
            embedding: form(2),
            sources: vec![Peer { name: NodeId("a".into()), instance: "x".into(), addresses }],
        };
        StageOrder {
            supply: Some(supply),
            model: "SmolLM2".into(),
            model_hash: ModelHash([7; 32]),
            stage: 1,
            n_stages: 2,
            layers: LayerRange::new(15, 30).unwrap(),
            gpu_layers: 0,
            slots: 4,
            n_ctx: 2048,
            n_batch: 256,
            threads: None,
            stages_here: 1,
            micro_batches: 2,
            queue_limit: 64,
            prefill_chunk: 256,
            step_deadline_secs: 120,
            allow_uncertified: false,
            ignore_memory: true,
            keep_secs: 60,
        }
    }

    #[test]
    fn an_order_survives_the_wire() {
        assert_eq!(StageOrder::check(order().into()).unwrap(), order());
        let threads = StageOrder { threads: Some(3), supply: None, ..order() };
        assert_eq!(StageOrder::check(threads.clone().into()).unwrap(), threads);
    }

    #[test]
    fn an_order_that_makes_no_sense_is_refused() {
        let broken = |change: fn(&mut v1::StageOrder)| {
            let mut wire = order().into();
            change(&mut wire);
            StageOrder::check(wire).unwrap_err().to_string()
        };
        assert!(broken(|o| o.model_hash = vec![1; 31].into()).contains("31 bytes"));
        assert!(broken(|o| o.end_block = 15).contains("15"));
        assert!(broken(|o| o.stage = 2).contains("stage 2"));
        assert!(broken(|o| o.model.clear()).contains("lacks its model"));
        let broken = |change: fn(&mut v1::Supply)| {
            let mut wire = v1::StageOrder::from(order());
            change(wire.supply.as_mut().unwrap());
            StageOrder::check(wire).unwrap_err().to_string()
        };
        assert!(broken(|s| s.model_shape.clear()).contains("model description"));
        assert!(broken(|s| s.model_shape = " ".repeat(300 << 10)).contains("307200"));
        assert!(broken(|s| s.slice = None).contains("its file"));
        assert!(broken(|s| s.sources.clear()).contains("lacks sources"));
        assert!(broken(|s| s.sources[0].addresses.clear()).contains("lacks addresses"));
        assert!(broken(|s| s.sources = vec![s.sources[0].clone(); 66]).contains("66 sources"));
    }

    proptest! {
        #[test]
        fn garbled_orders_never_panic(
            garble in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = v1::StageOrder::from(order()).encode_to_vec();
            for (at, byte) in garble {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(Ok(order)) = v1::StageOrder::decode(&bytes[..]).map(StageOrder::check) {
                prop_assert!(order.stage < order.n_stages);
            }
        }
    }
}
