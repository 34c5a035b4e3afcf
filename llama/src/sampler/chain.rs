//! llama.cpp's filters between logits and draw. None of them has a state that depends on what was sampled before.

use std::ptr::NonNull;

use llama_sys as sys;

use super::{SamplerError, SamplerParams, draw};
use crate::Token;
use crate::shim;

/// Tokens that top-p and min-p keep at least.
const MIN_KEEP: usize = 1;

#[derive(Debug)]
pub(super) struct Chain {
    handle: NonNull<sys::llama_sampler>,
}

// SAFETY: a sampler chain is plain memory that only its owner uses (src/llama-sampler.cpp).
unsafe impl Send for Chain {}

impl Chain {
    /// The filters that `params`, which have been checked, turn on.
    pub(super) fn new(params: &SamplerParams) -> Result<Self, SamplerError> {
        // SAFETY: a constructor without arguments that could be wrong (src/llama-sampler.cpp).
        let handle =
            unsafe { sys::llama_sampler_chain_init(sys::llama_sampler_chain_params { no_perf: true }) };
        let handle =
            NonNull::new(handle).ok_or(SamplerError::Failed { reason: "no sampler chain".to_owned() })?;
        let chain = Self { handle };
        if let Some(k) = params.top_k.filter(|k| *k > 0) {
            // SAFETY: any number is taken; more than the vocabulary has keeps all (llama_sampler_top_k_impl).
            chain.add(unsafe { sys::llama_sampler_init_top_k(i32::try_from(k).unwrap_or(i32::MAX)) });
        }
        if params.top_p < 1.0 {
            // SAFETY: any number in [0, 1] is taken (llama_sampler_top_p_apply).
            chain.add(unsafe { sys::llama_sampler_init_top_p(params.top_p, MIN_KEEP) });
        }
        if params.min_p > 0.0 {
            // SAFETY: any number in (0, 1] is taken (llama_sampler_min_p_apply).
            chain.add(unsafe { sys::llama_sampler_init_min_p(params.min_p, MIN_KEEP) });
        }
        // SAFETY: any positive number is taken (llama_sampler_temp_impl).
        chain.add(unsafe { sys::llama_sampler_init_temp(params.temperature) });
        Ok(chain)
    }

    fn add(&self, sampler: *mut sys::llama_sampler) {
        // SAFETY: `sampler` is new; the chain owns it from here on (include/llama.h, llama_sampler_chain_add).
        unsafe { sys::llama_sampler_chain_add(self.handle.as_ptr(), sampler) };
    }

    /// The candidate that `uniform` in [0, 1) chooses; `None` without candidates. Reorders and overwrites them.
    pub(super) fn draw(
        &mut self,
        candidates: &mut [sys::llama_token_data],
        uniform: f64,
    ) -> Result<Option<Token>, SamplerError> {
        if candidates.is_empty() {
            // The filters assert that there are some (llama_sampler_softmax_impl).
            return Ok(None);
        }
        let mut array = sys::llama_token_data_array {
            data: candidates.as_mut_ptr(),
            size: candidates.len(),
            selected: -1,
            sorted: false,
        };
        // SAFETY: `array` describes the slice. The filters keep `data` and only reorder, change and shorten
        // (src/llama-sampler.cpp); every exception is caught (shim/grammar.cpp).
        shim::call(|error| unsafe { sys::shoal_sampler_apply(self.handle.as_ptr(), &raw mut array, error) })?;
        let kept = array.size.min(candidates.len());
        Ok(draw::pick(&mut candidates[..kept], uniform))
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        // SAFETY: made by llama_sampler_chain_init, freed once, with what was added to it.
        unsafe { sys::llama_sampler_free(self.handle.as_ptr()) };
    }
}
