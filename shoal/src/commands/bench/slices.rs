//! `shoal bench slices`: what cutting costs, in time.
//!
//! The whole model and the chain of its slices take turns within one run, so that whatever else the host does meets both; each
//! pair gives a ratio, and the median of the ratios is the result. Times of different runs are not compared.

use std::time::Instant;

use anyhow::Result;
use clap::Args;
use cluster::LayerRange;
use comfy_table::{Table, presets};
use llama::Token;
use node::{ModelFile, default_threads};
use serde::Serialize;

use crate::chain::{self, Chain, Runner, Setup, Step, Whole, greedy};
use crate::cli::Globals;
use crate::commands::model::{self, BorrowedSlices};
use crate::cuts::Cuts;
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::ProgressView;
use profiler::statistics::{median, spread};

/// Decode steps of one sample: long enough for a clock, short enough that the host's speed does not change within a pair.
const STEPS: u32 = 16;

/// Tokens in each slot before decoding is measured.
const CONTEXT: u32 = 32;

/// Tokens of the measured prompt.
const PREFILL: u32 = 256;

/// Slots of the larger decode batch.
const SLOTS: u32 = 8;

/// Arguments of `shoal bench slices`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench slices -m SmolLM2                     cut in three, and after every block
  shoal bench slices -m SmolLM2 --cuts 15 --json

A ratio of 1.03 says that the chain takes 3 % longer than the whole model.")]
pub(crate) struct SlicesArgs {
    #[command(flatten)]
    model: model::ModelArg,
    /// First blocks of the second and later slices, such as 10,20; or `every` [default: three even slices, then `every`].
    #[arg(long, value_name = "BLOCKS")]
    cuts: Option<Cuts>,
    /// Pairs of measurements for each case.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(5..=1000))]
    repeat: u32,
    /// CPU threads of the whole model and of each slice [default: what `serve` gives each stage where this host runs as
    /// many stages as there are slices].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    model: String,
    threads: u32,
    repeat: u32,
    results: Vec<Measured>,
}

#[derive(Serialize)]
struct Measured {
    cuts: Vec<u32>,
    slices: usize,
    case: &'static str,
    /// Median time of a step, or of the prompt.
    whole_ms: f64,
    sliced_ms: f64,
    /// Median of the pairs' ratios.
    ratio: f64,
    /// Distance between the quartiles of the pairs' ratios.
    spread: f64,
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    Decode { slots: u32 },
    Prefill,
}

const CASES: [(&str, Case); 3] = [
    ("decode_1", Case::Decode { slots: 1 }),
    ("decode_8", Case::Decode { slots: SLOTS }),
    ("prefill_256", Case::Prefill),
];

/// Measures and prints.
pub(crate) fn run(args: &SlicesArgs, globals: &Globals) -> Result<()> {
    let folders = model::folders(globals)?;
    let file = args.model.open(&folders)?;
    let interrupt = Interrupt::listen()?;
    let layouts = layouts(args, &file)?;
    let stages = layouts.iter().map(Vec::len).max().unwrap_or(1) as u32;
    let threads = args.threads.unwrap_or_else(|| default_threads(stages));
    let n_ctx = PREFILL.max(CONTEXT + STEPS * (args.repeat + 1));
    let setup = Setup { slots: SLOTS, n_ctx, n_batch: PREFILL.max(CONTEXT * SLOTS), threads };
    let whole_model = chain::load(file.path(), 0)?;
    let mut results = Vec::new();
    for ranges in layouts {
        let slices = BorrowedSlices::cut(&file, &ranges, &folders, &interrupt)?;
        let mut whole = Whole::new(&whole_model, setup)?;
        let mut chain = Chain::load(slices.files(), &[], setup)?;
        let n_vocab = file.shape().n_vocab;
        let sides = [Side::new(&mut whole, n_vocab), Side::new(&mut chain, n_vocab)];
        let mut bench = Bench { sides, repeat: args.repeat, interrupt: &interrupt };
        for (name, case) in CASES {
            results.push(bench.measure(name, case, &ranges)?);
        }
    }
    let report = Report { model: file.name(), threads, repeat: args.repeat, results };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&table(&report))?
    }
    Ok(())
}

fn layouts(args: &SlicesArgs, file: &ModelFile) -> Result<Vec<Vec<LayerRange>>> {
    let shape = file.shape();
    if let Some(cuts) = &args.cuts {
        return Ok(vec![cuts.ranges(shape)?]);
    }
    Ok(vec![shape.split(3.min(shape.n_layer()))?, shape.finest_split()])
}

