//! Why bytes are no blob, or blobs do not go together.

use std::ops::Range;

use thiserror::Error;

/// A blob was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum BlobError {
    #[error("the blob ends in {what}: at byte {at} it needs {needed} more, but {left} are left")]
    Short { what: &'static str, at: usize, needed: u64, left: usize },
    #[error("the blob has {extra} bytes after its end at byte {at}")]
    Long { at: usize, extra: usize },
    #[error("the blob begins with {got:#010x}, not with {wanted:#010x}")]
    Magic { got: u32, wanted: u32 },
    #[error("{what} at byte {at} is {got}, but must be {wanted}")]
    Field { what: &'static str, at: usize, got: u64, wanted: String },
    #[error("the blob counts {got} sequences, llama.cpp has at most {most}")]
    Streams { got: u32, most: u32 },
    #[error("two sequences of the blob have cells, one only can be meant")]
    TwoSequences,
    #[error("a position is {position}, but none is negative")]
    Position { position: i32 },
    #[error("{cells} cells begin at position {first} and end at {last}: they do not follow each other")]
    Gap { cells: usize, first: u32, last: u32 },
    #[error("the caches end at positions {ends:?}, but are of one sequence")]
    UnevenCaches { ends: Vec<u32> },
    #[error("layers {asked:?} are not all among the {has} of the blob")]
    NoSuchLayers { asked: Range<usize>, has: usize },
    #[error("nothing to put together")]
    Nothing,
    #[error("the sequence has no tokens")]
    Empty,
    #[error("layer {layer} begins at position {has}, but its cache at {wanted}")]
    Begin { layer: usize, has: u32, wanted: u32 },
    #[error("parts of one blob differ in {what}: {one} and {other}")]
    Parts { what: &'static str, one: String, other: String },
    #[error("the cells of one part end before position {end}, those of the next begin at {begin}")]
    NotAdjacent { end: u32, begin: u32 },
    #[error("sequence {slot} is asked for, but there are {slots}")]
    NoSuchSlot { slot: u32, slots: u32 },
    #[error("{what} of layer {layer} is {got}, but here it is {own}")]
    Layout { what: &'static str, layer: usize, got: String, own: String },
}
