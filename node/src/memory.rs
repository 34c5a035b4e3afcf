//! Whether a replica fits into this host's memory, said with numbers before anything is loaded. What a stage needs is
//! estimated by `cluster`; layers on a GPU with memory of its own are left out there, where the driver's own refusal is the check.

use std::fmt;

use cluster::{
    Bytes, CONTEXT_STEP, LayerRange, Load, MemoryCosts, ModelShape, StageIndex, StageLoad, StageMemory,
    stage_memory,
};
use thiserror::Error;

/// What to do about a replica that does not fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MemoryCheck {
    /// Refuse it.
    #[default]
    Enforce,
    /// Try it: the estimate may be wrong, and there may be swap.
    Warn,
    /// Leave it to the nodes that run the stages.
    Elsewhere,
}

/// The memory does not suffice.
#[derive(Debug, Error)]
#[error(
    "the model does not fit: {}{needed} of memory and {available} are available ({}); {remedy}",
    subject(*replicas),
    list(stages)
)]
pub struct MemoryError {
    /// For all stages on this host.
    pub needed: Bytes,
    /// Replicas that this is for, all alike.
    pub replicas: u32,
    /// What there is.
    pub available: Bytes,
    /// What each stage of a replica needs, and what for.
    pub stages: Vec<(LayerRange, StageMemory)>,
    /// What would fit.
    pub remedy: Remedy,
}

/// What would make a replica fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// A smaller cache.
    SmallerCache {
        /// The largest context per slot that fits with the same slots.
        n_ctx: Option<u32>,
        /// The largest number of slots that fits with the same context.
        slots: Option<u32>,
    },
    /// Nothing of this size: the weights alone are too large.
    SmallerModel {
        /// Bytes of all weights.
        weights: Bytes,
    },
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SmallerCache { n_ctx: Some(n_ctx), slots: Some(slots) } => {
                write!(f, "it would fit with --ctx {n_ctx}, or with --slots {slots}")
            }
            Self::SmallerCache { n_ctx: Some(n_ctx), slots: None } => {
                write!(f, "it would fit with --ctx {n_ctx}")
            }
            Self::SmallerCache { n_ctx: None, slots: Some(slots) } => {
                write!(f, "it would fit with --slots {slots}")
            }
            Self::SmallerCache { n_ctx: None, slots: None } => {
                write!(f, "it would fit only with both fewer --slots and a smaller --ctx")
            }
            Self::SmallerModel { weights } => write!(
                f,
                "its weights are {weights}, so no context would fit: take a smaller quantisation, or close other programs"
            ),
        }
    }
}

/// A model as far as its memory is concerned.
#[derive(Clone, Copy)]
pub(crate) struct Footprint<'a> {
    pub(crate) shape: &'a ModelShape,
    pub(crate) costs: &'a MemoryCosts,
}

impl Footprint<'_> {
    /// What each stage will need.
    pub(crate) fn estimate(self, stages: &[StageLoad], load: Load) -> Vec<StageMemory> {
        stages.iter().map(|stage| stage_memory(self.shape, stage, load, self.costs)).collect()
    }

    /// Refuses replicas alike whose stages together need more than `available`.
    pub(crate) fn check(
        self,
        stages: &[StageLoad],
        load: Load,
        replicas: u32,
        available: Bytes,
    ) -> Result<Vec<StageMemory>, MemoryError> {
        let total =
            |needs: &[StageMemory]| needs.iter().map(StageMemory::total).sum::<Bytes>() * u64::from(replicas);
        let needs = self.estimate(stages, load);
        let needed = total(&needs);
        if needed <= available {
            return Ok(needs);
        }
        let fits = |load: Load| total(&self.estimate(stages, load)) <= available;
        let layers = stages.iter().map(|stage| stage.layers);
        Err(MemoryError {
            needed,
            replicas,
            available,
            stages: layers.zip(needs).collect(),
            remedy: remedy(stages, load, &fits),
        })
    }
}

fn remedy(stages: &[StageLoad], load: Load, fits: &dyn Fn(Load) -> bool) -> Remedy {
    let smallest = Load { slots: 1, n_ctx: CONTEXT_STEP.min(load.n_ctx), ..load };
    if !fits(smallest) {
        return Remedy::SmallerModel { weights: stages.iter().map(|stage| stage.weights).sum() };
    }
    let steps = (load.n_ctx - 1) / CONTEXT_STEP;
    let n_ctx = largest(steps, |n| fits(Load { n_ctx: n * CONTEXT_STEP, ..load })).map(|n| n * CONTEXT_STEP);
    let slots = largest(load.slots - 1, |slots| fits(Load { slots, ..load }));
    Remedy::SmallerCache { n_ctx, slots }
}

/// The largest number from 1 to `most` for which `fits`, which holds for all smaller ones too.
fn largest(most: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    (low > 0).then_some(low)
}

fn subject(replicas: u32) -> String {
    if replicas == 1 { "it needs ".to_owned() } else { format!("its {replicas} replicas need ") }
}

