//! Writes GGUF files (version 3): collects metadata and tensors, lays them out, streams them.
//!
//! Tensor data are copied from where they lie, or are zeros, or are given; only the header is ever held in memory.
//! The same input gives the same bytes.

use std::collections::{HashMap, HashSet};
use std::io;

use thiserror::Error;

use crate::read::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT};
use crate::tensor::tensor_bytes;
use crate::{Array, Error, Part, Place, ReadAt, TensorInfo, TensorType, Value};

/// Bytes copied at once.
const CHUNK: usize = 1 << 20;
/// `GGML_MAX_NAME` less the closing zero.
const MAX_TENSOR_NAME: usize = 63;

/// Why a file cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// A name that no file may have.
    #[error("tensor name {0:?} is empty or longer than {MAX_TENSOR_NAME} bytes")]
    Name(String),
    /// Two tensors of one name.
    #[error("tensor {0:?} comes twice")]
    Duplicate(String),
    /// A shape that is not one.
    #[error("tensor {name:?}: {dims:?} is no shape for a tensor of type {kind}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its type.
        kind: TensorType,
        /// The shape.
        dims: Vec<u64>,
    },
    /// Data of another size than the shape's.
    #[error("tensor {name:?}: {given} bytes of data for a shape of {wanted} bytes")]
    Data {
        /// The tensor.
        name: String,
        /// Bytes given.
        given: u64,
        /// Bytes of the shape.
        wanted: u64,
    },
    /// An unusable `general.alignment`.
    #[error("general.alignment must be a power of two from 8 to 65536, as u32")]
    Alignment,
    /// More bytes than 64 bits count.
    #[error("the file's size overflows")]
    Overflow,
}

/// Where a tensor's bytes come from.
#[derive(Debug, Clone)]
pub enum Data {
    /// From a file, from this offset on.
    Copy {
        /// The file.
        part: Part,
        /// The first byte.
        offset: u64,
    },
    /// Zero bytes, which every type dequantises to zeros.
    Zeros,
    /// These bytes.
    Bytes(Vec<u8>),
}

/// A GGUF file in the making.
#[derive(Debug, Default)]
pub struct Writer {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
    tensors: Vec<(TensorInfo, Data)>,
    names: HashSet<String>,
}

/// A file that is laid out down to the byte, and can be written any number of times.
#[derive(Debug)]
pub struct OutputPlan {
    header: Vec<u8>,
    tensors: Vec<(TensorInfo, Data)>,
    length: u64,
    alignment: u64,
}

impl Writer {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a metadata value: in the place of the one the key had, or at the end.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let (key, value) = (key.into(), value.into());
        match self.index.get(&key) {
            Some(&at) => self.entries[at].1 = value,
            None => {
                self.index.insert(key.clone(), self.entries.len());
                self.entries.push((key, value));
            }
        }
    }

    /// Adds a tensor of `dims` (contiguous dimension first) at the end.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        kind: TensorType,
        dims: &[u64],
        data: Data,
    ) -> Result<(), WriteError> {
        let (name, dims) = (name.into(), dims.to_vec());
        if name.is_empty() || name.len() > MAX_TENSOR_NAME {
            return Err(WriteError::Name(name));
        }
        if !self.names.insert(name.clone()) {
            return Err(WriteError::Duplicate(name));
        }
        let sized = (1..=4).contains(&dims.len()) && !dims.contains(&0);
        let Some(bytes) = tensor_bytes(kind, &dims).filter(|_| sized) else {
            return Err(WriteError::Shape { name, kind, dims });
        };
        if let Data::Bytes(given) = &data
            && given.len() as u64 != bytes
        {
            return Err(WriteError::Data { name, given: given.len() as u64, wanted: bytes });
        }
        self.tensors.push((TensorInfo { name, kind, dims, part: 0, offset: 0, bytes }, data));
        Ok(())
    }

    /// Lays the file out.
    pub fn plan(mut self) -> Result<OutputPlan, WriteError> {
        let alignment = self.alignment()?;
        let mut offset: u64 = 0;
        for (tensor, _) in &mut self.tensors {
            tensor.offset = offset;
            offset = offset
                .checked_add(tensor.bytes)
                .and_then(|end| end.checked_next_multiple_of(alignment))
                .ok_or(WriteError::Overflow)?;
        }
        let mut header = Vec::new();
        header.extend_from_slice(b"GGUF");
        header.extend_from_slice(&3_u32.to_le_bytes());
        put_u64(&mut header, self.tensors.len());
        put_u64(&mut header, self.entries.len());
        for (key, value) in &self.entries {
            put_bytes(&mut header, key.as_bytes());
            put_value(&mut header, value);
        }
        for (tensor, _) in &self.tensors {
            put_tensor(&mut header, tensor);
        }
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        let data_start = header.len() as u64;
        for (tensor, _) in &mut self.tensors {
            tensor.offset = tensor.offset.checked_add(data_start).ok_or(WriteError::Overflow)?;
        }
        let length = data_start.checked_add(offset).ok_or(WriteError::Overflow)?;
        Ok(OutputPlan { header, tensors: self.tensors, length, alignment })
    }

    fn alignment(&self) -> Result<u64, WriteError> {
        match self.index.get(ALIGNMENT_KEY).map(|&at| &self.entries[at].1) {
            None => Ok(DEFAULT_ALIGNMENT),
            Some(Value::U32(n)) if n.is_power_of_two() && (8..=65_536).contains(n) => Ok((*n).into()),
            Some(_) => Err(WriteError::Alignment),
        }
    }
}

