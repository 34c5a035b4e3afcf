//! How long a stage takes for a batch, read from its device's profile. Pure arithmetic on measured curves; the planner has the
//! same sum on tables, since it asks millions of times.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{BlockKind, DeviceId, DeviceProfile, Millis, ProcessorProfile};

/// Which of the two kinds of work a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// One row for each sequence.
    Decode,
    /// Many rows of one sequence.
    Prefill,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
        })
    }
}

/// One of the two processors of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessorKind {
    /// The GPU.
    Gpu,
    /// The CPU.
    Cpu,
}

impl std::fmt::Display for ProcessorKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
        })
    }
}

/// One call of a part of a stage on one processor.
struct StageCall<'a> {
    phase: Phase,
    /// Blocks of each type.
    blocks: &'a [(BlockKind, u32)],
    rows: f64,
    depth: f64,
    outputs: f64,
}

/// What a stage holds of a model, and where.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StageParts {
    /// Its blocks on the CPU, counted by type.
    pub cpu: Vec<(BlockKind, u32)>,
    /// Its blocks on the GPU, counted by type.
    pub gpu: Vec<(BlockKind, u32)>,
    /// The embedding table, which stage 0 looks tokens up in.
    pub embeds: bool,
    /// Whether it is one stage of several, so that every visit also crosses a link's two ends.
    pub in_chain: bool,
}

/// One batch of a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageBatch {
    /// The kind of work.
    pub phase: Phase,
    /// Its rows.
    pub rows: f64,
    /// Tokens that the caches hold before; the mean over the rows, since curves are linear in it.
    pub depth: f64,
    /// Rows of which logits are wanted; 0 on any stage but a master.
    pub outputs: f64,
    /// How long the device had nothing to do before.
    pub idle: Millis,
}

/// A profile lacks what a stage would use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotMeasured {
    /// Nothing was measured on the processor.
    #[error("the stage has blocks on the {0}, which was not measured")]
    Processor(ProcessorKind),
    /// A type of block was not measured on the processor.
    #[error("a block with {:?} attention and {:?} feed-forward was not measured on the {on}", kind.attention, kind.feed_forward)]
    Block {
        /// The type.
        kind: BlockKind,
        /// The processor.
        on: ProcessorKind,
    },
}

/// A profile lacks what a stage of the device would use.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the profile of {device} cannot tell the time of a stage: {what}")]
pub struct StageTimeError {
    /// Whose profile.
    pub device: DeviceId,
    /// What is missing.
    #[source]
    pub what: NotMeasured,
}

impl ProcessorProfile {
    /// What a call takes: its fixed cost, its blocks, and the head. None if a type of block was not measured.
    fn call_time(&self, call: &StageCall<'_>) -> Option<Millis> {
        let mut time = self.call.as_ref().map_or(0.0, |fixed| fixed.at(call.rows, call.depth).0);
        for (kind, count) in call.blocks {
            let curves = self.block(*kind)?;
            let surface = match call.phase {
                Phase::Decode => &curves.decode,
                Phase::Prefill => &curves.prefill,
            };
            time += f64::from(*count) * surface.at(call.rows, call.depth).0;
        }
        if call.outputs > 0.0 {
            time += self.head.at(call.outputs, 0.0).0;
        }
        Some(Millis(time))
    }
}

impl StageParts {
    /// Blocks of the given types on the CPU and on the GPU.
    pub fn new(cpu: &[BlockKind], gpu: &[BlockKind]) -> Self {
        Self { cpu: counted(cpu), gpu: counted(gpu), embeds: false, in_chain: false }
    }

    /// Blocks of the given types, in order, the last `gpu_blocks` of them on the GPU, as llama.cpp lays them out.
    pub fn split(kinds: &[BlockKind], gpu_blocks: u32) -> Self {
        let (cpu, gpu) = kinds.split_at(kinds.len().saturating_sub(gpu_blocks as usize));
        Self::new(cpu, gpu)
    }

    /// The processor that computes output norm and LM head, if this is a master: the GPU if any block is there.
    pub fn head(&self) -> ProcessorKind {
        if self.gpu.is_empty() { ProcessorKind::Cpu } else { ProcessorKind::Gpu }
    }
}

fn counted(kinds: &[BlockKind]) -> Vec<(BlockKind, u32)> {
    let mut counts: Vec<(BlockKind, u32)> = Vec::new();
    for kind in kinds {
        match counts.iter_mut().find(|(seen, _)| seen == kind) {
            Some((_, count)) => *count += 1,
            None => counts.push((*kind, 1)),
        }
    }
    counts
}

impl DeviceProfile {
    /// The time from a batch's arrival at a stage of this device until its result has gone out: what the processors compute, one
    /// after the other, the embedding look-up on stage 0, what a link's ends cost, and what an idle gap before adds.
    ///
    /// # Errors
    /// When the stage uses what was not measured.
    pub fn stage_time(&self, parts: &StageParts, batch: &StageBatch) -> Result<Millis, StageTimeError> {
        let overhead = if parts.in_chain { self.hop_overhead.0 } else { 0.0 };
        Ok(Millis(self.compute_time(parts, batch)?.0 + overhead))
    }

    /// The part of [`stage_time`](Self::stage_time) in which the stage computes.
    ///
    /// # Errors
    /// When the stage uses what was not measured.
    pub fn compute_time(&self, parts: &StageParts, batch: &StageBatch) -> Result<Millis, StageTimeError> {
        let mut time = 0.0;
        for (on, blocks) in [(ProcessorKind::Cpu, &parts.cpu), (ProcessorKind::Gpu, &parts.gpu)] {
            let outputs = if parts.head() == on { batch.outputs } else { 0.0 };
            if !blocks.is_empty() || outputs > 0.0 {
                time += self
                    .processor_time(on, blocks, StageBatch { outputs, ..*batch })
                    .map_err(|what| StageTimeError { device: self.device.clone(), what })?;
            }
        }
        if parts.embeds {
            time += self.embedding.as_ref().map_or(0.0, |curve| curve.at(batch.rows, 0.0).0);
        }
        Ok(Millis(time + self.cold_call.as_ref().map_or(0.0, |cold| cold.after(batch.idle).0)))
    }

