//! What cannot be cut is refused with the reason: whole architectures, sizes, and ranges.
//!
//! Table-driven, from metadata and empty tensors: a row that is added is tested.

use cluster::{LayerRange, RangeRefusal, RangeRule};
use gguf::architectures::{
    Architecture, Recurrence, SizeRule, SlidingWindow, Support, TABLE, WithoutSliding,
};
use gguf::cut::{CutError, CutOptions, Uncertified, plan_embedding, plan_slice};
use gguf::write::{Data, Writer};
use gguf::{Error, Gguf, Part, TensorType};

const N_EMBD: u64 = 32;

/// What a model needs to be described: a vocabulary, and a tensor in each block.
fn stub(architecture: &Architecture, n_layer: u32, n_vocab: u64) -> Gguf {
    let mut writer = Writer::new();
    writer.set("general.architecture", architecture.name);
    let mut set = |key: &str, value: u32| writer.set(format!("{}.{key}", architecture.name), value);
    set("block_count", n_layer);
    set("context_length", 64);
    set("embedding_length", N_EMBD as u32);
    set("attention.head_count", 1);
    set("attention.sliding_window", 16);
    writer.tensor("token_embd.weight", TensorType::Q4_0, &[N_EMBD, n_vocab], Data::Zeros).unwrap();
    for block in 0..n_layer {
        let name = format!("blk.{block}.attn_norm.weight");
        writer.tensor(name, TensorType::F32, &[N_EMBD], Data::Zeros).unwrap();
    }
    read(writer)
}

fn read(writer: Writer) -> Gguf {
    Gguf::read(vec![Part::new("model.gguf", writer.plan().unwrap().to_bytes().unwrap())]).unwrap()
}

fn range(start: u32, end: u32) -> LayerRange {
    LayerRange::new(start, end).unwrap()
}

/// The rule that forbids to cut `range` out, whether or not the architecture is certified.
fn broken_rule(model: &Gguf, range: LayerRange) -> Option<RangeRule> {
    match plan_slice(model, range, &CutOptions { uncertified: Uncertified::Allow }) {
        Ok(_) => None,
        Err(CutError::Range { refusal: RangeRefusal::Rule { range: refused, rule }, .. }) => {
            assert_eq!(refused, range);
            Some(rule)
        }
        Err(error) => panic!("{error}"),
    }
}

fn find(name: &str) -> &'static Architecture {
    gguf::architectures::find(name).unwrap()
}

#[test]
fn every_refused_architecture_is_refused_with_its_reason() {
    let mut count = 0;
    for architecture in TABLE {
        let Support::Refused(expected) = architecture.support else { continue };
        let mut writer = Writer::new();
        writer.set("general.architecture", architecture.name);
        let model = read(writer);
        let allow = CutOptions { uncertified: Uncertified::Allow };
        for error in [
            plan_slice(&model, range(0, 1), &allow).unwrap_err(),
            plan_embedding(&model, &allow).unwrap_err(),
        ] {
            let CutError::Model(Error::Refused { architecture: name, reason, .. }) = &error else {
                panic!("{}: {error}", architecture.name)
            };
            assert_eq!((name.as_str(), reason.as_str()), (architecture.name, expected));
            assert!(error.to_string().contains(expected), "{error}");
        }
        count += 1;
    }
    assert!(count > 50, "{count} architectures are refused");
}

#[test]
fn every_uncertified_architecture_is_cut_only_when_that_is_allowed() {
    for architecture in TABLE.iter().filter(|row| row.support == Support::Uncertified) {
        let model = stub(architecture, 8, 40);
        let error = plan_slice(&model, range(0, 8), &CutOptions::default()).unwrap_err();
        assert!(matches!(error, CutError::Uncertified { .. }), "{error}");
        assert!(error.to_string().contains("--allow-uncertified"), "{error}");
        // Some need a pattern that only a file states; but it is no longer the certification that is missing.
        broken_rule(&model, range(0, 8));
    }
}

#[test]
fn an_architecture_that_llama_cpp_does_not_know_is_refused() {
    let unknown = Architecture { name: "llama-9", ..*find("llama") };
    let error = plan_slice(&stub(&unknown, 2, 40), range(0, 1), &CutOptions::default()).unwrap_err();
    assert!(error.to_string().contains("does not know it"), "{error}");
}

