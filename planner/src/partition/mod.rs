//! How one replica's blocks are shared out over its devices, each device's again over GPU and CPU, and which device is
//! the master.
//!
//! Two exact algorithms for one question: [`dp`], the paper's dynamic program, for any model, and [`waterfill`], many
//! times faster, for models whose blocks are all alike. A test holds them to the same answers. [`relaxed`] bounds both, so that
//! hopeless ones are never asked for. None knows links, roles or objectives.

pub(crate) mod dp;
pub(crate) mod relaxed;
mod token;
pub(crate) mod waterfill;

pub(crate) use token::TokenHops;

/// Part of a stage: one processor with memory for some blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tier<'a> {
    /// Seconds of a block, by type; empty where there is no such processor.
    pub cost: &'a [f64],
    /// Seconds on top if it has any block, or the head.
    pub call: f64,
    /// Bytes for blocks.
    pub room: f64,
    /// Bytes for blocks if the stage is the master.
    pub room_as_master: f64,
}

impl Tier<'_> {
    pub(crate) fn room(&self, master: Master) -> f64 {
        if self.cost.is_empty() {
            return -1.0;
        }
        match master {
            Master::Yes => self.room_as_master,
            Master::No => self.room,
        }
    }
}

/// Whether a stage holds norm and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Master {
    Yes,
    No,
}

/// One of a device's processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Gpu,
    Cpu,
}

/// A device as a stage, for one phase and number of slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageModel<'a> {
    pub gpu: Tier<'a>,
    pub cpu: Tier<'a>,
    /// Seconds of norm and head, if it is the master.
    pub head: f64,
    /// Where they are computed.
    pub head_on: Side,
    /// Seconds of looking embeddings up, if it is the first.
    pub embedding: f64,
    /// Seconds that every visit costs.
    pub overhead: f64,
}

/// What to share out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks<'a> {
    /// Type of each block.
    pub kind_of: &'a [u16],
    /// Bytes of a block with its cache, by type.
    pub need: &'a [f64],
}

/// Sum and maximum over stages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    pub sum: f64,
    pub slowest: f64,
}

/// A partition: stages in the order of the devices given, rotated so that the master is last.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Partition {
    /// Which of the given devices is the master.
    pub master: usize,
    /// For each given device, blocks on its GPU and on its CPU.
    pub blocks: Vec<(u32, u32)>,
    /// The slowest stage.
    pub slowest: f64,
    /// The sum of all stages.
    pub sum: f64,
}

/// The order of a chain of `k` stages with the given master: a rotation that puts it last.
pub(crate) fn rotation(k: usize, master: usize) -> impl Iterator<Item = usize> {
    (1..=k).map(move |i| (master + i) % k)
}

#[cfg(test)]
mod tests;
