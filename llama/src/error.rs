//! What can go wrong between Shoal and llama.cpp, one enum for models, contexts and vocabularies.
//!
//! Messages carry the numbers and what llama.cpp's log said; they know nothing of requests or stages.

use std::path::PathBuf;

use crate::shim::ShimError;

/// A call into llama.cpp failed, or its arguments were refused before the call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model file could not be loaded.
    #[error("cannot load the model {}: {reason}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// What llama.cpp logged, or what was found before asking it.
        reason: String,
    },
    /// The progress callback asked to stop.
    #[error("loading the model {} was cancelled", path.display())]
    LoadCancelled {
        /// The file.
        path: PathBuf,
    },
    /// A random model could not be built or saved.
    #[error("cannot build the model: {reason}")]
    Build {
        /// What was wrong.
        reason: String,
    },
    /// A parameter is out of its range.
    #[error("{parameter} is {value}, but must be {allowed}")]
    Parameter {
        /// Name of the field.
        parameter: &'static str,
        /// What was given.
        value: u64,
        /// What would do, in words.
        allowed: String,
    },
    /// The model loads, but what was asked of it does not exist.
    #[error("the model cannot be used like that: {reason}")]
    Unsupported {
        /// What is missing, and why.
        reason: String,
    },
    /// llama.cpp refused to make a context.
    #[error("cannot create a context for {n_slots} slots of {n_ctx_per_slot} tokens: {reason}")]
    Context {
        /// Slots asked for.
        n_slots: u32,
        /// Tokens per slot asked for.
        n_ctx_per_slot: u32,
        /// What llama.cpp logged.
        reason: String,
    },
    /// The rows given to a run do not fit the context.
    #[error(transparent)]
    Rows(#[from] RowsError),
    /// The KV cache has no cells left for the rows.
    #[error("the KV cache has no room for {rows} more rows")]
    CacheFull {
        /// Rows of the call that found no room.
        rows: usize,
    },
    /// llama.cpp failed while computing.
    #[error("llama.cpp failed to decode {rows} rows (code {code}): {reason}")]
    Decode {
        /// Rows of the failed call.
        rows: usize,
        /// Return value of `llama_decode`.
        code: i32,
        /// What llama.cpp logged.
        reason: String,
    },
    /// The graph did not give the hidden rows that were expected.
    #[error("expected {expected} hidden rows from node {node}, got {got}: {reason}")]
    HiddenRows {
        /// Name of the graph node that was tapped.
        node: String,
        /// Rows sent in.
        expected: usize,
        /// Rows that came out.
        got: usize,
        /// What was odd about the node, if it came at all.
        reason: String,
    },
    /// llama.cpp gave no logits for a row that was marked as an output.
    #[error("llama.cpp gave no logits for row {row}")]
    NoLogits {
        /// Index in the rows given.
        row: usize,
    },
    /// A slot number is out of range.
    #[error("slot {slot} does not exist: the context has {n_slots} slots")]
    Slot {
        /// What was given.
        slot: u32,
        /// Slots of the context.
        n_slots: u32,
    },
    /// A slot's keys and values could not be copied out.
    #[error("llama.cpp wrote {written} of the {bytes} bytes of slot {slot}: {reason}")]
    Export {
        /// The slot.
        slot: u32,
        /// Bytes it wrote.
        written: usize,
        /// Bytes it had announced.
        bytes: usize,
        /// What llama.cpp logged.
        reason: String,
    },
    /// Keys and values were not taken. The slot is empty.
    #[error("llama.cpp took {read} of {bytes} bytes into slot {slot}: {reason}")]
    Import {
        /// The slot.
        slot: u32,
        /// Bytes it read.
        read: usize,
        /// Bytes it was given.
        bytes: usize,
        /// What llama.cpp logged.
        reason: String,
    },
    /// A blob was written for another slot or another context.
    #[error(
        "a blob for sequence {meant} of {streams} caches was given for slot {slot} of a context with {own_streams}"
    )]
    Misplaced {
        /// The slot it was written for.
        meant: u32,
        /// Caches of the context it was written for.
        streams: u32,
        /// The slot it was given for.
        slot: u32,
        /// Caches of the context.
        own_streams: u32,
    },
    /// Bytes are no blob of keys and values.
    #[error("keys and values: {0}")]
    Blob(#[from] kv_blob::BlobError),
    /// Text could not be turned into tokens.
    #[error("cannot tokenise {bytes} bytes of text: {reason}")]
    Tokenize {
        /// Length of the text.
        bytes: usize,
        /// What was wrong.
        reason: String,
    },
    /// A token is not in the vocabulary.
    #[error("token {token} does not exist: the vocabulary has {n_tokens} tokens")]
    Token {
        /// The token's id.
        token: i32,
        /// Size of the vocabulary.
        n_tokens: u32,
    },
    /// An embedding file cannot be used.
    #[error("cannot use the embedding file {}: {reason}", path.display())]
    Embedding {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A C++ exception.
    #[error("llama.cpp failed while {doing}: {message}")]
    Exception {
        /// What was being done.
        doing: &'static str,
        /// What the exception says.
        message: String,
    },
}

impl Error {
    /// Wraps an exception with what was being done.
    pub(crate) fn exception(doing: &'static str) -> impl FnOnce(ShimError) -> Self {
        move |error| Self::Exception { doing, message: error.message }
    }
}

/// Why rows were refused. Nothing was computed and no slot has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RowsError {
    /// There are none.
    #[error("no rows to run")]
    Empty,
    /// The arrays do not belong together.
    #[error("{rows} slots were given, but {got} {field} (expected {expected})")]
    Lengths {
        /// Number of rows, taken from `slots`.
        rows: usize,
        /// The field that differs.
        field: &'static str,
        /// Its length.
        got: usize,
        /// The length it should have.
        expected: usize,
    },
    /// More rows than one run takes.
    #[error("{rows} rows are more than the {limit} of one run")]
    TooMany {
        /// Rows given.
        rows: usize,
        /// `n_batch`.
        limit: u32,
    },
    /// A slot number is out of range.
    #[error("row {row} is for slot {slot}, but there are {n_slots} slots")]
    Slot {
        /// Index of the row.
        row: usize,
        /// Its slot.
        slot: u32,
        /// Slots of the context.
        n_slots: u32,
    },
    /// A token id is not in the vocabulary.
    #[error("token {token} is not one of the {n_vocab} of the vocabulary")]
    Token {
        /// The id.
        token: i32,
        /// Tokens of the vocabulary.
        n_vocab: usize,
    },
    /// A slot's rows must continue its sequence without a gap or repetition.
    #[error("slot {slot} continues at position {expected}, but a row for position {got} was given")]
    Position {
        /// The slot.
        slot: u32,
        /// Its next position.
        expected: u32,
        /// The position found instead.
        got: u32,
    },
    /// A position is beyond the slot.
    #[error("position {position} is beyond the {n_ctx} tokens of slot {slot}")]
    SlotFull {
        /// The slot.
        slot: u32,
        /// The row's position.
        position: u32,
        /// Tokens per slot.
        n_ctx: u32,
    },
    /// More rows want logits than the context was made for.
    #[error("{wanted} rows want logits, more than the {limit} of one run")]
    TooManyOutputs {
        /// Rows marked as outputs.
        wanted: usize,
        /// `max_outputs`.
        limit: u32,
    },
}