    /// What was measured on a processor.
    pub fn processor(&self, kind: ProcessorKind) -> Option<&ProcessorProfile> {
        match kind {
            ProcessorKind::Gpu => self.gpu.as_ref(),
            ProcessorKind::Cpu => self.cpu.as_ref(),
        }
    }

    fn processor_time(
        &self,
        on: ProcessorKind,
        blocks: &[(BlockKind, u32)],
        batch: StageBatch,
    ) -> Result<f64, NotMeasured> {
        let profile = self.processor(on).ok_or(NotMeasured::Processor(on))?;
        let StageBatch { phase, rows, depth, outputs, .. } = batch;
        let call = StageCall { phase, blocks, rows, depth, outputs };
        profile.call_time(&call).map(|time| time.0).ok_or_else(|| {
            let missing = blocks.iter().find(|(kind, _)| profile.block(*kind).is_none());
            missing.map_or(NotMeasured::Processor(on), |(kind, _)| NotMeasured::Block { kind: *kind, on })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, BlockCurves, ColdCall, FeedForward, Surface};

    const FULL: BlockKind = BlockKind { attention: Attention::Full, feed_forward: FeedForward::Dense };
    const WINDOW: BlockKind =
        BlockKind { attention: Attention::SlidingWindow { window: 8 }, feed_forward: FeedForward::Dense };
    const DECODE: StageBatch =
        StageBatch { phase: Phase::Decode, rows: 1.0, depth: 0.0, outputs: 0.0, idle: Millis(0.0) };

    fn flat(time: f64) -> Surface {
        Surface::flat(vec![1], vec![Millis(time)]).unwrap()
    }

    fn processor(times: [f64; 4]) -> ProcessorProfile {
        let [full, window, head, call] = times;
        let block = |kind, time: f64| BlockCurves { kind, decode: flat(time), prefill: flat(time * 10.0) };
        ProcessorProfile {
            blocks: vec![block(FULL, full), block(WINDOW, window)],
            head: flat(head),
            call: Some(flat(call)),
        }
    }

    fn profile() -> DeviceProfile {
        DeviceProfile {
            device: DeviceId("desk".to_owned()),
            model: "m".to_owned(),
            runtime: "r".to_owned(),
            gpu: Some(processor([1.0, 2.0, 4.0, 0.25])),
            cpu: Some(processor([10.0, 20.0, 40.0, 0.5])),
            hop_overhead: Millis(0.125),
            buffers: Default::default(),
            embedding: Some(flat(0.0625)),
            cold_call: Some(ColdCall::new(vec![Millis(10.0)], vec![Millis(3.0)]).unwrap()),
            memory: None,
        }
    }

    #[test]
    fn a_stage_is_its_blocks_where_they_lie_and_one_call_of_each_processor() {
        let profile = profile();
        let time = |parts: &StageParts, batch| profile.stage_time(parts, &batch).unwrap();
        let split = StageParts::split(&[FULL, FULL, WINDOW, FULL], 2);
        assert_eq!(time(&split, DECODE), Millis(2.0 * 10.0 + 0.5 + 2.0 + 1.0 + 0.25));
        let prefill = StageBatch { phase: Phase::Prefill, ..DECODE };
        assert_eq!(time(&split, prefill), Millis(200.0 + 0.5 + 30.0 + 0.25));
        let all = StageParts::split(&[FULL], 9);
        assert_eq!(time(&all, DECODE), Millis(1.25));
    }

    #[test]
    fn the_head_is_computed_where_the_last_blocks_are() {
        let batch = StageBatch { outputs: 1.0, ..DECODE };
        let on =
            |gpu_blocks| profile().stage_time(&StageParts::split(&[FULL, FULL], gpu_blocks), &batch).unwrap();
        assert_eq!(on(2), Millis(2.0 + 4.0 + 0.25));
        assert_eq!(on(1), Millis(10.0 + 0.5 + 1.0 + 4.0 + 0.25));
        assert_eq!(on(0), Millis(20.0 + 40.0 + 0.5));
    }

    #[test]
    fn chain_embedding_and_idle_gap_come_on_top() {
        let parts = StageParts { embeds: true, in_chain: true, ..StageParts::split(&[FULL], 1) };
        let batch = StageBatch { idle: Millis(5.0), ..DECODE };
        let profile = profile();
        assert_eq!(profile.compute_time(&parts, &batch).unwrap(), Millis(1.25 + 0.0625 + 1.5));
        assert_eq!(profile.stage_time(&parts, &batch).unwrap(), Millis(1.25 + 0.0625 + 1.5 + 0.125));
    }

    #[test]
    fn what_was_not_measured_is_named() {
        let mut profile = profile();
        profile.cpu = None;
        let error = profile.stage_time(&StageParts::split(&[FULL], 0), &DECODE).unwrap_err();
        assert_eq!(error.what, NotMeasured::Processor(ProcessorKind::Cpu));
        let other = BlockKind { attention: Attention::Recurrent, ..FULL };
        let error = profile.stage_time(&StageParts::split(&[FULL, other], 2), &DECODE).unwrap_err();
        assert_eq!(error.what, NotMeasured::Block { kind: other, on: ProcessorKind::Gpu });
        assert!(error.to_string().contains("desk"));
    }
}
