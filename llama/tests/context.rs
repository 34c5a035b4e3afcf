//! Rows of several slots give what each slot gives alone, whatever the order, the gaps and the mix.

#![allow(clippy::unwrap_used, reason = "helpers of tests may, as tests may")]

mod common;

use common::*;
use llama::testing::WeightType;
use llama::{ContextParams, Error, KvLayout, Model, Numerics, Output, Rows, RowsError, SliceContext};

/// What a mixed run is compared with.
#[derive(Clone, Copy, PartialEq)]
enum Reference {
    /// Each slot alone, row by row.
    OneByOne,
    /// Each slot alone, with the same numbers of rows: recurrent blocks compute a step and a chunk differently.
    SameSteps,
}

/// Prompts of three lengths in slots with gaps between, then steps that mix decode rows with a prompt.
fn check_mixed_runs(model: &Model, context_params: &ContextParams, reference: Reference) {
    let width = model.n_embd() as usize;
    let sequences = [Sequence::new(0, 16, width), Sequence::new(2, 19, width), Sequence::new(5, 40, width)];
    // Rows of each sequence per run. The first two have equally many in the first run; the third begins late.
    let steps = [[7, 7, 0], [1, 3, 12], [1, 1, 1], [3, 1, 26], [1, 1, 1], [1, 0, 0], [2, 6, 0]];
    let alone: Vec<_> = (0..3)
        .map(|index| match reference {
            Reference::OneByOne => one_by_one(model, context_params.output, &sequences[index]),
            Reference::SameSteps => {
                in_steps(model, context_params, &sequences[index], &steps.map(|counts| counts[index]))
            }
        })
        .collect();
    let mut context = SliceContext::new(model, context_params).unwrap();
    let mut done = [0; 3];
    for (step, counts) in steps.iter().enumerate() {
        let mut batch = Batch::default();
        let mut expected = Vec::new();
        // Interleaved: row k of every sequence before row k + 1 of any.
        for offset in 0..*counts.iter().max().unwrap() {
            for index in (0..3).rev().filter(|index| offset < counts[*index]) {
                batch.push(&sequences[index], done[index] + offset);
                expected.push((index, done[index] + offset));
            }
        }
        let got = run(&mut context, &batch);
        for (row, (index, position)) in got.iter().zip(expected) {
            let what = format!("step {step}, slot {}, position {position}", sequences[index].slot);
            assert_same_bits(row, &alone[index][position], &what);
        }
        for index in 0..3 {
            done[index] += counts[index];
        }
    }
    for (sequence, done) in sequences.iter().zip(done) {
        assert_eq!(context.next_position(sequence.slot) as usize, done);
        assert_eq!(done, sequence.len());
    }
}

#[test]
fn mixed_runs_of_smollm2_give_the_hidden_rows_of_single_runs() {
    check_mixed_runs(&smollm2(), &params(Output::Hidden, 6), Reference::OneByOne);
}

#[test]
fn mixed_runs_of_smollm2_give_the_logits_of_single_runs() {
    check_mixed_runs(&smollm2(), &params(Output::Logits, 6), Reference::OneByOne);
}

#[test]
fn runs_longer_than_a_ubatch_give_the_rows_of_single_runs() {
    let cut = ContextParams { n_ubatch: 8, ..params(Output::Hidden, 6) };
    check_mixed_runs(&smollm2(), &cut, Reference::OneByOne);
}

#[test]
fn a_unified_cache_gives_the_rows_of_single_runs() {
    let unified = ContextParams { layout: KvLayout::Unified, n_ubatch: 16, ..params(Output::Hidden, 6) };
    check_mixed_runs(&random_llama().build().unwrap(), &unified, Reference::OneByOne);
    check_mixed_runs(&random_gemma3().build().unwrap(), &unified, Reference::OneByOne);
    check_mixed_runs(&random_qwen35().build().unwrap(), &unified, Reference::SameSteps);
}

#[test]
fn mixed_runs_of_random_models_give_the_rows_of_single_runs() {
    let cases = [
        (random_llama(), Reference::OneByOne),
        (random_gemma3(), Reference::OneByOne),
        (random_gemma2().set("shoal.slice.input_node", "inp_scaled"), Reference::OneByOne),
        (random_qwen35(), Reference::SameSteps),
    ];
    for (model, reference) in cases {
        let model = model.build().unwrap();
        for output in [Output::Hidden, Output::Logits] {
            check_mixed_runs(&model, &params(output, 6), reference);
            check_mixed_runs(&model, &ContextParams { n_ubatch: 8, ..params(output, 6) }, reference);
        }
    }
}