#[test]
fn ranges_beyond_the_model_are_refused_for_every_certified_architecture() {
    for architecture in TABLE.iter().filter(|row| row.support == Support::Certified) {
        let model = stub(architecture, 8, 40);
        for (start, end) in [(4, 9), (8, 9), (100, 200)] {
            let error = plan_slice(&model, range(start, end), &CutOptions::default()).unwrap_err();
            assert!(error.to_string().contains("the model has 8 blocks"), "{error}");
        }
    }
}

#[test]
fn a_size_with_constants_of_its_own_is_neither_cut_nor_made() {
    let mut count = 0;
    for architecture in TABLE {
        let SizeRule::Constant { blocks } = architecture.size_rule else { continue };
        let model = stub(architecture, blocks, 40);
        assert_eq!(broken_rule(&model, range(0, blocks / 2)), Some(RangeRule::WholeOnly));
        assert_eq!(broken_rule(&model, range(blocks / 2, blocks)), Some(RangeRule::WholeOnly));
        assert_eq!(broken_rule(&model, range(0, blocks)), None);
        let larger = stub(architecture, blocks + 4, 40);
        let forbidden = RangeRule::ForbiddenLength { length: blocks };
        assert_eq!(broken_rule(&larger, range(0, blocks)), Some(forbidden));
        assert_eq!(broken_rule(&larger, range(0, blocks - 1)), None);
        count += 1;
    }
    assert!(count >= 2, "Gemma 2 and 3 at least");
}

#[test]
fn deepseek2_slices_never_look_like_a_lite_model() {
    let deepseek2 = find("deepseek2");
    let forbidden = |length| Some(RangeRule::ForbiddenLength { length });
    let large = stub(deepseek2, 61, 40);
    for length in [26, 27] {
        assert_eq!(broken_rule(&large, range(0, length)), forbidden(length));
        assert_eq!(broken_rule(&large, range(61 - length, 61)), forbidden(length));
    }
    assert_eq!(broken_rule(&large, range(0, 48)), None);
    // 48 blocks are lite with this vocabulary alone.
    assert_eq!(broken_rule(&stub(deepseek2, 61, 128_256), range(0, 48)), forbidden(48));
    // Slices of lite models say that they are.
    assert_eq!(broken_rule(&stub(deepseek2, 27, 40), range(0, 26)), None);
}

#[test]
fn a_pattern_that_no_key_states_is_not_cut_inside_its_period() {
    let mut count = 0;
    for architecture in TABLE {
        let Some(step) = architecture.start_multiple else { continue };
        let model = stub(architecture, 3 * step, 40);
        for start in 1..3 * step {
            let expected = (start % step != 0).then_some(RangeRule::StartMultiple { step });
            assert_eq!(broken_rule(&model, range(start, 3 * step)), expected, "{}", architecture.name);
        }
        count += 1;
    }
    assert!(count >= 1, "SmolLM3 at least");
}

#[test]
fn a_hybrid_slice_without_both_kinds_of_block_is_refused() {
    let mut count = 0;
    for architecture in TABLE {
        let Recurrence::Interval(interval) = architecture.recurrence else { continue };
        let model = stub(architecture, 2 * interval, 40);
        let refused =
            [range(0, interval - 1), range(interval - 1, interval), range(interval, 2 * interval - 1)];
        for range in refused {
            assert_eq!(broken_rule(&model, range), Some(RangeRule::BothMemories), "{}", architecture.name);
        }
        assert_eq!(broken_rule(&model, range(interval - 2, interval)), None);
        count += 1;
    }
    assert!(count >= 2, "qwen35 and qwen3next at least");
}

#[test]
fn a_slice_without_the_sliding_block_it_needs_is_refused() {
    for architecture in TABLE {
        let SlidingWindow::Pattern { without: WithoutSliding::Impossible, .. } = architecture.sliding_window
        else {
            continue;
        };
        let model = stub(architecture, 8, 40);
        let shape = gguf::model_shape(&model).unwrap();
        for block in 0..8 {
            let slides = matches!(
                shape.blocks[block as usize].kind.attention,
                cluster::Attention::SlidingWindow { .. }
            );
            let expected = (!slides).then_some(RangeRule::SlidingBlock);
            assert_eq!(broken_rule(&model, range(block, block + 1)), expected, "{}", architecture.name);
        }
    }
}
