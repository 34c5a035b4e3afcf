//! What can be wrong with a file or a model, each with the file, the place in it, and the field.

use std::fmt;
use std::io;

use thiserror::Error;

/// Where in which file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The part's name.
    pub file: String,
    /// Offset in bytes from the file's start.
    pub offset: u64,
    /// The field that was being read.
    pub field: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, byte {}: {}", self.file, self.offset, self.field)
    }
}

/// Why a model cannot be read or described.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The file's contents break the format.
    #[error("{place}: {fault}")]
    Malformed {
        /// Where.
        place: Place,
        /// How.
        fault: Fault,
    },
    /// Reading failed.
    #[error("{place}: reading failed: {source}")]
    Io {
        /// What was read.
        place: Place,
        /// What the operating system said.
        source: io::Error,
    },
    /// The parts of a split model do not belong together.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// A well-formed file that is not a model as its architecture wants it.
    #[error("{file}: {field}: {fault}")]
    Model {
        /// The first part's name.
        file: String,
        /// The key or tensor.
        field: String,
        /// What is wrong with it.
        fault: ModelFault,
    },
    /// A model that Shoal does not run.
    #[error("{file}: models of architecture {architecture} cannot be run in slices: {reason}")]
    Refused {
        /// The first part's name.
        file: String,
        /// `general.architecture`.
        architecture: String,
        /// Why not.
        reason: String,
    },
    /// Writing an output failed.
    #[error("writing {written} of {total} bytes: {source}")]
    Write {
        /// Bytes written before.
        written: u64,
        /// Bytes to write in all.
        total: u64,
        /// What the operating system said.
        source: io::Error,
    },
}

/// How a field breaks the format.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Fault {
    /// Not a GGUF file.
    #[error("the file starts with {0:?}, not with \"GGUF\"")]
    Magic([u8; 4]),
    /// A file for machines of the other byte order.
    #[error("the file is big-endian; convert it to little-endian (gguf_convert_endian.py)")]
    BigEndian,
    /// A version of the format that cannot be read.
    #[error("GGUF version {0} cannot be read, only 2 and 3")]
    Version(u32),
    /// The file ends too early.
    #[error("needs {needed} bytes, but the file ends after {remaining}: it is truncated")]
    Truncated {
        /// Bytes the field takes.
        needed: u64,
        /// Bytes there are.
        remaining: u64,
    },
    /// More of something than the file has room for.
    #[error("a count of {count}, but the remaining {remaining} bytes hold at most {most}")]
    Count {
        /// The declared count.
        count: u64,
        /// Bytes there are.
        remaining: u64,
        /// The most that fit in them.
        most: u64,
    },
    /// A value type that GGUF does not have.
    #[error("unknown value type {0}")]
    ValueType(u32),
    /// A tensor type that ggml does not have.
    #[error("unknown tensor type {0}")]
    TensorType(u32),
    /// A tensor type that ggml no longer has.
    #[error("tensor type {0} was removed from ggml; quantise the model again")]
    RemovedTensorType(u32),
    /// Arrays of arrays of arrays…
    #[error("arrays are nested deeper than {0}")]
    Depth(u32),
    /// A bool that is neither 0 nor 1.
    #[error("a bool of {0}")]
    Bool(u8),
    /// A name that is not text.
    #[error("not valid UTF-8")]
    Utf8,
    /// A name without a character.
    #[error("an empty name")]
    EmptyName,
    /// A name that is too long.
    #[error("a name of {length} bytes, longer than {most}")]
    LongName {
        /// Its length in bytes.
        length: u64,
        /// The most that is allowed.
        most: u64,
    },
    /// A key or tensor that comes twice.
    #[error("the name comes twice")]
    Duplicate,
    /// An unusable `general.alignment`.
    #[error("an alignment of {0}: it must be a power of two from 8 to 65536")]
    Alignment(u64),
    /// A value of another type than the format fixes.
    #[error("a value of type {found}, not {wanted}")]
    WrongType {
        /// What it is.
        found: &'static str,
        /// What it must be.
        wanted: &'static str,
    },
    /// A number of dimensions that no tensor has.
    #[error("{0} dimensions: a tensor has 1 to 4")]
    Dimensions(u32),
    /// A dimension without elements.
    #[error("dimension {0} has no elements")]
    EmptyDimension(u32),
    /// More elements or bytes than 63 bits count.
    #[error("the tensor's size overflows")]
    Overflow,
    /// A row that is not whole blocks.
    #[error("rows of {row} elements are not whole blocks of {block} of type {kind}")]
    PartialBlock {
        /// Elements per row.
        row: u64,
        /// Elements per block.
        block: u64,
        /// The tensor's type.
        kind: &'static str,
    },
    /// Tensor data at an offset that is not a multiple of the alignment.
    #[error("data offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned {
        /// Offset in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// Tensor data past the end of the file.
    #[error("data from byte {start} to {end}, but the file has {length}: it is truncated or damaged")]
    OutOfRange {
        /// First byte of the data.
        start: u64,
        /// One past the last.
        end: u64,
        /// The file's size.
        length: u64,
    },
    /// Two tensors that share bytes.
    #[error("data overlaps that of tensor {0}")]
    Overlap(String),
}