#[test]
fn rows_go_into_the_first_block_as_they_are_given() {
    let sequence = Sequence::new(0, 5, 64);
    let mut scaled = sequence.clone();
    // sqrt(64): what the graph of a whole Gemma 2 multiplies embedding rows by.
    scaled.rows.iter_mut().for_each(|number| *number *= 8.0);
    let whole = random_gemma2().build().unwrap();
    let slice = random_gemma2().set("shoal.slice.input_node", "inp_scaled").build().unwrap();
    for output in [Output::Hidden, Output::Logits] {
        let expected = one_by_one(&whole, output, &sequence);
        let got = one_by_one(&slice, output, &scaled);
        got.iter().zip(&expected).for_each(|(got, expected)| assert_same_bits(got, expected, "a row"));
    }
}

#[test]
fn a_node_that_the_graph_does_not_have_is_named() {
    let model = random_llama().set("shoal.slice.input_node", "inp_misnamed").build().unwrap();
    for output in [Output::Hidden, Output::Logits] {
        let mut context = SliceContext::new(&model, &params(output, 1)).unwrap();
        let sequence = Sequence::new(0, 2, 64);
        let mut batch = Batch::default();
        batch.push(&sequence, 0);
        batch.push(&sequence, 1);
        let error = context.run(&batch.rows()).unwrap_err();
        assert!(error.to_string().contains("2 hidden rows from node inp_misnamed"), "{error}");
        assert_eq!(context.next_position(0), 0, "the slot is as it was");
    }
}

#[test]
fn a_context_of_more_slots_than_rows_works() {
    let model = random_llama().build().unwrap();
    let tight = ContextParams { n_batch: 2, n_ubatch: 1, max_outputs: 1, ..params(Output::Hidden, 9) };
    for output in [Output::Hidden, Output::Logits] {
        let mut context = SliceContext::new(&model, &ContextParams { output, ..tight.clone() }).unwrap();
        let sequence = Sequence::new(8, 2, 64);
        let mut batch = Batch::default();
        batch.push(&sequence, 0);
        run(&mut context, &batch);
    }
}

#[test]
fn refused_rows_leave_their_slots_as_they_were() {
    let model = random_llama().build().unwrap();
    let mut context = SliceContext::new(&model, &params(Output::Hidden, 2)).unwrap();
    let sequence = Sequence::new(1, 4, 64);
    let mut batch = Batch::default();
    batch.push(&sequence, 0);
    run(&mut context, &batch);
    let again = context.run(&batch.rows()).unwrap_err();
    assert!(matches!(again, Error::Rows(RowsError::Position { slot: 1, expected: 1, got: 0 })), "{again}");
    assert!(context.hidden().is_empty(), "results of the run before must not pass for this run's");
    assert_eq!(context.next_position(1), 1);
    let far = Rows { slots: &[7], ..batch.rows() };
    assert!(matches!(context.run(&far), Err(Error::Rows(RowsError::Slot { slot: 7, .. }))));
}

#[test]
fn a_slot_takes_as_many_tokens_as_were_asked_for_and_no_more() {
    let model = random_llama().build().unwrap();
    // llama.cpp rounds up to 256.
    let small = ContextParams { n_ctx_per_slot: 10, ..params(Output::Hidden, 2) };
    let mut context = SliceContext::new(&model, &small).unwrap();
    let sequence = Sequence::new(0, 11, 64);
    let mut batch = Batch::default();
    (0..10).for_each(|position| batch.push(&sequence, position));
    run(&mut context, &batch);
    let mut batch = Batch::default();
    batch.push(&sequence, 10);
    let full = context.run(&batch.rows()).unwrap_err();
    assert!(matches!(full, Error::Rows(RowsError::SlotFull { slot: 0, position: 10, n_ctx: 10 })), "{full}");
}