#[allow(clippy::len_without_is_empty, reason = "a planned file has at least a header")]
impl OutputPlan {
    /// Size of the file in bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Bytes of all tensors, without header and padding.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|(tensor, _)| tensor.bytes).fold(0, u64::saturating_add)
    }

    /// The beginning of the file: all that says what it is, up to the first tensor's data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The tensors as they will lie in the file.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.iter().map(|(tensor, _)| tensor)
    }

    /// Writes the file in order. `progress` hears the number of bytes written so far.
    pub fn write_to(&self, output: &mut dyn io::Write, progress: &mut dyn FnMut(u64)) -> Result<(), Error> {
        let mut sink = Sink { output, progress, written: 0, total: self.length };
        for chunk in self.header.chunks(CHUNK) {
            sink.write(chunk)?;
        }
        let mut buffer = Vec::new();
        for (tensor, data) in &self.tensors {
            match data {
                Data::Bytes(bytes) => bytes.chunks(CHUNK).try_for_each(|chunk| sink.write(chunk))?,
                Data::Zeros => sink.zeros(tensor.bytes, &mut buffer)?,
                Data::Copy { part, offset } => copy(part, *offset, tensor, &mut buffer, &mut sink)?,
            }
            let padding = tensor.bytes.next_multiple_of(self.alignment) - tensor.bytes;
            sink.zeros(padding, &mut buffer)?;
        }
        sink.output.flush().map_err(|source| sink.failed(source))
    }

    /// The whole file in memory: for tests and small models.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.write_to(&mut bytes, &mut |_| {})?;
        Ok(bytes)
    }
}

/// The file's bytes as [`OutputPlan::write_to`] would write them, at any offset, without writing any.
impl ReadAt for OutputPlan {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64).filter(|&end| end <= self.length);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        // What no tensor covers is padding.
        buffer.fill(0);
        if let Some(header) = usize::try_from(offset).ok().and_then(|at| self.header.get(at..)) {
            let n = header.len().min(buffer.len());
            buffer[..n].copy_from_slice(&header[..n]);
        }
        let first = self.tensors.partition_point(|(tensor, _)| tensor.offset + tensor.bytes <= offset);
        for (tensor, data) in self.tensors[first..].iter().take_while(|(tensor, _)| tensor.offset < end) {
            let (from, to) = (tensor.offset.max(offset), (tensor.offset + tensor.bytes).min(end));
            let within = from - tensor.offset;
            let part_of_buffer = &mut buffer[(from - offset) as usize..(to - offset) as usize];
            match data {
                Data::Zeros => {}
                Data::Bytes(bytes) => bytes.as_slice().read_exact_at(within, part_of_buffer)?,
                Data::Copy { part, offset } => {
                    part.bytes.read_exact_at(offset.saturating_add(within), part_of_buffer)?;
                }
            }
        }
        Ok(())
    }
}

struct Sink<'a> {
    output: &'a mut dyn io::Write,
    progress: &'a mut dyn FnMut(u64),
    written: u64,
    total: u64,
}

