//! A conversation that changes hands: begun by a chain cut one way, its keys and values are re-cut by layer and given to a chain
//! cut another way, in other slots of more. It goes on as if nothing had happened.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use cluster::LayerRange;
use gguf::Gguf;
use llama::kv_blob::{Blob, Form};
use llama::{ContextParams, FlashAttention, KvLayout, KvType};
use tests::models::{SMOLLM2, model_path};

use crate::comparison::{Chain, transcript_of_whole_with};
use crate::conversation::{Runner, SLOTS, TokenRows, converse};
use crate::cutting::{SliceFolder, open, splits_at_every_boundary};
use crate::recipes::recipes;

/// Runs before the change of hands: both prompts, and some steps.
const RUNS_BEFORE: usize = 8;
/// Slots of the second chain, where sequences are [`SHIFT`] slots further on.
const MORE_SLOTS: u32 = 2 * SLOTS + 1;
const SHIFT: u32 = 2;

/// Whoever has the conversation.
struct HandedOff {
    first: Chain,
    second: Chain,
    runs: usize,
}

impl Runner for HandedOff {
    fn run(&mut self, rows: &TokenRows) -> Result<Vec<Vec<f32>>> {
        self.runs += 1;
        if self.runs <= RUNS_BEFORE {
            return self.first.run(rows);
        }
        if self.runs == RUNS_BEFORE + 1 {
            for slot in 0..SLOTS {
                let blob = export(&mut self.first, slot)?;
                // Something is there already, and is replaced.
                import(&mut self.second, slot + SHIFT, &blob)?;
                import(&mut self.second, slot + SHIFT, &blob)?;
                let most = blob.layout().bytes(blob.tokens());
                ensure!(blob.data_bytes() <= most, "a blob is larger than its layout says");
                let again = export(&mut self.second, slot + SHIFT)?;
                ensure!(again == blob, "slot {slot} is another after the hand-off");
            }
        }
        let shifted = rows.slots.iter().map(|slot| slot + SHIFT).collect();
        self.second.run(&TokenRows {
            tokens: rows.tokens.clone(),
            slots: shifted,
            positions: rows.positions.clone(),
            outputs: rows.outputs.clone(),
        })
    }
}

/// A sequence of all layers, as it travels.
fn export(chain: &mut Chain, slot: u32) -> Result<Blob> {
    let parts: Result<Vec<_>, _> = chain.slices().iter_mut().map(|slice| slice.export_slot(slot)).collect();
    Ok(Blob::merge(parts?)?)
}

fn import(chain: &mut Chain, slot: u32, blob: &Blob) -> Result<()> {
    let mut start = 0;
    for slice in chain.slices() {
        let end = start + slice.model().n_layer() as usize;
        let prepared = blob.part(start..end)?.prepare(&slice.kv_form()?, slice.place(slot))?;
        slice.import_slot(slot, &prepared)?;
        ensure!(slice.next_position(slot) == blob.tokens());
        start = end;
    }
    ensure!(start == blob.n_layers(), "the chains hold as many layers");
    Ok(())
}

/// Converses with a change of hands between two cuts; the same tokens, and the same logits to the bit, as the whole model
/// gives without.
fn check(
    path: &Path,
    model: &Gguf,
    cuts: [&[LayerRange]; 2],
    change: &dyn Fn(&mut ContextParams),
) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let files = SliceFolder { model, folder: folder.path() };
    let whole = transcript_of_whole_with(path, change)?;
    let more_slots = |params: &mut ContextParams| {
        change(params);
        params.n_slots = MORE_SLOTS;
        params.max_outputs = MORE_SLOTS;
    };
    let mut chain = HandedOff {
        first: Chain::load_with(&files, cuts[0], change)?,
        second: Chain::load_with(&files, cuts[1], &more_slots)?,
        runs: 0,
    };
    let n_vocab = whole.logits[0].len() as u32;
    whole.check_equals(&converse(&mut chain, n_vocab)?)
}

/// From the second-finest cut to the finest, and back.
fn check_random(architecture: &'static str, change: &dyn Fn(&mut ContextParams)) -> Result<()> {
    for recipe in recipes(architecture) {
        let folder = tempfile::tempdir()?;
        let path = recipe.build(folder.path())?;
        let model = open(&path)?;
        let splits = splits_at_every_boundary(&gguf::model_shape(&model)?);
        let (finest, other) = (&splits[0], splits.get(1).unwrap_or(&splits[0]));
        for cuts in [[other, finest], [finest, other]] {
            check(&path, &model, cuts.map(Vec::as_slice), change)
                .with_context(|| format!("{architecture}, {}", recipe.variant))?;
        }
    }
    Ok(())
}

macro_rules! architectures {
    ($($test:ident: $architecture:literal,)*) => {
        mod a_conversation_changes_hands {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::check_random($architecture, &|_| ())
            })*
        }
    };
}