/// How parts of a split model fail to be one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SplitError {
    /// No part at all.
    #[error("no file was given to read a model from")]
    NoParts,
    /// Too few.
    #[error("{file} is of a model of {count} parts, but part {missing} is missing")]
    Missing {
        /// A part that was given.
        file: String,
        /// How many there must be.
        count: u64,
        /// The first missing one, counted from 1, with its file name where it can be told.
        missing: String,
    },
    /// The same part twice.
    #[error("{first} and {second} are both part {number} of the model")]
    Duplicated {
        /// One file.
        first: String,
        /// The other.
        second: String,
        /// The number both have, counted from 1.
        number: u64,
    },
    /// A part number that is past their count.
    #[error("{file}: split.no: part {number} of {count}")]
    Number {
        /// The file.
        file: String,
        /// Its number, counted from 1.
        number: u64,
        /// How many parts there are.
        count: u64,
    },
    /// Files that do not belong to one model.
    #[error("{file} does not belong to the same model as {other}: {field} differs")]
    Foreign {
        /// The file that differs.
        file: String,
        /// The one it differs from.
        other: String,
        /// The field.
        field: String,
    },
    /// A file that is not a part, among several.
    #[error("{file} is not a part of a split model ({field} is missing), but {given} files were given")]
    NotAPart {
        /// The file.
        file: String,
        /// The key it lacks.
        field: &'static str,
        /// How many files were given.
        given: usize,
    },
    /// Tensors missing or too many.
    #[error("{file}: split.tensors.count: {declared} tensors declared, {found} found in all parts")]
    TensorCount {
        /// The first part.
        file: String,
        /// What it declares.
        declared: u64,
        /// What there are.
        found: u64,
    },
}

/// How a key or tensor is not what the architecture wants.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ModelFault {
    /// It is not there.
    #[error("missing")]
    Missing,
    /// Another type.
    #[error("a value of type {found}, not {wanted}")]
    WrongType {
        /// What it is.
        found: &'static str,
        /// What it must be.
        wanted: &'static str,
    },
    /// A number that makes no sense.
    #[error("{value} is out of range, {least} to {most}")]
    OutOfRange {
        /// The number.
        value: u64,
        /// The smallest that is allowed.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// An array that does not have one element per block.
    #[error("an array of {found} elements for {wanted} blocks")]
    ArrayLength {
        /// Elements it has.
        found: usize,
        /// Elements it must have.
        wanted: usize,
    },
    /// A tensor of another shape.
    #[error("a shape of {found:?}, not {wanted:?}")]
    Shape {
        /// Its shape.
        found: Vec<u64>,
        /// What the metadata say.
        wanted: Vec<u64>,
    },
    /// A tensor of a block that the model does not have.
    #[error("belongs to block {block}, but the model has {blocks}")]
    Block {
        /// The block in its name.
        block: u32,
        /// How many the metadata declare.
        blocks: u32,
    },
    /// A weight matrix that llama.cpp cannot multiply with.
    #[error(
        "a weight matrix of type {kind}, which llama.cpp cannot multiply: convert the model to another type"
    )]
    NotMultipliable {
        /// Its type.
        kind: &'static str,
    },
    /// A vector (norm, bias, …) of a type that llama.cpp cannot add or scale with.
    #[error("a norm, bias or other vector of type {kind}: llama.cpp takes only f32 there")]
    NotF32 {
        /// Its type.
        kind: &'static str,
    },
}
