//! `model.json`: what a model is made of, to plan for one that is not at hand. `shoal slice info --json` prints it.

use cluster::{BlockKind, BlockShape, Bytes, Experts, ModelShape, RangeRule};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::profile::{AttentionEntry, FeedForwardEntry};
use super::{PlanFileError, PlannerFile, current};

/// Blocks of a model, at most: more than any has, and few enough for an entry that repeats a block not to fill the memory.
const MOST_BLOCKS: u64 = 4096;

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelShapeFile {
    /// Version of the format.
    #[serde(default = "current")]
    pub version: u32,
    /// What the model is called, as in profiles that name it.
    pub model: String,
    /// `general.architecture`, llama.cpp's name of it.
    pub architecture: String,
    /// `general.name`.
    #[serde(default)]
    pub name: Option<String>,
    /// Width of a hidden row, in f32 elements.
    pub n_embd: u32,
    /// Vocabulary size.
    #[serde(default)]
    pub n_vocab: u32,
    /// Context length the model was trained for, in tokens.
    #[serde(default)]
    pub n_ctx_train: u32,
    /// Query heads of each block.
    #[serde(default)]
    pub n_head: Vec<u32>,
    /// Key and value heads of each block.
    #[serde(default)]
    pub n_head_kv: Vec<u32>,
    /// The blocks, in order.
    pub blocks: Vec<ModelBlockEntry>,
    /// Bytes of the token embedding matrix.
    #[serde(default)]
    pub embedding_bytes: u64,
    /// Bytes of output norm and LM head; where the head is tied, of the shared matrix.
    pub head_bytes: u64,
    /// Whether the LM head is the token embedding matrix.
    #[serde(default)]
    pub tied: bool,
    /// Bytes of tensors that every slice carries.
    #[serde(default)]
    pub global_bytes: u64,
    /// Present for mixture-of-experts models.
    #[serde(default)]
    pub experts: Option<ExpertsEntry>,
    /// Limits on the layer ranges it can be cut into.
    #[serde(default)]
    pub range_rules: Vec<RangeRuleEntry>,
    /// Printed by `shoal slice info`, not used in planning: the files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<String>,
    /// Printed by `shoal slice info`, not used in planning: bytes of all parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Printed by `shoal slice info`, not used in planning: `certified`, `uncertified` or `refused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub support: Option<String>,
    /// Printed by `shoal slice info`, not used in planning: why the architecture is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Printed by `shoal slice info`, not used in planning: bytes of an f16 cache for a token, of all blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bytes_per_token: Option<u64>,
}

/// A block, or several in a row that are alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelBlockEntry {
    /// How many in a row.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub count: u32,
    /// Its type.
    pub kind: BlockKindEntry,
    /// Bytes of its tensors.
    pub weight_bytes: u64,
    /// Elements of keys and values cached per token; 0 for a recurrent block.
    pub kv_elements_per_token: u64,
    /// Bytes of recurrent state per sequence.
    #[serde(default)]
    pub state_bytes_per_slot: u64,
}

/// The type of a block.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockKindEntry {
    /// How it mixes tokens.
    pub attention: AttentionEntry,
    /// How it transforms each.
    pub feed_forward: FeedForwardEntry,
}

/// Mixture-of-experts sizes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpertsEntry {
    /// Experts per block.
    pub count: u32,
    /// Experts used per token.
    pub used: u32,
}

/// A limit on the layer ranges that can be cut out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "snake_case", tag = "rule")]
pub enum RangeRuleEntry {
    /// A range starts at a multiple of `step`.
    StartMultiple {
        /// In blocks.
        step: u32,
    },
    /// A range holds at least one attention block and one recurrent block.
    BothMemories,
    /// A range holds at least one block with a sliding window.
    SlidingBlock,
    /// A part of the model must not have this many blocks.
    ForbiddenLength {
        /// The number of blocks.
        length: u32,
    },
    /// Only the whole model can be run.
    WholeOnly,
}

const fn one() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
const fn is_one(count: &u32) -> bool {
    *count == 1
}

impl PlannerFile for ModelShapeFile {
    const WHAT: &'static str = "the model description";

    fn version(&self) -> u32 {
        self.version
    }
}

impl ModelShapeFile {
    /// The model in the cluster's nouns.
    pub fn shape(&self) -> Result<ModelShape, PlanFileError> {
        let blocks: u64 = self.blocks.iter().map(|entry| u64::from(entry.count)).sum();
        if blocks > MOST_BLOCKS {
            return Err(PlanFileError::TooManyBlocks { blocks, most: MOST_BLOCKS });
        }
        let of = |entry: &ModelBlockEntry| std::iter::repeat_n(entry.block(), entry.count as usize);
        Ok(ModelShape {
            architecture: self.architecture.clone(),
            name: self.name.clone(),
            n_embd: self.n_embd,
            n_vocab: self.n_vocab,
            n_ctx_train: self.n_ctx_train,
            n_head: self.n_head.clone(),
            n_head_kv: self.n_head_kv.clone(),
            blocks: self.blocks.iter().flat_map(of).collect(),
            embedding_bytes: Bytes(self.embedding_bytes),
            head_bytes: Bytes(self.head_bytes),
            tied: self.tied,
            global_bytes: Bytes(self.global_bytes),
            experts: self.experts.map(|experts| Experts { count: experts.count, used: experts.used }),
            range_rules: self.range_rules.iter().copied().map(RangeRule::from).collect(),
        })
    }

