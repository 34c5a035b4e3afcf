//! A reader that walks through one part and says, when something is wrong, where it was and what it was reading.
//!
//! Allocates only for bytes that the file really has.

use std::fmt;

use crate::error::{Error, Fault, Place};
use crate::{Array, Part, Value, ValueType};

/// Bytes read at once; also the largest scalar read through the window.
const WINDOW: usize = 64 * 1024;

/// Arrays of arrays may be this deep. llama.cpp reads none, no known model has any.
const MAX_DEPTH: u32 = 4;

/// What is being read, for messages.
#[derive(Clone, Copy)]
pub(crate) enum Field<'a> {
    /// A field of the header.
    Header(&'static str),
    /// Something of the entry with this number.
    Entry(&'static str, u64),
    /// Something of the value of a key.
    Key(&'static str, &'a str),
    /// Something of the tensor with this number.
    TensorNumber(&'static str, u64),
    /// Something of a tensor.
    Tensor(&'static str, &'a str),
}

impl fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(what) => f.write_str(what),
            Self::Entry(what, number) => write!(f, "{what} of metadata entry {number}"),
            Self::Key(what, key) => write!(f, "{what} of {key:?}"),
            Self::TensorNumber(what, number) => write!(f, "{what} of tensor {number}"),
            Self::Tensor(what, name) => write!(f, "{what} of tensor {name:?}"),
        }
    }
}

