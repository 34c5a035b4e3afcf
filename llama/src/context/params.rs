//! How a context is set up, checked before llama.cpp would assert.

use llama_sys as sys;

use crate::threads::MAX_THREADS;
use crate::{Error, Model};

/// What a run gives back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Hidden rows after the last block: for every slice but a model's last.
    Hidden,
    /// Logits of the rows that want them: for the last slice, or a whole model.
    Logits,
}

/// How attention is computed. It also decides how the KV cache is laid out (V is transposed without flash attention),
/// so stages that hand caches to each other must agree; that is why nothing is left to llama.cpp's own choice by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FlashAttention {
    /// Flash attention. Where a GPU lacks the kernel for a model's head size, ggml computes that part on the CPU.
    /// llama.cpp turns it off by itself for Grok alone.
    #[default]
    Enabled,
    /// Separate products and softmax.
    Disabled,
    /// Flash attention if every block's device has it: llama.cpp's default. Depends on the machine.
    Auto,
}

/// Type of the numbers in one half of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// 16 bits: llama.cpp's default.
    #[default]
    F16,
    /// 32 bits.
    F32,
    /// 8.5 bits. For V only with flash attention.
    Q8_0,
}

/// How slots share the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvLayout {
    /// A cache for each slot: attention reads only the slot's own rows. Slots whose numbers are consecutive are
    /// computed together, so the slots in use should be numbered without gaps.
    #[default]
    PerSlot,
    /// One cache for all slots; copies between slots share cells.
    Unified,
}

/// Which of ggml's CPU kernels are used. GPUs are not affected.
///
/// ggml picks kernels by the number of rows: products of f32, f16, q8_0 and q4_0 matrices differ between one row and
/// several (ggml-cpu/llamafile/sgemm.cpp), flash attention between fewer than 64 rows of a slot and more, and, once a
/// cache has 512 cells, between one slot alone and several (ggml-cpu/ops.cpp, `flash_attn_ext_f16`). Quantised
/// activations hide most of that, but not all: the same prompt can end in another text when it is computed beside
/// others, in other chunks, or on a replica that replays it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Numerics {
    /// The fastest kernels.
    #[default]
    Fast,
    /// Kernels that compute a row alike whatever is computed beside it. Together with
    /// [`ExtraBuffers::Plain`](crate::ExtraBuffers::Plain), results then depend on a slot's own rows alone (recurrent
    /// blocks: and on how these are cut into runs). Prompts are slower.
    RowInvariant,
}

/// How to make a [`SliceContext`](crate::SliceContext).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextParams {
    /// Tokens of one slot. llama.cpp rounds the memory up to a multiple of 256.
    pub n_ctx_per_slot: u32,
    /// Sequences that can be kept at once, 1 to 256.
    pub n_slots: u32,
    /// Most rows of one run.
    pub n_batch: u32,
    /// Most rows computed at once; longer runs are cut. Sets the size of the compute buffers.
    pub n_ubatch: u32,
    /// CPU threads for runs of one row.
    pub threads: u32,
    /// CPU threads for runs of several rows.
    pub threads_batch: u32,
    /// What a run gives back.
    pub output: Output,
    /// Most rows of one run that may want logits. Each reserves a row of the vocabulary's size. Not used for
    /// [`Output::Hidden`].
    pub max_outputs: u32,
    /// How attention is computed.
    pub flash_attention: FlashAttention,
    /// Type of keys.
    pub kv_type_k: KvType,
    /// Type of values.
    pub kv_type_v: KvType,
    /// How slots share the cache.
    pub layout: KvLayout,
    /// Which CPU kernels are used.
    pub numerics: Numerics,
}