struct Bench<'a> {
    sides: [Side<'a>; 2],
    repeat: u32,
    interrupt: &'a Interrupt,
}

impl Bench<'_> {
    fn measure(&mut self, name: &'static str, case: Case, ranges: &[LayerRange]) -> Result<Measured> {
        let mut view = ProgressView::new();
        let what = format!("{name}, {} slices", ranges.len());
        for side in &mut self.sides {
            side.prepare(case)?;
        }
        let mut samples = [Vec::new(), Vec::new()];
        // The first pair warms up.
        for round in 0..=self.repeat {
            model::go_on(self.interrupt)?;
            view.show_share(&what, u64::from(round), u64::from(self.repeat));
            // Who goes first changes, so that neither profits from what the other left in the caches.
            let order = if round.is_multiple_of(2) { [0, 1] } else { [1, 0] };
            for i in order {
                let sample = self.sides[i].sample(case)?;
                if round > 0 {
                    samples[i].push(sample);
                }
            }
        }
        let [whole, sliced] = samples;
        let ratios: Vec<f64> = whole.iter().zip(&sliced).map(|(whole, sliced)| sliced / whole).collect();
        Ok(Measured {
            cuts: ranges.iter().skip(1).map(|range| range.start()).collect(),
            slices: ranges.len(),
            case: name,
            whole_ms: median(&whole),
            sliced_ms: median(&sliced),
            ratio: median(&ratios),
            spread: spread(&ratios),
        })
    }
}

/// One of the two that take turns.
struct Side<'a> {
    runner: &'a mut dyn Runner,
    n_vocab: u32,
    /// The next token of each slot, and its position.
    next: Vec<Token>,
    position: u32,
}

impl<'a> Side<'a> {
    fn new(runner: &'a mut dyn Runner, n_vocab: u32) -> Self {
        Self { runner, n_vocab, next: Vec::new(), position: 0 }
    }

    /// Fills the slots.
    fn prepare(&mut self, case: Case) -> Result<()> {
        self.runner.clear();
        let Case::Decode { slots } = case else { return Ok(()) };
        self.next.clear();
        for slot in 0..slots {
            let step = Step::prompt(slot, &self.text(CONTEXT, slot));
            self.runner.run(&step)?;
            self.next.push(greedy(self.runner.logits(step.last())?));
        }
        self.position = CONTEXT;
        Ok(())
    }

    /// Milliseconds of a step, or of the prompt.
    fn sample(&mut self, case: Case) -> Result<f64> {
        match case {
            Case::Prefill => {
                self.runner.clear();
                let step = Step::prompt(0, &self.text(PREFILL, 0));
                let start = Instant::now();
                self.runner.run(&step)?;
                Ok(start.elapsed().as_secs_f64() * 1e3)
            }
            Case::Decode { .. } => {
                let start = Instant::now();
                for _ in 0..STEPS {
                    self.decode()?;
                }
                Ok(start.elapsed().as_secs_f64() * 1e3 / f64::from(STEPS))
            }
        }
    }

    fn decode(&mut self) -> Result<()> {
        let mut step = Step::default();
        for (slot, &token) in (0..).zip(&self.next) {
            step.push(slot, self.position, token);
        }
        self.runner.run(&step)?;
        for (row, token) in self.next.iter_mut().enumerate() {
            *token = greedy(self.runner.logits(row)?);
        }
        self.position += 1;
        Ok(())
    }

    /// Tokens of no meaning: speed does not depend on it.
    fn text(&self, n: u32, seed: u32) -> Vec<Token> {
        (0..n).map(|i| Token(((i * 37 + seed * 11 + 5) % self.n_vocab.clamp(1, 1000)) as i32)).collect()
    }
}

fn table(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["case", "slices", "whole", "sliced", "ratio", "spread"]);
    for row in &report.results {
        table.add_row([
            row.case.to_owned(),
            row.slices.to_string(),
            format!("{:.2} ms", row.whole_ms),
            format!("{:.2} ms", row.sliced_ms),
            format!("{:.3}", row.ratio),
            format!("{:.3}", row.spread),
        ]);
    }
    format!("{}, {} threads, {} pairs each\n{table}", report.model, report.threads, report.repeat)
}
