//! Contents of random tensors.

use std::ffi::{CStr, c_void};

use llama_sys as sys;

/// Fills a tensor with numbers that depend on `seed` and its name.
///
/// # Safety
///
/// `tensor` must live and have a buffer of its whole size.
pub(super) unsafe fn fill(tensor: *mut sys::ggml_tensor, seed: u64) {
    // SAFETY: the caller vouches for the tensor; its name ends in NUL (ggml.c).
    let (kind, width, rows, count, bytes, name) = unsafe {
        let name = CStr::from_ptr((*tensor).name.as_ptr()).to_string_lossy();
        let count = sys::ggml_nelements(tensor);
        ((*tensor).type_, (*tensor).ne[0], sys::ggml_nrows(tensor), count, sys::ggml_nbytes(tensor), name)
    };
    let shape = Shape::of(&name, width);
    let mut random = Random(seed ^ hash(&name));
    let values: Vec<f32> = (0..count).map(|_| shape.apply(random.next())).collect();
    let mut quantised = vec![0_u8; bytes];
    // SAFETY: `values` has the tensor's elements, `quantised` its bytes. ggml_quantize_chunk writes whole rows of every type
    // that needs no importance matrix (ggml.c); f32 is copied there.
    unsafe {
        sys::ggml_quantize_chunk(
            kind,
            values.as_ptr(),
            quantised.as_mut_ptr().cast::<c_void>(),
            0,
            rows,
            width,
            std::ptr::null(),
        );
        sys::ggml_backend_tensor_set(tensor, quantised.as_ptr().cast::<c_void>(), 0, bytes);
    }
}

/// What a random number in [-0.5, 0.5) becomes.
#[derive(Clone, Copy)]
struct Shape {
    base: f32,
    scale: f32,
}

impl Shape {
    fn of(name: &str, width: i64) -> Self {
        let width = width as f32;
        let (base, scale) = if name.contains("norm") {
            (1.0, 0.2)
        } else if name.contains("ssm_a") {
            // The state's decay: it must be negative, or the state grows without bound.
            (-1.0, 1.0)
        } else if name.contains("rope_") {
            // Frequency factors, which divide.
            (1.5, 1.0)
        } else if name.contains("token_embd") {
            // About as large as what blocks add to a row.
            (0.0, 1.0)
        } else if name.ends_with(".bias") {
            (0.0, 0.2)
        } else {
            // Uniform numbers have a variance of 1/12, so a product of `width` of them with a row of unit size has
            // about unit size.
            (0.0, 3.4 / width.sqrt())
        };
        Self { base, scale }
    }

    fn apply(self, number: f32) -> f32 {
        self.base + self.scale * number
    }
}

/// SplitMix64: good enough for weights, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        // The upper 24 bits: as many as a float holds.
        (mixed >> 40) as f32 / (1_u32 << 24) as f32 - 0.5
    }
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