fn list(stages: &[(LayerRange, StageMemory)]) -> String {
    let describe = |(i, (layers, memory)): (usize, &(LayerRange, StageMemory))| {
        let stage = StageIndex(i as u32);
        let StageMemory { weights, cache, compute, runtime } = memory;
        let total = memory.total();
        format!(
            "{stage}, layers {layers}: {total} = weights {weights} + cache {cache} + compute {compute} + runtime {runtime}"
        )
    };
    stages.iter().enumerate().map(describe).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use cluster::{Attention, BlockKind, BlockShape, FeedForward};

    use super::*;

    const LOAD: Load = Load { slots: 4, n_ctx: 4096, n_ubatch: 256 };

    fn shape() -> ModelShape {
        let kind = BlockKind { attention: Attention::Full, feed_forward: FeedForward::Dense };
        let block = BlockShape {
            kind,
            weight_bytes: Bytes::from_mib(100),
            kv_elements_per_token: 2048,
            state_bytes_per_slot: Bytes::ZERO,
        };
        ModelShape {
            architecture: "llama".to_owned(),
            name: None,
            n_embd: 2048,
            n_vocab: 32_000,
            n_ctx_train: 4096,
            n_head: vec![16; 10],
            n_head_kv: vec![8; 10],
            blocks: vec![block; 10],
            embedding_bytes: Bytes::from_mib(60),
            head_bytes: Bytes::from_mib(60),
            tied: false,
            global_bytes: Bytes::ZERO,
            experts: None,
            range_rules: Vec::new(),
        }
    }

    fn estimate(stages: &[StageLoad], load: Load) -> Vec<StageMemory> {
        let costs = MemoryCosts::assumed(&shape());
        Footprint { shape: &shape(), costs: &costs }.estimate(stages, load)
    }

    fn check(stages: &[StageLoad], load: Load, available: Bytes) -> Result<Vec<StageMemory>, MemoryError> {
        let costs = MemoryCosts::assumed(&shape());
        Footprint { shape: &shape(), costs: &costs }.check(stages, load, 1, available)
    }

    fn stages() -> Vec<StageLoad> {
        let ranges = LayerRange::from_cuts(&[5], 10).unwrap();
        let weights = Bytes::from_mib(500);
        ranges.into_iter().map(|layers| StageLoad { layers, weights, gpu_layers: 0 }).collect()
    }

    #[test]
    fn the_cache_of_a_stage_is_that_of_its_blocks() {
        let needs = estimate(&stages(), LOAD);
        assert_eq!(needs[0].cache, Bytes(5 * 4 * 4096 * 2048 * 2));
        assert_eq!(needs[0].weights, Bytes::from_mib(500));
        assert!(needs[1].runtime > needs[0].runtime, "the master has the vocabulary");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_would() {
        let needs = estimate(&stages(), LOAD);
        let needed: Bytes = needs.iter().map(StageMemory::total).sum();
        assert!(check(&stages(), LOAD, needed).is_ok());
        let error = check(&stages(), LOAD, needed.saturating_sub(Bytes(1))).unwrap_err();
        let Remedy::SmallerCache { n_ctx: Some(n_ctx), slots: Some(slots) } = error.remedy else {
            panic!("{error}");
        };
        assert_eq!((n_ctx, slots), (3840, 3));
        let text = error.to_string();
        for part in [&needed.to_string(), "stage 1, layers 5..10", "--ctx 3840", "--slots 3"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn several_replicas_need_room_for_each() {
        let costs = MemoryCosts::assumed(&shape());
        let footprint = Footprint { shape: &shape(), costs: &costs };
        let one: Bytes = footprint.estimate(&stages(), LOAD).iter().map(StageMemory::total).sum();
        assert!(footprint.check(&stages(), LOAD, 3, Bytes(one.0 * 3)).is_ok());
        let error = footprint.check(&stages(), LOAD, 3, Bytes(one.0 * 3 - 1)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("its 3 replicas need {}", Bytes(one.0 * 3))), "{text}");
    }

    #[test]
    fn weights_that_are_too_large_need_a_smaller_model() {
        let error = check(&stages(), LOAD, Bytes::from_mib(900)).unwrap_err();
        assert_eq!(error.remedy, Remedy::SmallerModel { weights: Bytes::from_mib(1000) });
    }

    #[test]
    fn an_absurd_request_gives_an_absurd_but_ordered_answer() {
        let load = Load { slots: u32::MAX, n_ctx: u32::MAX, n_ubatch: u32::MAX };
        let error = check(&stages(), load, Bytes::from_mib(64_000)).unwrap_err();
        assert!(error.needed > error.available);
    }

    #[cfg(not(target_os = "macos"))]
    #[test]
    fn layers_on_a_gpu_take_no_memory_of_the_host() {
        let mut stages = stages();
        stages[0].gpu_layers = 5;
        let needs = estimate(&stages, LOAD);
        assert_eq!((needs[0].weights, needs[0].cache), (Bytes::ZERO, Bytes::ZERO));
    }
}
