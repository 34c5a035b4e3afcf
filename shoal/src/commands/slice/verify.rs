//! `shoal slice verify`: does the chain of slices compute what the whole model does?
//!
//! Greedy decoding of a built-in prompt, step by step. The reference is the untouched file, given token ids; against
//! it stand the chain, and the model as a single slice, which tells a fault of the embedding lookup from one of the
//! cut. They run one after the other, so that no more than one model is in memory, and the reference's logits are kept to compare.

use anyhow::{Result, ensure};
use clap::Args;
use cluster::LayerRange;
use llama::{AddSpecial, Model, Special, Token};
use node::{ModelFile, default_threads};
use serde::Serialize;

use crate::chain::{self, Chain, Runner, Setup, Step, Whole, greedy, shares_of_gpu};
use crate::cli::Globals;
use crate::commands::model::{self, BorrowedSlices};
use crate::cuts::Cuts;
use crate::exit::Unequal;
use crate::interrupt::Interrupt;
use crate::output;

/// Plain text: base models continue it as well as instructed ones. Long enough for a prefill of some dozen rows.
const PROMPT: &str = "The lighthouse keeper climbed the stairs every evening before dusk. He carried oil, a clean \
                      cloth, and a notebook in which he wrote down every ship that passed. One evening in";

/// Rows of the prompt in one step where a model lies on GPU and CPU. From 32 rows on ggml lets the GPU compute also the CPU's
/// blocks (ggml-vulkan.cpp, ggml-cuda.cu: `min_batch_size`), but only for a model that has some block on the GPU: the whole
/// model and a slice without any would not compute alike.
const ROWS_ON_BOTH: u32 = 16;

/// Arguments of `shoal slice verify`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal slice verify -m SmolLM2 --cuts 10,20
  shoal slice verify -m SmolLM2 --cuts every --tokens 32 --json
  shoal slice verify -m SmolLM2 --cuts 10,20 --gpu-layers 15

Exits with 0 if tokens and logits are equal, with 1 if not.")]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    model: model::ModelArg,
    /// First blocks of the second and later slices, such as 10,20; or `every`.
    #[arg(long, value_name = "BLOCKS")]
    cuts: Cuts,
    /// Tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    tokens: u32,
    /// Largest difference of logits that counts as equal: on the CPU there is none.
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    tolerance: f32,
    /// Blocks to keep on GPUs: the model's last ones, in the whole model as in its slices.
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu_layers: u32,
    /// CPU threads [default: the physical cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    model: String,
    architecture: String,
    cuts: Vec<u32>,
    slices: usize,
    prompt_tokens: usize,
    tokens: u32,
    threads: u32,
    gpu_layers: u32,
    #[serde(flatten)]
    chain: Comparison,
    /// The model as one slice.
    single_slice: Comparison,
    text: String,
    llama_cpp: &'static str,
}

/// What stands against the reference.
#[derive(Debug, Clone, Serialize)]
struct Comparison {
    tokens_equal: bool,
    /// Up to the first token that differs. Not a number if any logit is not.
    max_abs_logit_diff: f32,
    /// Step of the first token that differs.
    first_difference: Option<usize>,
}

impl Comparison {
    fn holds(&self, tolerance: f32) -> bool {
        self.tokens_equal && self.max_abs_logit_diff <= tolerance
    }
}

/// What the reference computed: a token and its logits for each step.
struct Reference {
    prompt: Vec<Token>,
    steps: Vec<(Token, Vec<f32>)>,
    text: String,
}

/// Compares, prints, and fails if there is a difference.
pub(crate) fn run(args: &VerifyArgs, globals: &Globals) -> Result<()> {
    let folders = model::folders(globals)?;
    let file = args.model.open(&folders)?;
    let n_layer = file.shape().n_layer();
    let ranges = args.cuts.ranges(file.shape())?;
    let interrupt = Interrupt::listen()?;
    let threads = args.threads.unwrap_or_else(|| default_threads(1));

    let whole = [LayerRange::new(0, n_layer)?];
    let slices = BorrowedSlices::cut(&file, &ranges, &folders, &interrupt)?;
    let single = BorrowedSlices::cut(&file, &whole, &folders, &interrupt)?;
    let (reference, setup) = reference(&file, args, threads, &interrupt)?;
    let compare = |slices, ranges| {
        let chain = Chain::load(slices, &shares_of_gpu(ranges, args.gpu_layers), setup)?;
        compare(&reference, chain, setup, &interrupt)
    };
    let chain = compare(slices.files(), &ranges)?;
    let single_slice = compare(single.files(), &whole)?;
    drop((slices, single));

    let holds = chain.holds(args.tolerance) && single_slice.holds(args.tolerance);
    let report = Report {
        model: file.name(),
        architecture: file.shape().architecture.clone(),
        cuts: ranges.iter().skip(1).map(|range| range.start()).collect(),
        slices: ranges.len(),
        prompt_tokens: reference.prompt.len(),
        tokens: args.tokens,
        threads,
        gpu_layers: args.gpu_layers,
        chain,
        single_slice,
        text: reference.text,
        llama_cpp: llama::version(),
    };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report, holds))?
    }
    if holds { Ok(()) } else { Err(Unequal.into()) }
}

