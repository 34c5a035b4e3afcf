//! The model, its slices, and the texts of the whole model, which those of a replica must equal.

use std::path::{Path, PathBuf};

use cluster::LayerRange;
use gguf::cut::{CutOptions, plan_embedding, plan_slice};
use gguf::{Gguf, Part};
use llama::{
    AddSpecial, ContextParams, EmbeddingTable, ExtraBuffers, Model, ModelParams, Output, RowInput, Rows,
    SliceContext, Special, Token,
};
use tempfile::TempDir;

pub(crate) const N_LAYER: u32 = 30;
pub(crate) const N_EMBD: u32 = 576;

pub(crate) fn model_path() -> PathBuf {
    let folder = std::env::var_os("SHOAL_MODELS").map(PathBuf::from).unwrap_or_else(|| {
        PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/shoal/models")
    });
    let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is missing: run scripts/fetch-models.sh", path.display());
    path
}

/// The slices of a model in a folder that goes away with it.
pub(crate) struct Slices {
    folder: TempDir,
    pub(crate) ranges: Vec<LayerRange>,
}

impl Slices {
    pub(crate) fn cut(cuts: &[u32]) -> Self {
        let path = model_path();
        let file = std::fs::File::open(&path).unwrap();
        let gguf = Gguf::read(vec![Part::new("SmolLM2", file)]).unwrap();
        let slices =
            Self { folder: TempDir::new().unwrap(), ranges: LayerRange::from_cuts(cuts, N_LAYER).unwrap() };
        let options = CutOptions::default();
        let write = |plan: gguf::write::OutputPlan, path: &Path| {
            let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
            plan.write_to(&mut file, &mut |_| {}).unwrap();
        };
        for range in &slices.ranges {
            write(plan_slice(&gguf, *range, &options).unwrap(), &slices.slice(*range));
        }
        write(plan_embedding(&gguf, &options).unwrap(), &slices.embedding());
        slices
    }

    pub(crate) fn slice(&self, range: LayerRange) -> PathBuf {
        self.folder.path().join(format!("{}-{}.gguf", range.start(), range.end()))
    }

    pub(crate) fn embedding(&self) -> PathBuf {
        self.folder.path().join("embedding.gguf")
    }
}

/// The whole model in one context.
pub(crate) struct Whole {
    context: SliceContext,
    embedding: EmbeddingTable,
}

impl Whole {
    pub(crate) fn load(slices: &Slices, n_ctx: u32) -> Self {
        let params = ModelParams { extra_buffers: ExtraBuffers::Plain, ..ModelParams::default() };
        let model = Model::load(&model_path(), params).unwrap();
        let params =
            ContextParams { threads: 1, threads_batch: 1, ..ContextParams::new(Output::Logits, 1, n_ctx) };
        Self {
            context: SliceContext::new(&model, &params).unwrap(),
            embedding: EmbeddingTable::open(&slices.embedding()).unwrap(),
        }
    }

    pub(crate) fn tokenize(&self, text: &str) -> Vec<i32> {
        let vocab = self.context.model().vocab();
        vocab
            .tokenize(text, AddSpecial::No, Special::Control)
            .unwrap()
            .into_iter()
            .map(|token| token.0)
            .collect()
    }

    /// The greedy continuation, without the token that ends it.
    pub(crate) fn greedy(&mut self, prompt: &[i32], max_tokens: usize) -> Vec<i32> {
        self.context.clear();
        let vocab = self.context.model().vocab();
        let mut text = Vec::new();
        let mut logits = self.logits(prompt, 0);
        while text.len() < max_tokens {
            let best =
                (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a))).unwrap();
            let token = Token(best as i32);
            if vocab.is_end_of_generation(token) {
                break;
            }
            let position = prompt.len() + text.len();
            text.push(token.0);
            logits = self.logits(&[token.0], position);
        }
        text
    }

    fn logits(&mut self, tokens: &[i32], position: usize) -> Vec<f32> {
        let tokens: Vec<Token> = tokens.iter().copied().map(Token).collect();
        let mut hidden = Vec::new();
        self.embedding.lookup(&tokens, &mut hidden).unwrap();
        let n = tokens.len();
        let positions: Vec<u32> = (position as u32..).take(n).collect();
        let outputs: Vec<bool> = (1..=n).map(|row| row == n).collect();
        let rows = Rows {
            input: RowInput::Hidden(&hidden),
            slots: &vec![0; n],
            positions: &positions,
            outputs: &outputs,
        };
        self.context.run(&rows).unwrap();
        self.context.logits(n - 1).unwrap().to_vec()
    }
}

/// Different prompts of different lengths, in SmolLM2's chat template.
pub(crate) fn prompts(whole: &Whole, n: usize) -> Vec<Vec<i32>> {
    let questions = [
        "What is the capital of France?",
        "Write a haiku about the sea.",
        "Count from one to ten.",
        "Explain why the sky is blue to a child who has never seen a rainbow, in one short paragraph.",
        "Name three animals that live in a shoal.",
        "Translate 'good morning' into German and Italian.",
        "What is 12 times 12?",
    ];
    (0..n)
        .map(|i| {
            let question = questions[i % questions.len()];
            let turn = i / questions.len();
            whole.tokenize(&format!(
                "<|im_start|>user\n{question} (answer {turn})<|im_end|>\n<|im_start|>assistant\n"
            ))
        })
        .collect()
}
