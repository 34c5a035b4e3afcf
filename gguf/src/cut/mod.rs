//! Cuts models: plans the GGUF file of a slice or of the embedding matrix, which is then streamed out.
//!
//! A **slice** holds blocks `[a, b)`, renumbered from 0, as a model that stock llama.cpp loads. It takes hidden rows
//! (`llama_batch.embd`), whichever blocks it holds; the last slice gives logits, the others stop at `l_out`. The
//! **embedding file** holds the token embedding matrix alone, for the first stage to look rows up in.
//!
//! | in a slice | not the last | the last |
//! | --- | --- | --- |
//! | tokenizer | `none`, 32 tokens | as in the model |
//! | head (`output.*` of vocabulary size) | first 32 rows | whole |
//! | `token_embd`, tied to the head | first 32 rows | whole |
//! | `token_embd`, not tied | first 32 rows | a placeholder of zeros: llama.cpp wants the shape, nothing reads it |
//! | position embeddings | as in the model if it is the first slice, zeros otherwise | the same |
//! | every other tensor without a block | as in the model | as in the model |
//! | arrays with one element per block | cut | cut |
//! | patterns that llama.cpp derives from the block's number | stated | stated |

mod metadata;

use cluster::{LayerRange, RangeRefusal};
use thiserror::Error;

use crate::architectures::Support;
use crate::error::Error;
use crate::model::{Hparams, Role, hparams, missing_tensor, role, shape_of};
use crate::write::{Data, WriteError, Writer};
use crate::{Gguf, Part, TensorInfo, TensorType};

pub use crate::write::OutputPlan;

/// Rows of vocabulary in a slice that needs none: few, so that logits buffers are small.
pub const DUMMY_VOCAB: u32 = 32;

/// What to do with architectures that are not certified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Uncertified {
    /// Refuse them.
    #[default]
    Refuse,
    /// Cut them all the same.
    Allow,
}

/// How to cut.
#[derive(Debug, Clone, Copy, Default)]
pub struct CutOptions {
    /// What to do with architectures that are not certified.
    pub uncertified: Uncertified,
}

/// Why a slice cannot be cut.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CutError {
    /// The model cannot be read or run in slices.
    #[error(transparent)]
    Model(#[from] Error),
    /// The range is not one of this model, or not one that can be cut out.
    #[error("{file}: {refusal}")]
    Range {
        /// The model's first file.
        file: String,
        /// Why.
        refusal: RangeRefusal,
    },
    /// The architecture is not certified.
    #[error(
        "{file}: models of architecture {architecture} are not certified: nothing proves that their slices compute \
         what the whole does; --allow-uncertified cuts them all the same"
    )]
    Uncertified {
        /// The model's first file.
        file: String,
        /// `general.architecture`.
        architecture: String,
    },
    /// The slice's file cannot be laid out.
    #[error("laying out the slice of {file}: {source}")]
    Layout {
        /// The model's first file.
        file: String,
        /// Why.
        source: WriteError,
    },
}

/// Which part of the model a slice is.
#[derive(Clone, Copy)]
struct Slice<'a> {
    gguf: &'a Gguf,
    hparams: &'a Hparams,
    range: LayerRange,
    n_vocab: u32,
    tied: bool,
}

impl Slice<'_> {
    fn is_first(self) -> bool {
        self.range.start() == 0
    }

    fn is_last(self) -> bool {
        self.range.end() == self.hparams.n_layer
    }

    /// Rows of vocabulary the slice has.
    fn vocabulary(self) -> u32 {
        if self.is_last() { self.n_vocab } else { self.n_vocab.min(DUMMY_VOCAB) }
    }
}

/// Plans the slice with blocks `range`.
pub fn plan_slice(gguf: &Gguf, range: LayerRange, options: &CutOptions) -> Result<OutputPlan, CutError> {
    let hparams = checked_hparams(gguf, options)?;
    let shape = shape_of(gguf, &hparams)?;
    shape.check_range(range).map_err(|refusal| CutError::Range { file: gguf.name().to_owned(), refusal })?;
    let slice = Slice { gguf, hparams: &hparams, range, n_vocab: shape.n_vocab, tied: shape.tied };
    let mut writer = Writer::new();
    metadata::put(&mut writer, slice);
    let laid_out = put_tensors(&mut writer, slice).and_then(|()| writer.plan());
    laid_out.map_err(|source| layout(gguf, source))
}

