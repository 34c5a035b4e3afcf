//! What the crate's tests have in common.

use cluster::{Attention, BlockKind, BlockShape, Bytes, FeedForward, ModelShape};
use protocol::plan_files::{PlanFile, PlannerFile};

/// A small model of so many blocks alike.
pub(crate) fn model(n_layer: usize) -> ModelShape {
    let block = BlockShape {
        kind: BlockKind { attention: Attention::Full, feed_forward: FeedForward::Dense },
        weight_bytes: Bytes::from_mib(2),
        kv_elements_per_token: 384,
        state_bytes_per_slot: Bytes::ZERO,
    };
    ModelShape {
        architecture: "llama".into(),
        name: None,
        n_embd: 576,
        n_vocab: 49_152,
        n_ctx_train: 2048,
        n_head: vec![9; n_layer],
        n_head_kv: vec![3; n_layer],
        blocks: vec![block; n_layer],
        embedding_bytes: Bytes::from_mib(30),
        head_bytes: Bytes::from_mib(30),
        tied: true,
        global_bytes: Bytes::ZERO,
        experts: None,
        range_rules: Vec::new(),
    }
}

/// A plan file with these replicas.
pub(crate) fn plan_file(replicas: &str) -> PlanFile {
    PlanFile::from_json(&format!(r#"{{"objective": "by hand", "replicas": {replicas}}}"#)).unwrap()
}
