//! Hidden rows as bytes: little-endian, row-major, f32 or f16. Knows nothing of frames, slots or limits.
//!
//! One copy each way: out of the computed rows into the message, and out of the message into the batch.

use bytes::Bytes;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use thiserror::Error;

use crate::v1;

/// How hidden rows travel on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RowEncoding {
    /// Exact.
    #[default]
    F32,
    /// Half the bytes; values beyond f16's range are clamped to ±65504, because one infinite element would turn
    /// every later row of its sequence into NaN.
    F16,
}

/// An encoding number that this version does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("row encoding {0} is unknown: this version knows 1 (f32) and 2 (f16)")]
pub struct UnknownEncoding(pub i32);

impl RowEncoding {
    /// Bytes of one element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }

    /// Encodes `[rows, n_embd]` f32 elements.
    pub fn encode(self, rows: &[f32]) -> Bytes {
        match self {
            Self::F32 => encode_f32(rows),
            Self::F16 => encode_f16(rows),
        }
    }

    /// Appends the elements in `data` to `out`. A trailing part of an element is ignored: lengths are checked
    /// where a frame is received.
    pub fn append(self, data: &[u8], out: &mut Vec<f32>) {
        match self {
            Self::F32 => append_f32(data, out),
            Self::F16 => append_f16(data, out),
        }
    }
}

impl TryFrom<i32> for RowEncoding {
    type Error = UnknownEncoding;

    fn try_from(number: i32) -> Result<Self, UnknownEncoding> {
        match v1::Encoding::try_from(number) {
            Ok(v1::Encoding::F32) => Ok(Self::F32),
            Ok(v1::Encoding::F16) => Ok(Self::F16),
            Ok(v1::Encoding::Unspecified) | Err(_) => Err(UnknownEncoding(number)),
        }
    }
}

impl From<RowEncoding> for v1::Encoding {
    fn from(encoding: RowEncoding) -> Self {
        match encoding {
            RowEncoding::F32 => Self::F32,
            RowEncoding::F16 => Self::F16,
        }
    }
}

#[cfg(target_endian = "little")]
fn encode_f32(rows: &[f32]) -> Bytes {
    Bytes::copy_from_slice(bytemuck::cast_slice(rows))
}

#[cfg(target_endian = "big")]
fn encode_f32(rows: &[f32]) -> Bytes {
    rows.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn append_f32(data: &[u8], out: &mut Vec<f32>) {
    // The bytes of a message have no alignment, so they cannot be cast; this compiles to a plain copy.
    out.extend(data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
}

const F16_INFINITY: u16 = 0x7C00;
const F16_SIGN: u16 = 0x8000;

/// Elements converted at once on the stack.
const BLOCK: usize = 512;

fn encode_f16(rows: &[f32]) -> Bytes {
    let mut bytes = Vec::with_capacity(rows.len() * 2);
    let mut bits = [0_u16; BLOCK];
    for block in rows.chunks(BLOCK) {
        let bits = &mut bits[..block.len()];
        bits.reinterpret_cast_mut::<half::f16>().convert_from_f32_slice(block);
        for element in &mut *bits {
            if *element & !F16_SIGN == F16_INFINITY {
                *element -= 1;
            }
            *element = element.to_le();
        }
        bytes.extend_from_slice(bytemuck::cast_slice(bits));
    }
    bytes.into()
}

fn append_f16(data: &[u8], out: &mut Vec<f32>) {
    out.reserve(data.len() / 2);
    let (mut bits, mut floats) = ([0_u16; BLOCK], [0.0_f32; BLOCK]);
    for bytes in data.chunks(BLOCK * 2) {
        let n = bytes.len() / 2;
        for (element, pair) in bits.iter_mut().zip(bytes.chunks_exact(2)) {
            *element = u16::from_le_bytes([pair[0], pair[1]]);
        }
        bits[..n].reinterpret_cast::<half::f16>().convert_to_f32_slice(&mut floats[..n]);
        out.extend_from_slice(&floats[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(encoding: RowEncoding, rows: &[f32]) -> Vec<f32> {
        let data = encoding.encode(rows);
        assert_eq!(data.len(), rows.len() * encoding.element_bytes());
        let mut out = vec![7.0];
        encoding.append(&data, &mut out);
        assert_eq!(out.remove(0), 7.0);
        out
    }

    #[test]
    fn f16_clamps_instead_of_overflowing_to_infinity() {
        let rows = [1e9, -1e9, f32::INFINITY, 65504.0, -65504.0, 0.5];
        assert_eq!(round_trip(RowEncoding::F16, &rows), [65504.0, -65504.0, 65504.0, 65504.0, -65504.0, 0.5]);
        assert!(round_trip(RowEncoding::F16, &[f32::NAN])[0].is_nan());
    }

    #[test]
    fn f32_is_little_endian() {
        assert_eq!(&RowEncoding::F32.encode(&[1.0])[..], &1.0_f32.to_le_bytes());
    }

    #[test]
    fn unknown_encodings_are_refused() {
        for number in [0, 3, -1, i32::MAX] {
            assert_eq!(RowEncoding::try_from(number), Err(UnknownEncoding(number)));
        }
    }

    proptest! {
        #[test]
        fn f32_rows_come_back_bit_for_bit(bits in proptest::collection::vec(any::<u32>(), 0..3000)) {
            let rows: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
            let back: Vec<u32> = round_trip(RowEncoding::F32, &rows).iter().map(|x| x.to_bits()).collect();
            prop_assert_eq!(back, bits);
        }

        #[test]
        fn f16_rows_come_back_within_half_precision(rows in proptest::collection::vec(-1000.0_f32..1000.0, 0..3000)) {
            for (x, y) in rows.iter().zip(round_trip(RowEncoding::F16, &rows)) {
                prop_assert!((x - y).abs() <= x.abs() / 1024.0 + 1e-6, "{} came back as {}", x, y);
            }
        }

        #[test]
        fn any_bytes_decode_without_panicking(data in proptest::collection::vec(any::<u8>(), 0..4100)) {
            for encoding in [RowEncoding::F32, RowEncoding::F16] {
                let mut out = Vec::new();
                encoding.append(&data, &mut out);
                prop_assert_eq!(out.len(), data.len() / encoding.element_bytes());
            }
        }
    }
}