/// Plans the embedding file: `token_embd.weight` whole, and what its rows are multiplied by.
pub fn plan_embedding(gguf: &Gguf, options: &CutOptions) -> Result<OutputPlan, CutError> {
    const NAME: &str = "token_embd.weight";
    let hparams = checked_hparams(gguf, options)?;
    let shape = shape_of(gguf, &hparams)?;
    let tensor = gguf.tensor(NAME).ok_or_else(|| missing_tensor(gguf, NAME))?;
    let mut writer = Writer::new();
    writer.set("general.architecture", "shoal-embedding");
    writer.set("shoal.source.architecture", hparams.architecture.name);
    writer.set("shoal.embedding.scale", hparams.embedding_scale);
    writer.set("shoal.embedding.vocab_size", shape.n_vocab);
    let data = Data::Copy { part: part_of(gguf, tensor), offset: tensor.offset };
    let laid_out = writer.tensor(NAME, tensor.kind, &tensor.dims, data).and_then(|()| writer.plan());
    laid_out.map_err(|source| layout(gguf, source))
}

fn checked_hparams(gguf: &Gguf, options: &CutOptions) -> Result<Hparams, CutError> {
    let hparams = hparams(gguf)?;
    let certified = hparams.architecture.support == Support::Certified;
    if certified || options.uncertified == Uncertified::Allow {
        return Ok(hparams);
    }
    Err(CutError::Uncertified {
        file: gguf.name().to_owned(),
        architecture: hparams.architecture.name.to_owned(),
    })
}

fn put_tensors(writer: &mut Writer, slice: Slice<'_>) -> Result<(), WriteError> {
    for tensor in slice.gguf.tensors() {
        let whole = Data::Copy { part: part_of(slice.gguf, tensor), offset: tensor.offset };
        match role(tensor) {
            Role::Block(block, rest) if slice.range.contains(block) => {
                let name = format!("blk.{}.{rest}", block - slice.range.start());
                writer.tensor(name, tensor.kind, &tensor.dims, whole)?;
            }
            Role::Block(..) => {}
            Role::TokenEmbedding if slice.is_last() && !slice.tied => {
                writer.tensor(&*tensor.name, placeholder_type(tensor), &tensor.dims, Data::Zeros)?;
            }
            Role::TokenEmbedding | Role::Head => {
                let dims = with_rows(tensor, slice.vocabulary().into());
                writer.tensor(&*tensor.name, tensor.kind, &dims, whole)?;
            }
            Role::PositionEmbedding if !slice.is_first() => {
                writer.tensor(&*tensor.name, tensor.kind, &tensor.dims, Data::Zeros)?;
            }
            Role::PositionEmbedding | Role::Output | Role::Global => {
                writer.tensor(&*tensor.name, tensor.kind, &tensor.dims, whole)?;
            }
        }
    }
    Ok(())
}

/// The tensor's shape with `rows` along its last dimension: a matrix's first rows, a bias's first elements.
fn with_rows(tensor: &TensorInfo, rows: u64) -> Vec<u64> {
    let mut dims = tensor.dims.clone();
    if let Some(last) = dims.last_mut() {
        *last = rows.min(*last);
    }
    dims
}

/// The smallest type that rows of this width can have and llama.cpp can look up.
fn placeholder_type(tensor: &TensorInfo) -> TensorType {
    let row = tensor.dims.first().copied().unwrap_or(1);
    let candidates = [TensorType::Q1_0, TensorType::Q2_0, TensorType::Q4_0, TensorType::F16, tensor.kind];
    let smallest = candidates.into_iter().min_by_key(|kind| kind.row_bytes(row).unwrap_or(u64::MAX));
    smallest.unwrap_or(tensor.kind)
}

fn part_of(gguf: &Gguf, tensor: &TensorInfo) -> Part {
    gguf.parts()[tensor.part].clone()
}

fn layout(gguf: &Gguf, source: WriteError) -> CutError {
    CutError::Layout { file: gguf.name().to_owned(), source }
}