// One of each form of cache: plain, with sliding windows in some blocks and in all, multi-head latent attention, M-RoPE,
// learned positions, and layers whose sizes differ.
architectures! {
    llama: "llama",
    qwen2: "qwen2",
    gemma2: "gemma2",
    gemma3: "gemma3",
    gpt_oss: "gpt-oss",
    cohere2: "cohere2",
    phi3: "phi3",
    olmo2: "olmo2",
    deepseek2: "deepseek2",
    glm4moe: "glm4moe",
    qwen2vl: "qwen2vl",
    gpt2: "gpt2",
}

#[test]
fn caches_of_other_types_and_layouts_change_hands_too() -> Result<()> {
    check_random("llama", &|params| params.flash_attention = FlashAttention::Disabled)?;
    check_random("gemma2", &|params| params.flash_attention = FlashAttention::Disabled)?;
    check_random("gemma3", &|params| params.layout = KvLayout::Unified)?;
    check_random("qwen2", &|params| {
        params.kv_type_k = KvType::Q8_0;
        params.kv_type_v = KvType::Q8_0;
    })
}

/// Cuts a real model has in two replicas.
fn check_real(file_name: &str, cuts: [&[u32]; 2]) -> Result<()> {
    let path = model_path(file_name)?;
    let model = open(&path)?;
    let n_layer = gguf::model_shape(&model)?.n_layer();
    let [first, second] = cuts.map(|cuts| LayerRange::from_cuts(cuts, n_layer));
    check(&path, &model, [&first?, &second?], &|_| ())
}

#[test]
fn smollm2_cut_at_10_and_20_hands_off_to_a_cut_at_7_and_26() -> Result<()> {
    check_real(SMOLLM2, [&[10, 20], &[7, 26]])
}

/// A model with sliding windows. It is large: the test passes, and says so, where it is not there.
#[test]
fn gemma_3_hands_off_to_another_cut() -> Result<()> {
    const GEMMA: &str = "Gemma-3-270M-Q4_K_M.gguf";
    if let Err(error) = model_path(GEMMA) {
        eprintln!("not tested: {error}");
        return Ok(());
    }
    check_real(GEMMA, [&[5, 11], &[8]])
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_the_slot_empty_or_as_it_was() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = recipes("llama").remove(0).build(folder.path())?;
    let model = open(&path)?;
    let files = SliceFolder { model: &model, folder: folder.path() };
    let ranges = LayerRange::from_cuts(&[3], gguf::model_shape(&model)?.n_layer())?;
    let mut chain = Chain::load(&files, &ranges)?;
    converse(&mut chain, 512)?;
    let [first, second] = chain.slices() else { unreachable!("two slices") };
    let blob = first.export_slot(1)?;
    let tokens = blob.tokens();
    let refusal = |result: Result<(), llama::Error>| result.map_err(|error| error.to_string()).unwrap_err();
    let form = first.kv_form()?;
    let elsewhere = blob.prepare(&form, first.place(0))?;
    let misplaced = refusal(first.import_slot(1, &elsewhere));
    assert_eq!(misplaced, "a blob for sequence 0 of 2 caches was given for slot 1 of a context with 2");
    assert_eq!(first.next_position(1), tokens, "nothing has changed");
    let other_layers = refusal(second.import_slot(1, &blob.prepare(&form, second.place(1))?));
    assert!(other_layers.contains("mismatched layer count (3 instead of 5)"), "{other_layers}");
    assert_eq!(second.next_position(1), 0, "it is empty");
    assert!(refusal(first.export_slot(9).map(|_| ())).contains("slot 9 does not exist"));
    let short = |params: &mut ContextParams| params.n_ctx_per_slot = tokens - 1;
    let mut small = Chain::load_with(&files, &ranges, &short)?;
    let place = small.slices()[0].place(1);
    let too_long = refusal(small.slices()[0].import_slot(1, &blob.prepare(&form, place)?));
    assert!(too_long.contains(&format!("tokens of the blob is {tokens}")), "{too_long}");
    Ok(())
}

#[test]
fn an_empty_slot_has_nothing_to_hand_off() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = recipes("gemma3").remove(0).build(folder.path())?;
    let model = open(&path)?;
    let files = SliceFolder { model: &model, folder: folder.path() };
    let mut chain = Chain::load(&files, &splits_at_every_boundary(&gguf::model_shape(&model)?)[0])?;
    let refusal = chain.slices()[0].export_slot(0).unwrap_err().to_string();
    assert_eq!(refusal, "keys and values: the sequence has no tokens");
    Ok(())
}

#[test]
fn recurrent_models_are_refused_with_the_reason() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = recipes("qwen35").remove(0).build(folder.path())?;
    let model = open(&path)?;
    let files = SliceFolder { model: &model, folder: folder.path() };
    let mut chain = Chain::load(&files, &splits_at_every_boundary(&gguf::model_shape(&model)?)[0])?;
    let form: Result<Form, _> = chain.slices()[0].kv_form();
    let refusal = form.unwrap_err().to_string();
    assert!(refusal.contains("recurrent state"), "{refusal}");
    assert!(chain.slices()[0].export_slot(0).is_err());
    Ok(())
}
