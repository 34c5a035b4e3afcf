//! Tensors: their types with block and byte sizes, as ggml has them, and where their bytes lie.
//!
//! Knows sizes, not contents: nothing here dequantises.

use std::fmt;

/// A tensor's element type, with ggml's codes (`ggml/include/ggml.h`, `enum ggml_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs, non_camel_case_types, reason = "each is ggml's own name")]
pub enum TensorType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q8_1 = 9,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    Q8_K = 15,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
    Q2_0 = 42,
}

/// Type codes that ggml had and has removed.
const REMOVED: [u32; 8] = [4, 5, 31, 32, 33, 36, 37, 38];

/// Every type, with its name, elements per block and bytes per block (`ggml/src/ggml-common.h`).
const TYPES: &[(TensorType, &str, u64, u64)] = &[
    (TensorType::F32, "f32", 1, 4),
    (TensorType::F16, "f16", 1, 2),
    (TensorType::Q4_0, "q4_0", 32, 18),
    (TensorType::Q4_1, "q4_1", 32, 20),
    (TensorType::Q5_0, "q5_0", 32, 22),
    (TensorType::Q5_1, "q5_1", 32, 24),
    (TensorType::Q8_0, "q8_0", 32, 34),
    (TensorType::Q8_1, "q8_1", 32, 36),
    (TensorType::Q2_K, "q2_K", 256, 84),
    (TensorType::Q3_K, "q3_K", 256, 110),
    (TensorType::Q4_K, "q4_K", 256, 144),
    (TensorType::Q5_K, "q5_K", 256, 176),
    (TensorType::Q6_K, "q6_K", 256, 210),
    (TensorType::Q8_K, "q8_K", 256, 292),
    (TensorType::IQ2_XXS, "iq2_xxs", 256, 66),
    (TensorType::IQ2_XS, "iq2_xs", 256, 74),
    (TensorType::IQ3_XXS, "iq3_xxs", 256, 98),
    (TensorType::IQ1_S, "iq1_s", 256, 50),
    (TensorType::IQ4_NL, "iq4_nl", 32, 18),
    (TensorType::IQ3_S, "iq3_s", 256, 110),
    (TensorType::IQ2_S, "iq2_s", 256, 82),
    (TensorType::IQ4_XS, "iq4_xs", 256, 136),
    (TensorType::I8, "i8", 1, 1),
    (TensorType::I16, "i16", 1, 2),
    (TensorType::I32, "i32", 1, 4),
    (TensorType::I64, "i64", 1, 8),
    (TensorType::F64, "f64", 1, 8),
    (TensorType::IQ1_M, "iq1_m", 256, 56),
    (TensorType::BF16, "bf16", 1, 2),
    (TensorType::TQ1_0, "tq1_0", 256, 54),
    (TensorType::TQ2_0, "tq2_0", 256, 66),
    (TensorType::MXFP4, "mxfp4", 32, 17),
    (TensorType::NVFP4, "nvfp4", 64, 36),
    (TensorType::Q1_0, "q1_0", 128, 18),
    (TensorType::Q2_0, "q2_0", 64, 18),
];

impl TensorType {
    /// Every type ggml has.
    pub fn all() -> impl Iterator<Item = Self> {
        TYPES.iter().map(|row| row.0)
    }

    /// The type with this code.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::all().find(|kind| *kind as u32 == code)
    }

    /// Whether ggml once had a type with this code.
    pub(crate) fn is_removed(code: u32) -> bool {
        REMOVED.contains(&code)
    }

    /// ggml's name of it.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Elements per block; a row holds whole blocks.
    pub fn block_elements(self) -> u64 {
        self.row().2
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> u64 {
        self.row().3
    }

    /// Whether llama.cpp can multiply a weight matrix of this type, and so also look up and dequantise its rows:
    /// those with a `vec_dot` in `ggml/src/ggml-cpu/ggml-cpu.c`. For any other it calls a null function.
    pub fn can_multiply(self) -> bool {
        !matches!(self, Self::F64 | Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::Q8_1 | Self::Q8_K)
    }

    /// Bytes of a row of `elements`; none where that is not whole blocks or does not fit 64 bits.
    pub fn row_bytes(self, elements: u64) -> Option<u64> {
        let (_, _, block, bytes) = self.row();
        if elements.is_multiple_of(*block) { (elements / block).checked_mul(*bytes) } else { None }
    }

    fn row(self) -> &'static (Self, &'static str, u64, u64) {
        TYPES.iter().find(|row| row.0 == self).unwrap_or(&TYPES[0])
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor of a file: its shape, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub kind: TensorType,
    /// Elements along each dimension, the contiguous one first (ggml's `ne`); 1 to 4 of them.
    pub dims: Vec<u64>,
    /// Index of the part that holds it, in order of the split.
    pub part: usize,
    /// Where its bytes start in that part.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Index of the block it belongs to (`blk.7.…` is 7) and the rest of its name.
    pub fn block(&self) -> Option<(u32, &str)> {
        let (index, rest) = self.name.strip_prefix("blk.")?.split_once('.')?;
        Some((index.parse().ok()?, rest))
    }
}

/// Size of a tensor in bytes, if it is whole blocks and fits 64 bits.
pub(crate) fn tensor_bytes(kind: TensorType, dims: &[u64]) -> Option<u64> {
    let (&row, rest) = dims.split_first()?;
    rest.iter().try_fold(kind.row_bytes(row)?, |bytes, &dim| bytes.checked_mul(dim))
}
