//! Where a model and its context hold memory, as llama.cpp counts it.

use std::ffi::{CStr, c_char};

use llama_sys as sys;

use crate::Error;
use crate::shim;

/// Bytes held in buffers of one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryUse {
    /// ggml's buffer type, such as `CPU`, `CPU_REPACK`, `CUDA0`, `CUDA_Host`.
    pub buffer_type: String,
    /// ggml's device, such as `CPU` or `CUDA0`.
    pub device: String,
    /// Whose memory it is.
    pub place: MemoryPlace,
    /// Weights. Those that are mapped from the file are counted whole, whether they are resident or not.
    pub model: u64,
    /// KV cache and recurrent state.
    pub context: u64,
    /// Intermediate results.
    pub compute: u64,
}

impl MemoryUse {
    /// All bytes of the entry.
    pub fn total(&self) -> u64 {
        self.model + self.context + self.compute
    }
}

/// Whose memory a buffer is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPlace {
    /// The host's.
    Host,
    /// The device's own.
    Device,
}

/// Memory of a model and a context, by buffer type. Does not count the buffer of the outputs
/// (`max_outputs × n_vocab` floats in host memory).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryBreakdown {
    /// One entry per buffer type, in no particular order.
    pub uses: Vec<MemoryUse>,
}

impl MemoryBreakdown {
    /// Bytes in `place`.
    pub fn total_in(&self, place: MemoryPlace) -> u64 {
        self.uses.iter().filter(|entry| entry.place == place).map(MemoryUse::total).sum()
    }

    /// Reads the breakdown of a context.
    ///
    /// # Safety
    ///
    /// `context` must be a live context that nothing else uses meanwhile.
    pub(crate) unsafe fn of(context: *const sys::llama_context) -> Result<Self, Error> {
        let empty = sys::shoal_memory {
            buffer_type: [0; 64],
            device: [0; 64],
            host: false,
            model: 0,
            context: 0,
            compute: 0,
        };
        // More than ggml has buffer types for: one or two per device, and some for the host.
        let mut entries = [empty; 64];
        let mut count = 0;
        shim::call(|error| {
            // SAFETY: the caller vouches for `context`; the array has the length that is passed (shim/core.cpp).
            unsafe {
                sys::shoal_memory_breakdown(
                    context,
                    entries.as_mut_ptr(),
                    entries.len(),
                    &raw mut count,
                    error,
                )
            }
        })
        .map_err(Error::exception("reading the memory breakdown"))?;
        Ok(Self { uses: entries.iter().take(count).map(convert).collect() })
    }
}

fn convert(entry: &sys::shoal_memory) -> MemoryUse {
    MemoryUse {
        buffer_type: name(&entry.buffer_type),
        device: name(&entry.device),
        place: if entry.host { MemoryPlace::Host } else { MemoryPlace::Device },
        model: entry.model,
        context: entry.context,
        compute: entry.compute,
    }
}

fn name(text: &[c_char; 64]) -> String {
    // SAFETY: the shim writes names with snprintf, which terminates them inside the array (shim/core.cpp).
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}
/// Gives memory that was freed back to the system, where the C library keeps it: loading a model frees much in small pieces.
pub fn release_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: may be called at any time, by any thread (malloc_trim(3): MT-Safe).
    unsafe {
        libc::malloc_trim(0);
    }
}
