//! How to plan: everything that is a choice and not a fact.

use cluster::LinkEncoding;

/// By what a plan is judged; `objective/` holds one file for each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ObjectiveKind {
    /// The paper's congestion model (E2LLM, section 3.3).
    Els,
    /// Finishing time, after HexGen-2 (E2LLM, section 4.2).
    Ft,
    /// The strongest replicas prefill, after Splitwise (E2LLM, section 4.2).
    Splitwise,
    /// Shoal's: simulated waiting, time to first token and generation speed.
    #[default]
    Queue,
}

impl ObjectiveKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Els, Self::Ft, Self::Splitwise, Self::Queue];

    /// Its name, as on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Els => "els",
            Self::Ft => "ft",
            Self::Splitwise => "splitwise",
            Self::Queue => "queue",
        }
    }
}

/// How decode times are read off the curves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum DecodeReading {
    /// Micro-batches on the measured batch curve, at the workload's mean context: what hardware does.
    #[default]
    Batched,
    /// One request's time at the slot's full context, times the requests: the paper's.
    Serial,
}

/// How many slots a decode replica gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum SlotRule {
    /// The number with the most tokens per second, the largest among equals; partitions are chosen for it.
    #[default]
    MostTokens,
    /// The largest number that fits and keeps the speed asked for; partitions have the fastest slowest stage. The
    /// paper's.
    Largest,
    /// Each replica may have either.
    Either,
}

/// Whether blocks that differ are planned as they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BlockDetail {
    /// Each with its own time and size.
    #[default]
    Exact,
    /// All as their mean, as the paper does.
    Averaged,
}

/// How caches of blocks with a sliding window are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// Each slot has its window and one micro-batch of `n_ubatch` (llama.cpp with `kv_unified = false`).
    PerSlot {
        /// Rows computed at once.
        n_ubatch: u32,
    },
    /// The slots' windows share one micro-batch (llama.cpp with `kv_unified = true`).
    Unified {
        /// Rows computed at once.
        n_ubatch: u32,
    },
}

/// How hidden rows may travel between stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EncodingRule {
    /// Always so.
    Fixed(LinkEncoding),
    /// A smaller one only where it makes a replica over 1 % faster.
    WhereItBinds,
}

/// Choices of the planner.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// By what plans are judged.
    pub objective: ObjectiveKind,
    /// How decode times are read.
    pub reading: DecodeReading,
    /// How slots are chosen.
    pub slots: SlotRule,
    /// Whether blocks are averaged.
    pub blocks: BlockDetail,
    /// How sliding windows are cached.
    pub kv_layout: KvLayout,
    /// Bytes per cached element: 2 for f16.
    pub kv_element_bytes: f64,
    /// How rows travel.
    pub encoding: EncodingRule,
    /// Tokens per prefill chunk.
    pub prefill_chunk: u32,
    /// If given, stages may only begin at these blocks (and at 0).
    pub cut_points: Option<Vec<u32>>,
    /// The seed of every random choice.
    pub seed: u64,
    /// Seeds of workloads that `queue` simulates.
    pub simulated_seeds: Vec<u64>,
    /// What a large search may spend.
    pub effort: Effort,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            objective: ObjectiveKind::default(),
            reading: DecodeReading::default(),
            slots: SlotRule::default(),
            blocks: BlockDetail::default(),
            kv_layout: KvLayout::PerSlot { n_ubatch: 512 },
            kv_element_bytes: 2.0,
            encoding: EncodingRule::Fixed(LinkEncoding::F32),
            prefill_chunk: 2048,
            cut_points: None,
            seed: 0,
            simulated_seeds: vec![1, 2, 3],
            effort: Effort::default(),
        }
    }
}

/// Bounds on searches that could go on for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Steps of the exact search beyond which the genetic one is used: what 14 different devices need.
    pub exact_steps: u64,
    /// Steps of laying groups out that a search may take: one is a device among others where all blocks are alike, and
    /// many where they are not. Beyond, the genetic search is used, and ends before its last generation.
    pub layout_steps: u64,
    /// Plans that are looked at one by one, where an objective needs that.
    pub enumerated_plans: usize,
    /// Plans that `queue` simulates where it cannot simulate all.
    pub simulated_plans: usize,
    /// Individuals of the genetic search.
    pub population: usize,
    /// Its generations.
    pub generations: usize,
    /// Individuals that survive unchanged.
    pub elites: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Self {
            exact_steps: 2_500_000,
            layout_steps: 4_000_000,
            enumerated_plans: 400_000,
            simulated_plans: 8_000,
            population: 64,
            generations: 60,
            elites: 8,
        }
    }
}
