//! Hidden rows at the cuts of a model, made once by running what comes before each cut on a fixed text.

use std::path::Path;

use llama::{
    AddSpecial, ContextParams, EmbeddingTable, Model, ModelParams, Output, RowInput, Special, Token,
};

use super::IdleGapError;
use super::replay::{Span, run};

/// Plain English, so that a mixture of experts is asked for what it was trained on. Repeated where it is too short.
const TEXT: &str = "The ferry left the island at six in the morning, as it had done every day since the war. On deck \
                    stood a teacher with two suitcases, a farmer who was taking three sheep to the market, and a \
                    boy who had never seen the mainland. Nobody spoke. When the harbour wall had gone from sight the \
                    captain came down from the bridge, poured coffee into four cups, and asked the boy what he \
                    wanted to be. ";

/// Hidden rows of consecutive tokens, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct HiddenRows {
    n_embd: usize,
    rows: Vec<f32>,
}

impl HiddenRows {
    /// `rows` is `[tokens, n_embd]`.
    pub fn new(n_embd: u32, rows: Vec<f32>) -> Result<Self, IdleGapError> {
        let n_embd = n_embd as usize;
        if n_embd == 0 || !rows.len().is_multiple_of(n_embd) {
            return Err(IdleGapError::Rows { got: rows.len(), n_embd, needed: n_embd });
        }
        Ok(Self { n_embd, rows })
    }

    /// The embedding of `tokens`: what the first block of a model is fed with.
    pub fn embedded(table: &mut EmbeddingTable, tokens: &[Token]) -> Result<Self, IdleGapError> {
        let mut rows = Vec::new();
        table.lookup(tokens, &mut rows)?;
        Self::new(table.n_embd(), rows)
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len() / self.n_embd
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Fails if there are fewer than `rows`.
    pub(super) fn require(&self, rows: u32) -> Result<(), IdleGapError> {
        let needed = rows as usize * self.n_embd;
        if self.rows.len() >= needed {
            return Ok(());
        }
        Err(IdleGapError::Rows { got: self.rows.len(), n_embd: self.n_embd, needed })
    }

    /// Rows `first..first + count`.
    pub(super) fn input(&self, first: u32, count: u32) -> RowInput<'_> {
        let start = first as usize * self.n_embd;
        RowInput::Hidden(&self.rows[start..start + count as usize * self.n_embd])
    }

    /// What the slice in `path` makes of them.
    pub(super) fn through(&self, path: &Path, threads: u32) -> Result<Self, IdleGapError> {
        let model = Model::load(path, ModelParams::default())?;
        let n = u32::try_from(self.len()).unwrap_or(u32::MAX);
        let params = ContextParams {
            n_batch: n,
            n_ubatch: n,
            threads,
            threads_batch: threads,
            ..ContextParams::new(Output::Hidden, 1, n)
        };
        let mut context = llama::SliceContext::new(&model, &params)?;
        run(&mut context, self, &Span::new(0, n))?;
        Self::new(model.n_embd(), context.hidden().to_vec())
    }
}

/// `count` tokens of a fixed text in the vocabulary of the model in `path`; of a model without a tokenizer, tokens of no
/// meaning.
pub fn text_tokens(path: &Path, count: u32) -> Result<Vec<Token>, IdleGapError> {
    let vocab = Model::load(path, ModelParams::vocabulary_only())?.vocab();
    let count = count as usize;
    if vocab.has_tokenizer() {
        let text = vocab.tokenize(TEXT, AddSpecial::AsModelSays, Special::Text)?;
        if !text.is_empty() {
            return Ok(text.into_iter().cycle().take(count).collect());
        }
    }
    let n_tokens = vocab.n_tokens().clamp(1, 1000) as usize;
    Ok((0..count).map(|i| Token(((i * 37 + 5) % n_tokens) as i32)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole_and_enough() {
        let rows = HiddenRows::new(2, vec![1.0, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(rows.len(), 2);
        let RowInput::Hidden(second) = rows.input(1, 1) else { panic!("they are hidden rows") };
        assert_eq!(second, [3.0, 4.0]);
        rows.require(2).unwrap();
        let refused = rows.require(3).unwrap_err().to_string();
        assert_eq!(refused, "4 numbers of hidden rows of width 2: 6 are needed, in whole rows");
        assert!(HiddenRows::new(2, vec![1.0; 3]).is_err());
        assert!(HiddenRows::new(0, vec![]).is_err());
    }
}