impl ContextParams {
    /// Parameters for `n_slots` slots of `n_ctx_per_slot` tokens, all else as llama-server has it: at most 2048 rows a
    /// run, 512 computed at once, one row of logits per slot. Threads: one per core that the system reports.
    pub fn new(output: Output, n_slots: u32, n_ctx_per_slot: u32) -> Self {
        let cores =
            std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(1));
        Self {
            n_ctx_per_slot,
            n_slots,
            n_batch: 2048,
            n_ubatch: 512,
            threads: cores,
            threads_batch: cores,
            output,
            max_outputs: n_slots,
            flash_attention: FlashAttention::default(),
            kv_type_k: KvType::default(),
            kv_type_v: KvType::default(),
            layout: KvLayout::default(),
            numerics: Numerics::default(),
        }
    }

    /// Refuses what llama.cpp would assert on.
    pub(crate) fn check(&self) -> Result<(), Error> {
        // SAFETY: returns a constant (llama.cpp, `llama_max_parallel_sequences`).
        let max_slots = unsafe { sys::llama_max_parallel_sequences() } as u64;
        let max_threads = u64::from(MAX_THREADS);
        let ranges = [
            ("n_slots", self.n_slots, max_slots),
            ("n_ctx_per_slot", self.n_ctx_per_slot, MAX_CONTEXT / u64::from(self.n_slots.max(1))),
            ("n_batch", self.n_batch, MAX_BATCH),
            ("n_ubatch", self.n_ubatch, MAX_BATCH),
            ("threads", self.threads, max_threads),
            ("threads_batch", self.threads_batch, max_threads),
            ("max_outputs", self.max_outputs, MAX_BATCH),
        ];
        for (parameter, value, most) in ranges {
            let value = u64::from(value);
            if value == 0 || value > most {
                return Err(Error::Parameter { parameter, value, allowed: format!("between 1 and {most}") });
            }
        }
        if self.kv_type_v == KvType::Q8_0 && self.flash_attention == FlashAttention::Disabled {
            let reason = "values of type q8_0 need flash attention".to_owned();
            return Err(Error::Unsupported { reason });
        }
        Ok(())
    }

    /// llama.cpp's parameters, without the eval callback.
    pub(crate) fn to_c(&self, model: &Model) -> sys::llama_context_params {
        // SAFETY: returns a struct by value (llama-context.cpp).
        let mut params = unsafe { sys::llama_context_default_params() };
        params.n_ctx = self.n_ctx_per_slot * self.n_slots;
        params.n_batch = self.n_batch.max(self.n_slots);
        params.n_ubatch = self.n_ubatch.min(self.n_batch);
        params.n_seq_max = self.n_slots;
        // llama.cpp reserves a row per sequence and asserts that this is no more than the maximum
        // (llama-context.cpp, `output_reserve`).
        params.n_outputs_max = match self.output {
            Output::Hidden => params.n_batch,
            Output::Logits => self.max_outputs.max(self.n_slots),
        };
        params.n_threads = i32::try_from(self.threads).unwrap_or(1);
        params.n_threads_batch = i32::try_from(self.threads_batch).unwrap_or(1);
        params.flash_attn_type = match self.flash_attention {
            FlashAttention::Enabled => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
            FlashAttention::Disabled => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
            FlashAttention::Auto => sys::LLAMA_FLASH_ATTN_TYPE_AUTO,
        };
        params.type_k = self.kv_type_k.to_c();
        params.type_v = self.kv_type_v.to_c();
        params.kv_unified = self.layout == KvLayout::Unified;
        // Sliding-window layers keep their window only: the memory is what makes such models fit.
        params.swa_full = false;
        params.offload_kqv = true;
        params.op_offload = true;
        params.no_perf = true;
        params.embeddings = false;
        debug_assert!(model.n_layer() > 0);
        params
    }
}

impl KvType {
    fn to_c(self) -> sys::ggml_type {
        match self {
            Self::F16 => sys::GGML_TYPE_F16,
            Self::F32 => sys::GGML_TYPE_F32,
            Self::Q8_0 => sys::GGML_TYPE_Q8_0,
        }
    }
}

/// Positions are signed 32-bit numbers (llama.h, `llama_pos`), and so is their number over all slots.
const MAX_CONTEXT: u64 = 1 << 30;
/// Rows are counted with signed 32-bit numbers (llama.h, `llama_batch`); no host computes near that many at once.
const MAX_BATCH: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_out_of_range_are_refused_with_the_range() {
        let good = ContextParams::new(Output::Logits, 4, 512);
        good.check().unwrap();
        let refused = |params: ContextParams| params.check().unwrap_err().to_string();
        assert_eq!(
            refused(ContextParams { n_slots: 300, ..good.clone() }),
            "n_slots is 300, but must be between 1 and 256"
        );
        assert!(refused(ContextParams { n_ubatch: 0, ..good.clone() }).contains("n_ubatch is 0"));
        assert!(
            refused(ContextParams { n_ctx_per_slot: 1 << 29, ..good.clone() }).contains("n_ctx_per_slot")
        );
        let transposed =
            ContextParams { kv_type_v: KvType::Q8_0, flash_attention: FlashAttention::Disabled, ..good };
        assert!(refused(transposed).contains("flash attention"));
    }
}
