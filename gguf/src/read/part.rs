//! Reads and validates one file: header, metadata, tensor table. Tensor data are never touched.

use std::collections::{HashMap, HashSet};

use super::cursor::{Cursor, Field};
use crate::error::{Error, Fault};
use crate::tensor::tensor_bytes;
use crate::{Part, TensorInfo, TensorType, Value};

/// The alignment of a file that states none (`GGUF_DEFAULT_ALIGNMENT`).
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
/// The key that states it.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
/// The GGUF specification's limit on a key, 2¹⁶ − 1 bytes.
const MAX_KEY: u64 = 65_535;
/// `GGML_MAX_NAME` in `ggml/include/ggml.h` counts the closing zero.
const MAX_TENSOR_NAME: u64 = 63;
/// `GGML_MAX_DIMS`.
const MAX_DIMS: u32 = 4;
/// Key length and one character, value type, a one-byte value.
const LEAST_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;
/// Name length and one character, number of dimensions, one dimension, type, offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// A metadata entry, and where it stands.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) value: Value,
    pub(crate) offset: u64,
}

/// What one file says.
#[derive(Debug)]
pub(crate) struct PartContents {
    pub(crate) version: u32,
    pub(crate) alignment: u64,
    pub(crate) entries: Vec<Entry>,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// A tensor whose offset is still relative to the data section.
struct Declared {
    info: TensorInfo,
    /// Where in the file its offset stands.
    offset_at: u64,
}

pub(crate) fn read_part(part: &Part, index: usize) -> Result<PartContents, Error> {
    let mut cursor = Cursor::new(part);
    let version = read_version(&mut cursor)?;
    let n_tensors = cursor.count(Field::Header("tensor count"), LEAST_TENSOR_BYTES)?;
    let n_entries = cursor.count(Field::Header("metadata count"), LEAST_ENTRY_BYTES)?;
    let entries = read_entries(&mut cursor, n_entries)?;
    let alignment = alignment(&cursor, &entries)?;
    let declared = read_tensors(&mut cursor, n_tensors, index)?;
    let tensors = place_tensors(&cursor, declared, alignment)?;
    Ok(PartContents { version, alignment, entries, tensors })
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, Error> {
    let field = Field::Header("magic");
    let magic: [u8; 4] = cursor.take(field)?;
    if magic != *b"GGUF" {
        return Err(cursor.fault(0, field, Fault::Magic(magic)));
    }
    let field = Field::Header("version");
    match cursor.u32(field)? {
        version @ (2 | 3) => Ok(version),
        version => {
            // As llama.cpp tells them: a small number read in the wrong byte order has its low half empty.
            let swapped = version != 0 && version & 0xffff == 0;
            let fault = if swapped { Fault::BigEndian } else { Fault::Version(version) };
            Err(cursor.fault(4, field, fault))
        }
    }
}

fn read_entries(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<Entry>, Error> {
    let mut entries = Vec::new();
    let mut seen = HashSet::new();
    for number in 0..count {
        let offset = cursor.offset();
        let field = Field::Entry("key", number);
        let key = cursor.name(field, MAX_KEY)?;
        if !seen.insert(key.clone()) {
            return Err(cursor.fault(offset, Field::Key("key", &key), Fault::Duplicate));
        }
        let value = cursor.value(&key)?;
        entries.push(Entry { key, value, offset });
    }
    Ok(entries)
}

fn alignment(cursor: &Cursor<'_>, entries: &[Entry]) -> Result<u64, Error> {
    let Some(entry) = entries.iter().find(|entry| entry.key == ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let field = Field::Key("value", ALIGNMENT_KEY);
    match entry.value {
        Value::U32(n) if n.is_power_of_two() && (8..=65_536).contains(&n) => Ok(n.into()),
        Value::U32(n) => Err(cursor.fault(entry.offset, field, Fault::Alignment(n.into()))),
        ref other => {
            let found = other.value_type().name();
            Err(cursor.fault(entry.offset, field, Fault::WrongType { found, wanted: "u32" }))
        }
    }
}

fn read_tensors(cursor: &mut Cursor<'_>, count: u64, part: usize) -> Result<Vec<Declared>, Error> {
    let mut tensors = Vec::new();
    let mut seen = HashSet::new();
    for number in 0..count {
        let offset = cursor.offset();
        let name = cursor.name(Field::TensorNumber("name", number), MAX_TENSOR_NAME)?;
        if !seen.insert(name.clone()) {
            return Err(cursor.fault(offset, Field::Tensor("name", &name), Fault::Duplicate));
        }
        tensors.push(read_tensor(cursor, name, part)?);
    }
    Ok(tensors)
}

fn read_tensor(cursor: &mut Cursor<'_>, name: String, part: usize) -> Result<Declared, Error> {
    let at = cursor.offset();
    let dims = read_dims(cursor, &name)?;
    let type_at = cursor.offset();
    let field = Field::Tensor("type", &name);
    let code = cursor.u32(field)?;
    let kind = TensorType::from_code(code).ok_or_else(|| {
        let removed = TensorType::is_removed(code);
        let fault = if removed { Fault::RemovedTensorType(code) } else { Fault::TensorType(code) };
        cursor.fault(type_at, field, fault)
    })?;
    let block = kind.block_elements();
    let row = dims.first().copied().unwrap_or(0);
    if !row.is_multiple_of(block) {
        let fault = Fault::PartialBlock { row, block, kind: kind.name() };
        return Err(cursor.fault(at, Field::Tensor("dimensions", &name), fault));
    }
    let bytes = tensor_bytes(kind, &dims).filter(|bytes| i64::try_from(*bytes).is_ok());
    let bytes = bytes.ok_or_else(|| cursor.fault(at, Field::Tensor("dimensions", &name), Fault::Overflow))?;
    let offset_at = cursor.offset();
    let offset = cursor.u64(Field::Tensor("data offset", &name))?;
    Ok(Declared { info: TensorInfo { name, kind, dims, part, offset, bytes }, offset_at })
}

fn read_dims(cursor: &mut Cursor<'_>, name: &str) -> Result<Vec<u64>, Error> {
    let field = Field::Tensor("dimensions", name);
    let at = cursor.offset();
    let n_dims = cursor.u32(field)?;
    if !(1..=MAX_DIMS).contains(&n_dims) {
        return Err(cursor.fault(at, field, Fault::Dimensions(n_dims)));
    }
    let mut dims = Vec::with_capacity(n_dims as usize);
    let mut elements: u64 = 1;
    for index in 0..n_dims {
        let at = cursor.offset();
        let dim = cursor.u64(field)?;
        if dim == 0 {
            return Err(cursor.fault(at, field, Fault::EmptyDimension(index)));
        }
        elements = elements
            .checked_mul(dim)
            .filter(|n| i64::try_from(*n).is_ok())
            .ok_or_else(|| cursor.fault(at, field, Fault::Overflow))?;
        dims.push(dim);
    }
    Ok(dims)
}

/// Makes offsets absolute and checks that each tensor's data are aligned, in the file, and its own.
fn place_tensors(
    cursor: &Cursor<'_>,
    declared: Vec<Declared>,
    alignment: u64,
) -> Result<Vec<TensorInfo>, Error> {
    // The cursor is inside the file, so this cannot overflow by more than an alignment.
    let data_start = cursor.offset().div_ceil(alignment).saturating_mul(alignment);
    let length = cursor.length();
    let mut tensors = Vec::with_capacity(declared.len());
    let mut offset_at = HashMap::with_capacity(declared.len());
    for Declared { mut info, offset_at: at } in declared {
        let field = Field::Tensor("data offset", &info.name);
        if !info.offset.is_multiple_of(alignment) {
            let fault = Fault::Misaligned { offset: info.offset, alignment };
            return Err(cursor.fault(at, field, fault));
        }
        let start = data_start.saturating_add(info.offset);
        let end = start.saturating_add(info.bytes);
        if end > length {
            return Err(cursor.fault(at, field, Fault::OutOfRange { start, end, length }));
        }
        info.offset = start;
        offset_at.insert(start, at);
        tensors.push(info);
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|info| info.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            let at = offset_at.get(&pair[1].offset).copied().unwrap_or(0);
            let fault = Fault::Overlap(pair[0].name.clone());
            return Err(cursor.fault(at, Field::Tensor("data offset", &pair[1].name), fault));
        }
    }
    Ok(tensors)
}