fn reference(
    file: &ModelFile,
    args: &VerifyArgs,
    threads: u32,
    interrupt: &Interrupt,
) -> Result<(Reference, Setup)> {
    let model = chain::load(file.path(), args.gpu_layers)?;
    let tokens = args.tokens;
    let prompt = model.vocab().tokenize(PROMPT, AddSpecial::AsModelSays, Special::Text)?;
    ensure!(!prompt.is_empty(), "the model's tokenizer makes no tokens of plain text");
    let n_prompt = prompt.len() as u32;
    let on_both = (1..file.shape().n_layer()).contains(&args.gpu_layers);
    let n_batch = if on_both { ROWS_ON_BOTH } else { n_prompt };
    let setup = Setup { slots: 1, n_ctx: n_prompt + tokens, n_batch, threads };
    let mut whole = Whole::new(&model, setup)?;
    let mut steps = Vec::new();
    decode(&mut whole, setup, &prompt, tokens, |_, token, logits| {
        steps.push((token, logits.to_vec()));
        model::go_on(interrupt)
    })?;
    let text = detokenize(&model, steps.iter().map(|(token, _)| *token))?;
    Ok((Reference { prompt, steps, text }, setup))
}

fn compare(
    reference: &Reference,
    mut chain: Chain,
    setup: Setup,
    interrupt: &Interrupt,
) -> Result<Comparison> {
    let mut comparison = Comparison { tokens_equal: true, max_abs_logit_diff: 0.0, first_difference: None };
    decode(&mut chain, setup, &reference.prompt, reference.steps.len() as u32, |i, token, logits| {
        let (wanted, wanted_logits) = &reference.steps[i];
        // After the first different token the texts are different, and so are their logits.
        if comparison.tokens_equal {
            let difference = max_abs_difference(wanted_logits, logits);
            comparison.max_abs_logit_diff = larger(comparison.max_abs_logit_diff, difference);
            comparison.tokens_equal = token == *wanted;
            comparison.first_difference = (token != *wanted).then_some(i);
        }
        model::go_on(interrupt)
    })?;
    Ok(comparison)
}

/// Decodes greedily, and shows each token with the logits it was taken from.
fn decode(
    runner: &mut dyn Runner,
    setup: Setup,
    prompt: &[Token],
    tokens: u32,
    mut visit: impl FnMut(usize, Token, &[f32]) -> Result<()>,
) -> Result<()> {
    let mut steps = Step::prompt(0, prompt).cut(setup.n_batch);
    let Some(mut step) = steps.pop() else { return Ok(()) };
    for step in steps {
        runner.run(&step)?;
    }
    for (i, position) in (0..tokens as usize).zip(prompt.len() as u32..) {
        runner.run(&step)?;
        let logits = runner.logits(step.last())?;
        let token = greedy(logits);
        visit(i, token, logits)?;
        step = Step::default();
        step.push(0, position, token);
    }
    Ok(())
}

/// Not a number if any of them is not: such a difference is no difference that could be small enough.
fn max_abs_difference(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() {
        return f32::NAN;
    }
    a.iter().zip(b).map(|(x, y)| if x == y { 0.0 } else { (x - y).abs() }).fold(0.0, larger)
}

/// Unlike `f32::max`, keeps what is not a number.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}

fn detokenize(model: &Model, tokens: impl Iterator<Item = Token>) -> Result<String> {
    let (vocab, mut bytes) = (model.vocab(), Vec::new());
    for token in tokens {
        vocab.append_bytes(token, Special::Control, &mut bytes)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn text(report: &Report, holds: bool) -> String {
    let line = |name: &str, comparison: &Comparison| {
        let tokens = match comparison.first_difference {
            None => format!("{} tokens equal", report.tokens),
            Some(step) => format!("token {step} differs"),
        };
        format!("{name}: {tokens}, largest difference of logits {}", comparison.max_abs_logit_diff)
    };
    [
        format!(
            "{} ({}), {} slices, cut at {:?}",
            report.model, report.architecture, report.slices, report.cuts
        ),
        line("chain of slices", &report.chain),
        line("as one slice", &report.single_slice),
        format!("text: {}", report.text.trim()),
        if holds { "equal".to_owned() } else { "NOT EQUAL".to_owned() },
    ]
    .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_that_is_not_a_number_is_never_small() {
        assert_eq!(max_abs_difference(&[1.0, -2.0], &[1.5, -2.0]), 0.5);
        assert_eq!(max_abs_difference(&[f32::NEG_INFINITY], &[f32::NEG_INFINITY]), 0.0);
        assert!(max_abs_difference(&[1.0, 2.0], &[f32::NAN, 2.0]).is_nan());
        assert!(max_abs_difference(&[1.0], &[1.0, 2.0]).is_nan());
        let odd = Comparison { tokens_equal: true, max_abs_logit_diff: f32::NAN, first_difference: None };
        assert!(!odd.holds(1e9));
    }
}