#[test]
fn a_slot_that_was_cut_back_continues_as_if_the_rest_had_never_been() {
    let model = random_llama().build().unwrap();
    let sequence = Sequence::new(3, 20, 64);
    let alone = one_by_one(&model, Output::Hidden, &sequence);
    let mut context = SliceContext::new(&model, &params(Output::Hidden, 4)).unwrap();
    let mut wrong = Sequence::new(1, 20, 64);
    wrong.slot = 3;
    let mut batch = Batch::default();
    (0..8).for_each(|position| batch.push(&sequence, position));
    (8..20).for_each(|position| batch.push(&wrong, position));
    run(&mut context, &batch);
    assert!(context.remove_from(3, 8).unwrap());
    assert_eq!(context.next_position(3), 8);
    assert!(context.remove_from(3, 99).unwrap(), "nothing to remove");
    let mut batch = Batch::default();
    (8..20).for_each(|position| batch.push(&sequence, position));
    for (row, expected) in run(&mut context, &batch).iter().zip(&alone[8..]) {
        assert_same_bits(row, expected, "after cutting back");
    }
}

#[test]
fn a_copied_slot_continues_like_its_original() {
    for model in [random_llama(), random_gemma3(), random_qwen35()] {
        let model = model.build().unwrap();
        for layout in [KvLayout::PerSlot, KvLayout::Unified] {
            let sequence = Sequence::new(2, 40, 64);
            let alone = in_steps(&model, &params(Output::Hidden, 1), &sequence, &[35, 5]);
            let mut context =
                SliceContext::new(&model, &ContextParams { layout, ..params(Output::Hidden, 4) }).unwrap();
            let mut batch = Batch::default();
            // The target is not empty. In a unified cache its rows come last, so that the copy's cells are in the order
            // of its positions: flash attention rounds values to f16 as it goes through the cells (ggml-cpu/ops.cpp).
            let target = Sequence::new(0, 36, 64);
            (0..36).for_each(|position| batch.push(&target, position));
            (0..35).for_each(|position| batch.push(&sequence, position));
            run(&mut context, &batch);
            context.copy(2, 0).unwrap();
            assert_eq!(context.next_position(0), 35);
            context.keep_only(0).unwrap();
            assert_eq!(context.next_position(2), 0);
            let mut copy = sequence.clone();
            copy.slot = 0;
            let mut batch = Batch::default();
            (35..40).for_each(|position| batch.push(&copy, position));
            for (row, expected) in run(&mut context, &batch).iter().zip(&alone[35..]) {
                assert_same_bits(row, expected, &format!("{model:?} {layout:?} after a copy"));
            }
        }
    }
}

#[test]
fn state_that_is_gone_is_not_cut_back_to() {
    let cases = [(random_gemma3(), 600), (random_qwen35(), 20)];
    for (model, count) in cases {
        let model = model.build().unwrap();
        let long = ContextParams { n_ctx_per_slot: 1024, n_ubatch: 64, ..params(Output::Hidden, 2) };
        let mut context = SliceContext::new(&model, &long).unwrap();
        let sequence = Sequence::new(1, count, 64);
        let mut batch = Batch::default();
        (0..count).for_each(|position| batch.push(&sequence, position));
        run(&mut context, &batch);
        let end = u32::try_from(count).unwrap();
        assert!(!context.remove_from(1, 10).unwrap());
        assert_eq!(context.next_position(1), end, "nothing was removed");
        assert!(context.remove_from(1, end).unwrap());
        assert!(context.remove_from(1, 0).unwrap());
        assert_eq!(context.next_position(1), 0);
        assert!(matches!(context.remove_from(2, 0), Err(Error::Slot { slot: 2, n_slots: 2 })));
    }
}

#[test]
fn an_emptied_context_starts_again() {
    let model = random_qwen35().build().unwrap();
    let sequence = Sequence::new(0, 9, 64);
    let alone = in_steps(&model, &params(Output::Logits, 1), &sequence, &[9]);
    let mut context = SliceContext::new(&model, &params(Output::Logits, 3)).unwrap();
    let mut batch = Batch::default();
    (0..9).for_each(|position| batch.push(&sequence, position));
    for _ in 0..2 {
        let got = run(&mut context, &batch);
        got.iter().zip(&alone).for_each(|(row, expected)| assert_same_bits(row, expected, "again"));
        context.clear();
    }
}

