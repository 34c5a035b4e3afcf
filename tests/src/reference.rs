//! The whole, uncut model, run by llama.cpp from token ids: what every pipeline is compared with.

use std::path::Path;

use anyhow::{Context, Result};
use llama::{
    AddSpecial, ContextParams, Model, ModelParams, Output, RowInput, Rows, SliceContext, Special, Token,
};

/// An untouched model file, ready to generate greedily.
pub struct Reference {
    context: SliceContext,
}

impl Reference {
    /// Loads a model file as it is.
    pub fn load(path: &Path) -> Result<Self> {
        let model = Model::load(path, ModelParams::default())?;
        // One thread: llama.cpp's threads spin at their barriers, and the stages under test want the cores.
        let params =
            ContextParams { threads: 1, threads_batch: 1, ..ContextParams::new(Output::Logits, 1, 2048) };
        let context = SliceContext::new(&model, &params)?;
        Ok(Self { context })
    }

    /// The greedy continuation of `prompt`, up to `max_tokens` tokens or the model's own end.
    pub fn greedy_text(&mut self, prompt: &str, max_tokens: usize) -> Result<String> {
        let vocab = self.context.model().vocab();
        let mut input = vocab.tokenize(prompt, AddSpecial::AsModelSays, Special::Text)?;
        let (mut position, mut bytes) = (0, Vec::new());
        self.context.clear();
        for _ in 0..max_tokens {
            let token = self.next_greedy(&input, position)?;
            position += input.len() as u32;
            if vocab.is_end_of_generation(token) {
                break;
            }
            vocab.append_bytes(token, Special::Text, &mut bytes)?;
            input = vec![token];
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn next_greedy(&mut self, tokens: &[Token], position: u32) -> Result<Token> {
        let n = tokens.len();
        let positions: Vec<u32> = (position..).take(n).collect();
        let outputs: Vec<bool> = (1..=n).map(|i| i == n).collect();
        let slots = vec![0; n];
        self.context.run(&Rows {
            input: RowInput::Tokens(tokens),
            slots: &slots,
            positions: &positions,
            outputs: &outputs,
        })?;
        let logits = self.context.logits(n - 1).context("no logits")?;
        // The first of equal maxima, as llama.cpp's greedy sampler has it.
        let best = logits.iter().enumerate().fold(0, |best, (i, l)| if *l > logits[best] { i } else { best });
        Ok(Token(best as i32))
    }
}
