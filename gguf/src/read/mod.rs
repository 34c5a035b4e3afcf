//! Reading: one file, or the parts of a split one, into a [`Gguf`].

mod cursor;
mod join;
mod part;

use std::collections::HashMap;

pub(crate) use part::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT};
use part::{Entry, PartContents};

use crate::error::{Error, ModelFault, Place};
use crate::{Part, TensorInfo, Value};

/// A model file, read and validated: what is in it and where. The tensors' bytes stay where they are.
#[derive(Debug)]
pub struct Gguf {
    parts: Vec<Part>,
    version: u32,
    alignment: u64,
    entries: Vec<Entry>,
    entry_index: HashMap<String, usize>,
    tensors: Vec<TensorInfo>,
    tensor_index: HashMap<String, usize>,
}

impl Gguf {
    /// Reads a model from its only file or from all parts of a split one, in any order.
    ///
    /// Memory is bounded by the size of the metadata and tensor tables that the files really hold, whatever they
    /// declare.
    pub fn read(parts: Vec<Part>) -> Result<Self, Error> {
        let mut contents = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            contents.push(part::read_part(part, index)?);
        }
        let joined = join::join(parts, contents)?;
        let PartContents { version, alignment, entries, tensors } = joined.contents;
        let entry_index = index_by(entries.iter().map(|entry| &entry.key));
        let tensor_index = index_by(tensors.iter().map(|tensor| &tensor.name));
        Ok(Self { parts: joined.parts, version, alignment, entries, entry_index, tensors, tensor_index })
    }

    /// The files, in order of the split.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Name of the first file, for messages.
    pub fn name(&self) -> &str {
        self.parts.first().map_or("", |part| part.name.as_str())
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor data in the first file, in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Size of all files together.
    pub fn total_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes.len()).fold(0, u64::saturating_add)
    }

    /// All metadata in file order, without those that describe the split.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|entry| (entry.key.as_str(), &entry.value))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entry_index.get(key).map(|&index| &self.entries[index].value)
    }

    /// All tensors, in order of the parts and of each part's table.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index.get(name).map(|&index| &self.tensors[index])
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> Result<&str, Error> {
        const KEY: &str = "general.architecture";
        let value = self.get(KEY).ok_or_else(|| self.model_fault(KEY, ModelFault::Missing))?;
        value.as_str().ok_or_else(|| {
            let found = value.value_type().name();
            self.model_fault(KEY, ModelFault::WrongType { found, wanted: "UTF-8 string" })
        })
    }

    /// Fills `buffer` with a tensor's bytes from `offset` (in the tensor) on.
    pub fn read_tensor(&self, tensor: &TensorInfo, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let field = || format!("data of tensor {:?}", tensor.name);
        let at = tensor.offset.saturating_add(offset);
        let in_tensor = offset.checked_add(buffer.len() as u64).is_some_and(|end| end <= tensor.bytes);
        let part = self.parts.get(tensor.part).filter(|_| in_tensor);
        let Some(part) = part else {
            let place = Place { file: self.name().to_owned(), offset: at, field: field() };
            return Err(Error::Io { place, source: std::io::ErrorKind::UnexpectedEof.into() });
        };
        part.bytes.read_exact_at(at, buffer).map_err(|source| {
            let place = Place { file: part.name.clone(), offset: at, field: field() };
            Error::Io { place, source }
        })
    }

    /// An error of the model, at a key or tensor.
    pub(crate) fn model_fault(&self, field: impl Into<String>, fault: ModelFault) -> Error {
        Error::Model { file: self.name().to_owned(), field: field.into(), fault }
    }
}

fn index_by<'a>(names: impl Iterator<Item = &'a String>) -> HashMap<String, usize> {
    names.enumerate().map(|(index, name)| (name.clone(), index)).collect()
}
