//! The devices and the model that are emulated where none are given: a laptop and a small workstation with a GPU, and a model of
//! 32 blocks. The times are round figures of about the right size.

use anyhow::Result;
use cluster::{
    Attention, BlockCurves, BlockKind, BlockShape, Bytes, ComputeBuffers, DeviceId, DeviceProfile,
    FeedForward, Millis, ModelShape, ProcessorProfile, Surface, SurfaceError,
};

const BLOCKS: u32 = 32;
const ROWS: [u32; 6] = [1, 2, 4, 8, 16, 32];
const KIND: BlockKind = BlockKind { attention: Attention::Full, feed_forward: FeedForward::Dense };

/// Shorter than any clock tells.
const NOTHING: Millis = Millis(1e-6);

/// A model of about two billion parameters in four bits.
pub(super) fn model() -> ModelShape {
    let block = BlockShape {
        kind: KIND,
        weight_bytes: Bytes::from_mib(32),
        kv_elements_per_token: 1024,
        state_bytes_per_slot: Bytes::ZERO,
    };
    ModelShape {
        architecture: "llama".to_owned(),
        name: Some("built-in".to_owned()),
        n_embd: 2048,
        n_vocab: 32_000,
        n_ctx_train: 131_072,
        n_head: vec![16; BLOCKS as usize],
        n_head_kv: vec![4; BLOCKS as usize],
        blocks: vec![block; BLOCKS as usize],
        embedding_bytes: Bytes::from_mib(40),
        head_bytes: Bytes::from_mib(40),
        tied: false,
        global_bytes: Bytes::ZERO,
        experts: None,
        range_rules: Vec::new(),
    }
}

/// Two devices.
pub(super) fn profiles() -> Result<Vec<DeviceProfile>> {
    let laptop = Processor { block_ms: 0.8, row_ms: 0.05, depth_ms: 0.02, head_ms: 1.5, call_ms: 0.2 };
    let workstation = Processor { block_ms: 0.4, row_ms: 0.02, depth_ms: 0.01, head_ms: 0.8, call_ms: 0.3 };
    Ok(vec![laptop.device("laptop", Where::Cpu)?, workstation.device("workstation", Where::Gpu)?])
}

/// The same device, taking no time for anything.
pub(super) fn without_time(profile: &DeviceProfile) -> Result<DeviceProfile> {
    let flat = || Surface::flat(vec![1], vec![NOTHING]);
    let processor = |of: &ProcessorProfile| {
        let block =
            |curves: &BlockCurves| Ok(BlockCurves { kind: curves.kind, decode: flat()?, prefill: flat()? });
        let blocks = of.blocks.iter().map(block).collect::<Result<_, SurfaceError>>()?;
        Ok::<_, SurfaceError>(ProcessorProfile { blocks, head: flat()?, call: None })
    };
    Ok(DeviceProfile {
        gpu: profile.gpu.as_ref().map(processor).transpose()?,
        cpu: profile.cpu.as_ref().map(processor).transpose()?,
        hop_overhead: Millis(0.0),
        embedding: None,
        cold_call: None,
        ..profile.clone()
    })
}

enum Where {
    Cpu,
    Gpu,
}

/// What a processor's curves are drawn from.
struct Processor {
    /// A block with one row.
    block_ms: f64,
    /// Each further row of it.
    row_ms: f64,
    /// Each row at 4096 tokens of depth.
    depth_ms: f64,
    head_ms: f64,
    call_ms: f64,
}

impl Processor {
    fn device(&self, name: &str, on: Where) -> Result<DeviceProfile> {
        let processor = Some(self.profile()?);
        let (gpu, cpu) = match on {
            Where::Cpu => (None, processor),
            Where::Gpu => (processor, None),
        };
        Ok(DeviceProfile {
            device: DeviceId(name.to_owned()),
            model: "built-in".to_owned(),
            runtime: "built-in".to_owned(),
            gpu,
            cpu,
            hop_overhead: Millis(0.3),
            buffers: ComputeBuffers { prefill: Bytes::from_mib(64), decode: Bytes::from_mib(16) },
            embedding: Some(Surface::flat(vec![1, 32], vec![Millis(0.01), Millis(0.1)])?),
            cold_call: None,
            memory: None,
        })
    }

    fn profile(&self) -> Result<ProcessorProfile, SurfaceError> {
        let decode = ROWS.iter().flat_map(|&rows| {
            let shallow = self.block_ms + self.row_ms * f64::from(rows - 1);
            [Millis(shallow), Millis(shallow + self.depth_ms * f64::from(rows))]
        });
        let prefill = [64, 256, 1024].map(|tokens| Millis(self.block_ms + self.row_ms * f64::from(tokens)));
        let flat = |ms: f64| Surface::flat(vec![1, 32], vec![Millis(ms), Millis(2.0 * ms)]);
        let block = BlockCurves {
            kind: KIND,
            decode: Surface::new(ROWS.to_vec(), vec![0, 4096], decode.collect())?,
            prefill: Surface::flat(vec![64, 256, 1024], prefill.to_vec())?,
        };
        Ok(ProcessorProfile {
            blocks: vec![block],
            head: flat(self.head_ms)?,
            call: Some(flat(self.call_ms)?),
        })
    }
}