impl Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.output.write_all(bytes).map_err(|source| self.failed(source))?;
        self.written += bytes.len() as u64;
        (self.progress)(self.written);
        Ok(())
    }

    fn zeros(&mut self, mut count: u64, buffer: &mut Vec<u8>) -> Result<(), Error> {
        buffer.clear();
        buffer.resize(count.min(CHUNK as u64) as usize, 0);
        while count > 0 {
            let size = count.min(CHUNK as u64);
            self.write(&buffer[..size as usize])?;
            count -= size;
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Write { written: self.written, total: self.total, source }
    }
}

fn copy(
    part: &Part,
    from: u64,
    tensor: &TensorInfo,
    buffer: &mut Vec<u8>,
    sink: &mut Sink<'_>,
) -> Result<(), Error> {
    let mut done = 0;
    while done < tensor.bytes {
        let size = (tensor.bytes - done).min(CHUNK as u64);
        let at = from.saturating_add(done);
        buffer.resize(size as usize, 0);
        part.bytes.read_exact_at(at, buffer).map_err(|source| {
            let field = format!("data of tensor {:?}", tensor.name);
            Error::Io { place: Place { file: part.name.clone(), offset: at, field }, source }
        })?;
        sink.write(buffer)?;
        done += size;
    }
    Ok(())
}

fn put_tensor(header: &mut Vec<u8>, tensor: &TensorInfo) {
    put_bytes(header, tensor.name.as_bytes());
    header.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
    for dim in &tensor.dims {
        header.extend_from_slice(&dim.to_le_bytes());
    }
    header.extend_from_slice(&(tensor.kind as u32).to_le_bytes());
    header.extend_from_slice(&tensor.offset.to_le_bytes());
}

fn put_value(header: &mut Vec<u8>, value: &Value) {
    header.extend_from_slice(&(value.value_type() as u32).to_le_bytes());
    match value {
        Value::U8(n) => header.extend_from_slice(&n.to_le_bytes()),
        Value::I8(n) => header.extend_from_slice(&n.to_le_bytes()),
        Value::U16(n) => header.extend_from_slice(&n.to_le_bytes()),
        Value::I16(n) => header.extend_from_slice(&n.to_le_bytes()),
        Value::U32(n) => header.extend_from_slice(&n.to_le_bytes()),
        Value::I32(n) => header.extend_from_slice(&n.to_le_bytes()),
        Value::U64(n) => header.extend_from_slice(&n.to_le_bytes()),
        Value::I64(n) => header.extend_from_slice(&n.to_le_bytes()),
        Value::F32(x) => header.extend_from_slice(&x.to_le_bytes()),
        Value::F64(x) => header.extend_from_slice(&x.to_le_bytes()),
        Value::Bool(b) => header.push((*b).into()),
        Value::String(bytes) => put_bytes(header, bytes),
        Value::Array(array) => put_array(header, array),
    }
}

fn put_array(header: &mut Vec<u8>, array: &Array) {
    header.extend_from_slice(&(array.element_type() as u32).to_le_bytes());
    put_u64(header, array.len());
    macro_rules! numbers {
        ($items:expr) => {
            $items.iter().for_each(|n| header.extend_from_slice(&n.to_le_bytes()))
        };
    }
    match array {
        Array::U8(items) => header.extend_from_slice(items),
        Array::I8(items) => numbers!(items),
        Array::U16(items) => numbers!(items),
        Array::I16(items) => numbers!(items),
        Array::U32(items) => numbers!(items),
        Array::I32(items) => numbers!(items),
        Array::U64(items) => numbers!(items),
        Array::I64(items) => numbers!(items),
        Array::F32(items) => numbers!(items),
        Array::F64(items) => numbers!(items),
        Array::Bool(items) => header.extend(items.iter().map(|&b| u8::from(b))),
        Array::String(items) => items.iter().for_each(|bytes| put_bytes(header, bytes)),
        Array::Array(items) => items.iter().for_each(|inner| put_array(header, inner)),
    }
}

fn put_bytes(header: &mut Vec<u8>, bytes: &[u8]) {
    put_u64(header, bytes.len());
    header.extend_from_slice(bytes);
}

fn put_u64(header: &mut Vec<u8>, n: usize) {
    header.extend_from_slice(&(n as u64).to_le_bytes());
}