#[test]
fn only_rows_that_want_logits_have_them() {
    let model = random_llama().build().unwrap();
    let mut context =
        SliceContext::new(&model, &ContextParams { max_outputs: 1, ..params(Output::Logits, 1) }).unwrap();
    let sequence = Sequence::new(0, 3, 64);
    let mut batch = Batch::default();
    (0..3).for_each(|position| batch.push(&sequence, position));
    let too_many = context.run(&batch.rows()).unwrap_err();
    assert!(matches!(too_many, Error::Rows(RowsError::TooManyOutputs { wanted: 3, limit: 1 })), "{too_many}");
    batch.outputs = vec![false, true, false];
    context.run(&batch.rows()).unwrap();
    assert!(context.logits(0).is_none() && context.logits(2).is_none() && context.logits(3).is_none());
    assert_eq!(context.logits(1).unwrap().len(), 128);
    // A chunk of a prompt wants none at all.
    context.clear();
    batch.outputs = vec![false; 3];
    context.run(&batch.rows()).unwrap();
    assert!((0..3).all(|row| context.logits(row).is_none()));
}

#[test]
fn contexts_run_on_other_threads_than_they_were_made_on() {
    let model = random_llama().build().unwrap();
    let sequence = Sequence::new(0, 6, 64);
    let alone = one_by_one(&model, Output::Hidden, &sequence);
    let mut context = SliceContext::new(&model, &params(Output::Hidden, 1)).unwrap();
    drop(model);
    let mut batch = Batch::default();
    (0..6).for_each(|position| batch.push(&sequence, position));
    let got = std::thread::spawn(move || run(&mut context, &batch)).join().unwrap();
    got.iter().zip(&alone).for_each(|(row, expected)| assert_same_bits(row, expected, "on another thread"));
}

#[test]
fn the_memory_breakdown_counts_weights_and_caches() {
    let model = smollm2();
    let context = SliceContext::new(&model, &params(Output::Hidden, 4)).unwrap();
    let memory = context.memory().unwrap();
    let total = |part: fn(&llama::MemoryUse) -> u64| memory.uses.iter().map(part).sum::<u64>();
    assert_eq!(total(|entry| entry.model), model.size());
    // 30 blocks, 3 KV heads of 64 numbers of 2 bytes, K and V, 4 slots of 512.
    assert_eq!(total(|entry| entry.context), 30 * 3 * 64 * 2 * 2 * 4 * 512);
    assert!(total(|entry| entry.compute) > 0);
}

/// Rows of 300 positions in chunks of prompts and single steps, beside another slot or alone, on one thread or two. ggml's
/// fast kernels change at 2 rows, at 64 rows, and, for a step alone, at 512 cells, which are counted in steps of 256.
fn check_row_invariance(model: &Model) {
    let width = model.n_embd() as usize;
    let (sequence, beside) = (Sequence::new(1, 300, width), Sequence::new(0, 300, width));
    let invariant = ContextParams { numerics: Numerics::RowInvariant, ..params(Output::Hidden, 3) };
    let mut counts = vec![200, 60];
    counts.extend([1; 40]);
    let alone = in_steps(model, &invariant, &sequence, &counts);
    let two_threads = ContextParams { threads: 2, threads_batch: 2, ..invariant };
    let mut context = SliceContext::new(model, &two_threads).unwrap();
    let mut done = 0;
    for (step, count) in [30, 70, 160, 1, 1, 8].into_iter().chain([1; 30]).enumerate() {
        let mut batch = Batch::default();
        (done..done + count).for_each(|position| batch.push(&sequence, position));
        batch.push(&beside, step);
        let got = run(&mut context, &batch);
        for (row, expected) in got[..count].iter().zip(&alone[done..]) {
            assert_same_bits(row, expected, &format!("{model:?} from position {done} on, {count} rows"));
        }
        done += count;
    }
    assert_eq!(done, 300);
}

#[test]
fn row_invariant_contexts_compute_a_row_alike_in_every_batch() {
    // Types whose fast products depend on the number of rows, beside one whose product does not.
    for weights in [WeightType::F16, WeightType::Q8_0, WeightType::Q4_0, WeightType::Q4_1, WeightType::Bf16] {
        check_row_invariance(&random_llama().weights("", weights).build().unwrap());
    }
    check_row_invariance(&random_gemma3().build().unwrap());
}

#[test]
fn fast_contexts_do_not_promise_that() {
    // Shows that the test above can fail.
    let model = random_llama().weights("", WeightType::F16).build().unwrap();
    let sequence = Sequence::new(0, 80, 64);
    let fast = params(Output::Hidden, 1);
    let (steps, prompt) =
        (in_steps(&model, &fast, &sequence, &[1; 80]), in_steps(&model, &fast, &sequence, &[80]));
    assert_ne!(steps, prompt);
}