pub(crate) struct Cursor<'a> {
    part: &'a Part,
    length: u64,
    at: u64,
    window: Vec<u8>,
    window_at: u64,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(part: &'a Part) -> Self {
        let length = part.bytes.len();
        Self { part, length, at: 0, window: Vec::new(), window_at: 0 }
    }

    /// Offset of the next byte.
    pub(crate) fn offset(&self) -> u64 {
        self.at
    }

    /// Size of the part.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// An error at `offset`.
    pub(crate) fn fault(&self, offset: u64, field: Field<'_>, fault: Fault) -> Error {
        Error::Malformed { place: self.place(offset, field), fault }
    }

    pub(crate) fn u32(&mut self, field: Field<'_>) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.take(field)?))
    }

    pub(crate) fn u64(&mut self, field: Field<'_>) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.take(field)?))
    }

    /// A count of things that take at least `least_bytes` each, no more than the file has room for.
    pub(crate) fn count(&mut self, field: Field<'_>, least_bytes: u64) -> Result<u64, Error> {
        let offset = self.at;
        let count = self.u64(field)?;
        let remaining = self.length - self.at;
        let most = remaining / least_bytes.max(1);
        if count <= most {
            Ok(count)
        } else {
            Err(self.fault(offset, field, Fault::Count { count, remaining, most }))
        }
    }

    /// A name: not empty, UTF-8, at most `most` bytes.
    pub(crate) fn name(&mut self, field: Field<'_>, most: u64) -> Result<String, Error> {
        let offset = self.at;
        let length = self.u64(field)?;
        if length == 0 {
            return Err(self.fault(offset, field, Fault::EmptyName));
        }
        if length > most {
            return Err(self.fault(offset, field, Fault::LongName { length, most }));
        }
        let bytes = self.bytes(length, field)?;
        String::from_utf8(bytes).map_err(|_| self.fault(offset, field, Fault::Utf8))
    }

    /// A value of the type whose code comes next.
    pub(crate) fn value(&mut self, key: &str) -> Result<Value, Error> {
        let kind = self.value_type(Field::Key("value type", key))?;
        let field = Field::Key("value", key);
        Ok(match kind {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.take(field)?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.take(field)?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.take(field)?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.take(field)?)),
            ValueType::U32 => Value::U32(self.u32(field)?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.take(field)?)),
            ValueType::U64 => Value::U64(self.u64(field)?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.take(field)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.take(field)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.take(field)?)),
            ValueType::Bool => Value::Bool(self.bool(field)?),
            ValueType::String => Value::String(self.string(field)?),
            ValueType::Array => Value::Array(self.array(key, 1)?),
        })
    }

    fn array(&mut self, key: &str, depth: u32) -> Result<Array, Error> {
        if depth > MAX_DEPTH {
            let field = Field::Key("array", key);
            return Err(self.fault(self.at, field, Fault::Depth(MAX_DEPTH)));
        }
        let kind = self.value_type(Field::Key("array element type", key))?;
        let count = self.count(Field::Key("array length", key), kind.least_bytes())?;
        let field = Field::Key("array elements", key);
        Ok(match kind {
            ValueType::U8 => Array::U8(self.numbers(count, field, u8::from_le_bytes)?),
            ValueType::I8 => Array::I8(self.numbers(count, field, i8::from_le_bytes)?),
            ValueType::U16 => Array::U16(self.numbers(count, field, u16::from_le_bytes)?),
            ValueType::I16 => Array::I16(self.numbers(count, field, i16::from_le_bytes)?),
            ValueType::U32 => Array::U32(self.numbers(count, field, u32::from_le_bytes)?),
            ValueType::I32 => Array::I32(self.numbers(count, field, i32::from_le_bytes)?),
            ValueType::U64 => Array::U64(self.numbers(count, field, u64::from_le_bytes)?),
            ValueType::I64 => Array::I64(self.numbers(count, field, i64::from_le_bytes)?),
            ValueType::F32 => Array::F32(self.numbers(count, field, f32::from_le_bytes)?),
            ValueType::F64 => Array::F64(self.numbers(count, field, f64::from_le_bytes)?),
            ValueType::Bool => Array::Bool((0..count).map(|_| self.bool(field)).collect::<Result<_, _>>()?),
            ValueType::String => {
                Array::String((0..count).map(|_| self.string(field)).collect::<Result<_, _>>()?)
            }
            ValueType::Array => {
                Array::Array((0..count).map(|_| self.array(key, depth + 1)).collect::<Result<_, _>>()?)
            }
        })
    }

    /// `count` numbers. That the file has the bytes was checked with the count.
    fn numbers<const N: usize, T>(
        &mut self,
        count: u64,
        field: Field<'_>,
        from_bytes: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Error> {
        let mut numbers = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        for _ in 0..count {
            numbers.push(from_bytes(self.take(field)?));
        }
        Ok(numbers)
    }

    fn value_type(&mut self, field: Field<'_>) -> Result<ValueType, Error> {
        let offset = self.at;
        let code = self.u32(field)?;
        ValueType::from_code(code).ok_or_else(|| self.fault(offset, field, Fault::ValueType(code)))
    }

    fn bool(&mut self, field: Field<'_>) -> Result<bool, Error> {
        let offset = self.at;
        match self.take(field)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(self.fault(offset, field, Fault::Bool(other))),
        }
    }

    fn string(&mut self, field: Field<'_>) -> Result<Vec<u8>, Error> {
        let length = self.u64(field)?;
        self.bytes(length, field)
    }

    fn bytes(&mut self, length: u64, field: Field<'_>) -> Result<Vec<u8>, Error> {
        self.check_remaining(length, field)?;
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        if bytes.len() <= WINDOW {
            self.fill(bytes.len(), field)?;
            let start = (self.at - self.window_at) as usize;
            bytes.copy_from_slice(&self.window[start..start + length as usize]);
        } else {
            self.part
                .bytes
                .read_exact_at(self.at, &mut bytes)
                .map_err(|source| Error::Io { place: self.place(self.at, field), source })?;
        }
        self.at += length;
        Ok(bytes)
    }

    pub(crate) fn take<const N: usize>(&mut self, field: Field<'_>) -> Result<[u8; N], Error> {
        self.check_remaining(N as u64, field)?;
        self.fill(N, field)?;
        let start = (self.at - self.window_at) as usize;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.window[start..start + N]);
        self.at += N as u64;
        Ok(bytes)
    }

    fn check_remaining(&self, needed: u64, field: Field<'_>) -> Result<(), Error> {
        let remaining = self.length - self.at;
        if needed <= remaining {
            Ok(())
        } else {
            Err(self.fault(self.at, field, Fault::Truncated { needed, remaining }))
        }
    }

    /// Makes the window hold the next `needed` bytes, at most `WINDOW`, which the part is known to have.
    fn fill(&mut self, needed: usize, field: Field<'_>) -> Result<(), Error> {
        let window_end = self.window_at + self.window.len() as u64;
        if self.at >= self.window_at && self.at + needed as u64 <= window_end {
            return Ok(());
        }
        let size = (self.length - self.at).min(WINDOW as u64) as usize;
        self.window.resize(size, 0);
        self.window_at = self.at;
        self.part.bytes.read_exact_at(self.at, &mut self.window).map_err(|source| {
            let place = self.place(self.at, field);
            Error::Io { place, source }
        })
    }

    fn place(&self, offset: u64, field: Field<'_>) -> Place {
        Place { file: self.part.name.clone(), offset, field: field.to_string() }
    }
}