    /// The file of a model that is called `model`.
    pub fn new(model: String, shape: &ModelShape) -> Self {
        Self {
            version: current(),
            model,
            architecture: shape.architecture.clone(),
            name: shape.name.clone(),
            n_embd: shape.n_embd,
            n_vocab: shape.n_vocab,
            n_ctx_train: shape.n_ctx_train,
            n_head: shape.n_head.clone(),
            n_head_kv: shape.n_head_kv.clone(),
            blocks: shape.blocks.iter().map(ModelBlockEntry::new).collect(),
            embedding_bytes: shape.embedding_bytes.0,
            head_bytes: shape.head_bytes.0,
            tied: shape.tied,
            global_bytes: shape.global_bytes.0,
            experts: shape.experts.map(|experts| ExpertsEntry { count: experts.count, used: experts.used }),
            range_rules: shape.range_rules.iter().copied().map(RangeRuleEntry::from).collect(),
            parts: Vec::new(),
            bytes: None,
            support: None,
            reason: None,
            kv_bytes_per_token: None,
        }
    }
}

impl ModelBlockEntry {
    fn block(&self) -> BlockShape {
        BlockShape {
            kind: BlockKind {
                attention: self.kind.attention.into(),
                feed_forward: self.kind.feed_forward.into(),
            },
            weight_bytes: Bytes(self.weight_bytes),
            kv_elements_per_token: self.kv_elements_per_token,
            state_bytes_per_slot: Bytes(self.state_bytes_per_slot),
        }
    }

    fn new(block: &BlockShape) -> Self {
        Self {
            count: 1,
            kind: BlockKindEntry {
                attention: block.kind.attention.into(),
                feed_forward: block.kind.feed_forward.into(),
            },
            weight_bytes: block.weight_bytes.0,
            kv_elements_per_token: block.kv_elements_per_token,
            state_bytes_per_slot: block.state_bytes_per_slot.0,
        }
    }
}

impl From<RangeRuleEntry> for RangeRule {
    fn from(entry: RangeRuleEntry) -> Self {
        match entry {
            RangeRuleEntry::StartMultiple { step } => Self::StartMultiple { step },
            RangeRuleEntry::BothMemories => Self::BothMemories,
            RangeRuleEntry::SlidingBlock => Self::SlidingBlock,
            RangeRuleEntry::ForbiddenLength { length } => Self::ForbiddenLength { length },
            RangeRuleEntry::WholeOnly => Self::WholeOnly,
        }
    }
}

impl From<RangeRule> for RangeRuleEntry {
    fn from(rule: RangeRule) -> Self {
        match rule {
            RangeRule::StartMultiple { step } => Self::StartMultiple { step },
            RangeRule::BothMemories => Self::BothMemories,
            RangeRule::SlidingBlock => Self::SlidingBlock,
            RangeRule::ForbiddenLength { length } => Self::ForbiddenLength { length },
            RangeRule::WholeOnly => Self::WholeOnly,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"{
        "model": "hybrid", "architecture": "qwen3next", "n_embd": 2048, "head_bytes": 200, "tied": true, "global_bytes": 7,
        "experts": {"count": 64, "used": 4},
        "blocks": [
            {"count": 3, "kind": {"attention": {"type": "recurrent"}, "feed_forward": "mixture_of_experts"},
             "weight_bytes": 90, "kv_elements_per_token": 0, "state_bytes_per_slot": 5},
            {"kind": {"attention": {"type": "full"}, "feed_forward": "dense"}, "weight_bytes": 100,
             "kv_elements_per_token": 1024}
        ],
        "range_rules": [{"rule": "start_multiple", "step": 2}, {"rule": "both_memories"}]
    }"#;

    #[test]
    fn a_model_survives_the_way_into_nouns_and_back() {
        let shape = ModelShapeFile::from_json(EXAMPLE).unwrap().shape().unwrap();
        assert_eq!(shape.n_layer(), 4);
        assert_eq!(
            (shape.blocks[2].state_bytes_per_slot, shape.blocks[3].weight_bytes),
            (Bytes(5), Bytes(100))
        );
        let again = ModelShapeFile::new("hybrid".into(), &shape);
        assert_eq!(again.shape().unwrap(), shape);
        assert_eq!(ModelShapeFile::from_json(&serde_json::to_string(&again).unwrap()).unwrap(), again);
    }

    #[test]
    fn a_block_repeated_without_end_is_refused_by_number() {
        let endless = EXAMPLE.replace("\"count\": 3,", "\"count\": 4000000000,");
        let error = ModelShapeFile::from_json(&endless).unwrap().shape().unwrap_err();
        assert!(error.to_string().contains("4000000001"), "{error}");
    }
}
