//! Runs a whole model from token ids and its slices from hidden rows, and compares.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use cluster::LayerRange;
use gguf::Gguf;
use llama::{ContextParams, EmbeddingTable, Model, ModelParams, Output, RowInput, Rows, SliceContext};

use crate::conversation::{PROMPT_TOKENS, Runner, SLOTS, TokenRows, Transcript, converse};
use crate::cutting::SliceFolder;

/// Room for a conversation.
const TOKENS_PER_SLOT: u32 = 256;

/// The untouched model file, on token ids.
struct Whole {
    context: SliceContext,
}

/// The slices of a model, one after another.
pub(crate) struct Chain {
    embedding: EmbeddingTable,
    slices: Vec<SliceContext>,
    rows: Vec<f32>,
}

impl Runner for Whole {
    fn run(&mut self, rows: &TokenRows) -> Result<Vec<Vec<f32>>> {
        self.context.run(&with_input(RowInput::Tokens(&rows.tokens), rows))?;
        logits(&self.context, rows)
    }
}

impl Runner for Chain {
    fn run(&mut self, rows: &TokenRows) -> Result<Vec<Vec<f32>>> {
        self.embedding.lookup(&rows.tokens, &mut self.rows)?;
        for slice in &mut self.slices {
            slice.run(&with_input(RowInput::Hidden(&self.rows), rows))?;
            self.rows.clear();
            self.rows.extend_from_slice(slice.hidden());
        }
        logits(self.slices.last().context("a chain without slices")?, rows)
    }
}

impl Chain {
    /// Loads the slices `ranges` of a model.
    pub(crate) fn load(files: &SliceFolder<'_>, ranges: &[LayerRange]) -> Result<Self> {
        Self::load_with(files, ranges, &|_| ())
    }

    /// As [`load`](Self::load), with other parameters.
    pub(crate) fn load_with(
        files: &SliceFolder<'_>,
        ranges: &[LayerRange],
        change: &dyn Fn(&mut ContextParams),
    ) -> Result<Self> {
        let embedding = EmbeddingTable::open(&files.embedding()?)?;
        let slices = ranges.iter().enumerate().map(|(index, range)| {
            let is_last = index + 1 == ranges.len();
            let output = if is_last { Output::Logits } else { Output::Hidden };
            context(&files.slice(*range)?, output, change).with_context(|| format!("slice {range}"))
        });
        Ok(Self { embedding, slices: slices.collect::<Result<_>>()?, rows: Vec::new() })
    }

    /// Its slices, in order.
    pub(crate) fn slices(&mut self) -> &mut [SliceContext] {
        &mut self.slices
    }
}

/// Converses with the whole model and with each of its `splits`: the same tokens, and the same logits to the bit.
pub(crate) fn compare(path: &Path, model: &Gguf, splits: &[Vec<LayerRange>]) -> Result<()> {
    ensure!(
        !splits.is_empty() && splits.iter().all(|ranges| !ranges.is_empty()),
        "there is nothing to compare"
    );
    let folder = tempfile::tempdir()?;
    let files = SliceFolder { model, folder: folder.path() };
    let whole = transcript_of_whole(path).context("the whole model")?;
    for ranges in splits {
        let cuts = || ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let mut chain = Chain::load(&files, ranges).with_context(cuts)?;
        let n_vocab = whole.logits[0].len() as u32;
        let transcript = converse(&mut chain, n_vocab).with_context(cuts)?;
        whole.check_equals(&transcript).with_context(cuts)?;
    }
    Ok(())
}

/// What the uncut model makes of the conversation.
pub(crate) fn transcript_of_whole(path: &Path) -> Result<Transcript> {
    transcript_of_whole_with(path, &|_| ())
}

/// As [`transcript_of_whole`], with other parameters.
pub(crate) fn transcript_of_whole_with(
    path: &Path,
    change: &dyn Fn(&mut ContextParams),
) -> Result<Transcript> {
    let mut whole = Whole { context: context(path, Output::Logits, change)? };
    let n_vocab = whole.context.model().vocab().n_tokens();
    let transcript = converse(&mut whole, n_vocab)?;
    transcript.check_is_telling()?;
    Ok(transcript)
}

/// One thread each: nextest runs as many tests at once as there are cores.
fn context(path: &Path, output: Output, change: &dyn Fn(&mut ContextParams)) -> Result<SliceContext> {
    let model = Model::load(path, ModelParams::default())?;
    let mut params = ContextParams {
        n_batch: 2 * PROMPT_TOKENS,
        n_ubatch: 2 * PROMPT_TOKENS,
        threads: 1,
        threads_batch: 1,
        ..ContextParams::new(output, SLOTS, TOKENS_PER_SLOT)
    };
    change(&mut params);
    Ok(SliceContext::new(&model, &params)?)
}

fn with_input<'a>(input: RowInput<'a>, rows: &'a TokenRows) -> Rows<'a> {
    Rows { input, slots: &rows.slots, positions: &rows.positions, outputs: &rows.outputs }
}

fn logits(context: &SliceContext, rows: &TokenRows) -> Result<Vec<Vec<f32>>> {
    let wanted = (0..rows.outputs.len()).filter(|row| rows.outputs[*row]);
    wanted
        .map(|row| Ok(context.logits(row).with_context(|| format!("row {row} has no logits"))?.to_vec()))
        .collect()
}
