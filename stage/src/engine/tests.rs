//! The engine's behaviour, case by case, with a small fake replica around it.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use cluster::{SlotId, StepId};
use protocol::frame::{KvOp, RowRun};

use super::fake::{Ask, Client, Costs, Draw, END_OF_GENERATION, FakeEngine, FakeSampling, Pipeline, roomy};
use super::*;

/// A prompt and a number of tokens; the answer does not end by itself.
fn ask(prompt: impl IntoIterator<Item = Token>, max_tokens: u32) -> Ask {
    Ask { prompt: prompt.into_iter().collect(), max_tokens, ignore_eos: true, ..Ask::default() }
}

fn admitted(p: &mut Pipeline, key: u64, ask: &Ask) -> Rc<RefCell<Client>> {
    p.admit(key, ask).unwrap()
}

/// Its tokens are those it gets when alone.
fn check_answer(p: &Pipeline, ask: &Ask, client: &Rc<RefCell<Client>>) {
    let (tokens, reason) = p.model.answer(&ask.prompt, &ask.draw, ask.max_tokens, ask.ignore_eos);
    let client = client.borrow();
    assert_eq!(client.tokens(), tokens);
    assert_eq!(client.finish_reason(), Some(reason), "{:?}", client.end());
}

fn ops(p: &Pipeline) -> Vec<KvOp> {
    p.frames.iter().flat_map(|frame| frame.ops.clone()).collect()
}

fn outputs_of(p: &Pipeline, step: StepId) -> Vec<usize> {
    p.engine.outputs_of(step).collect()
}

fn rows_of(frame: &StepFrame) -> Vec<(u32, u32, u32)> {
    frame.runs.iter().map(|&RowRun { slot, position, n }| (slot.0, position, n)).collect()
}

#[test]
fn a_prompt_is_answered_token_by_token() {
    let mut p = Pipeline::single(|_| ());
    let hello = ask(1..=11, 5);
    let client = admitted(&mut p, 7, &hello);
    p.run();
    check_answer(&p, &hello, &client);
    let runs: Vec<_> = p.frames.iter().map(|frame| (frame.kind, rows_of(frame))).collect();
    assert_eq!(runs[0], (FrameKind::Prefill, vec![(0, 0, 8)]));
    assert_eq!(runs[1], (FrameKind::Prefill, vec![(0, 8, 3)]));
    assert_eq!(runs[2], (FrameKind::Decode, vec![(0, 11, 1)]));
    assert_eq!(runs.len(), 6, "the last token is not run");
    assert!(ops(&p).is_empty(), "an empty slot has nothing to forget");
    let client = client.borrow();
    assert_eq!(client.started(), Some((0, 0)));
    assert_eq!(
        client.end(),
        Some(&Event::Finished(Finished {
            reason: FinishReason::Length,
            prompt_tokens: 11,
            generated_tokens: 5,
            prefill: Duration::from_millis(10 + 8 + 10 + 3),
            decode: Duration::from_millis(4 * 10),
        }))
    );
    let status = p.engine.status();
    assert_eq!((status.prefilled_tokens, status.generated_tokens), (11, 5));
    p.check_idle();
}

#[test]
fn a_frame_holds_nothing_of_the_one_whose_memory_it_has() {
    let mut p = Pipeline::single(|_| ());
    let runs = vec![RowRun { slot: SlotId(3), position: 9, n: 2 }];
    p.engine.recycle(FrameMemory::of(runs, vec![7, 7]));
    let _a = admitted(&mut p, 1, &ask(1..=3, 5));
    assert_eq!(rows_of(&p.frames[0]), [(0, 0, 3)]);
    assert_eq!(p.frames[0].tokens, [1, 2, 3]);
}

#[test]
fn only_decode_rows_and_a_prompts_last_row_want_logits() {
    let mut p = Pipeline::single(|_| ());
    let _a = admitted(&mut p, 1, &ask(1..=10, 5));
    let _b = admitted(&mut p, 2, &ask(1..=3, 5));
    assert_eq!(rows_of(&p.frames[0]), [(0, 0, 8)]);
    assert_eq!(rows_of(&p.frames[1]), [(0, 8, 2)]);
    assert_eq!(outputs_of(&p, p.frames[0].step), [0; 0]);
    assert_eq!(outputs_of(&p, p.frames[1].step), [1]);
    assert_eq!(outputs_of(&p, StepId(99)), [0; 0]);
    p.run_until(|p| p.frames.iter().any(|frame| frame.kind == FrameKind::Decode));
    let decode = p.frames.last().unwrap().step;
    assert_eq!(outputs_of(&p, decode), [0]);
    p.cancel(1);
    assert_eq!(outputs_of(&p, decode), [0; 0], "nobody waits any more");
}

#[test]
fn an_answer_ends_at_the_models_end_token_which_is_not_reported() {
    let mut p = Pipeline::single(|_| ());
    let draw = Draw { always: Some(END_OF_GENERATION), ..Draw::default() };
    let ends = Ask { ignore_eos: false, draw: draw.clone(), ..ask([1, 2], 5) };
    let goes_on = Ask { draw, ..ask([1, 2], 5) };
    let (a, b) = (admitted(&mut p, 1, &ends), admitted(&mut p, 2, &goes_on));
    p.run();
    assert_eq!(a.borrow().finish_reason(), Some(FinishReason::Stop));
    assert!(a.borrow().tokens().is_empty());
    assert_eq!(b.borrow().finish_reason(), Some(FinishReason::Length));
    assert_eq!(b.borrow().tokens(), [END_OF_GENERATION; 5]);
}

#[test]
fn generation_that_reaches_the_slots_end_finishes_with_length() {
    // Case 24: and no other generation notices.
    let mut p = Pipeline::single(|limits| limits.n_ctx = 12);
    let (long, short) = (ask(1..=10, u32::MAX), ask(1..=3, 8));
    let full = ask(1..=12, 9);
    let clients = [&long, &short, &full].map(|ask| (ask, p.admit(ask.prompt.len() as u64, ask).unwrap()));
    p.run();
    clients.iter().for_each(|(ask, client)| check_answer(&p, ask, client));
    let tokens = clients.map(|(_, client)| client.borrow().tokens().len());
    assert_eq!(tokens, [3, 8, 1], "one more than positions are left: the last is not run");
    p.check_idle();
}

#[test]
fn an_unfit_request_is_refused_and_changes_nothing() {
    let mut p = Pipeline::single(|limits| limits.n_ctx = 8);
    let too_long = p.admit(1, &ask(0..9, 1)).unwrap_err();
    assert!(matches!(too_long, AdmitError::PromptTooLong { prompt: 9, n_ctx: 8 }), "case 20");
    let unfit = Ask { draw: Draw { unfit: true, ..Draw::default() }, ..ask([1], 1) };
    let error = p.admit(1, &unfit).unwrap_err();
    let AdmitError::Sampling(cause) = error else { panic!("{error}") };
    assert_eq!(cause.to_string(), "the grammar has no root rule");
    p.check_idle();
    assert!(p.frames.is_empty());
}

#[test]
fn requests_without_a_slot_wait_in_order_and_learn_their_position() {
    let mut p = Pipeline::single(|limits| (limits.slots, limits.queue_limit) = (1, 3));
    let clients: Vec<_> = (0..4).map(|key| admitted(&mut p, key, &ask([1, key as Token], 3))).collect();
    // Case 25.
    let refused = p.admit(9, &ask([1], 1)).unwrap_err();
    assert_eq!(refused.to_string(), "all 1 slots are taken and 3 of at most 3 requests are waiting");
    assert_eq!(p.engine.status().queued, 3);
    p.cancel(2);
    let late = admitted(&mut p, 4, &ask([5], 3));
    p.run();
    let positions: Vec<_> = clients.iter().map(|client| client.borrow().positions()).collect();
    assert_eq!(positions, [vec![], vec![0], vec![1], vec![2, 1, 0]]);
    assert_eq!(late.borrow().positions(), [2, 1, 0]);
    assert_eq!(*p.log.started.borrow(), [0, 1, 3, 4]);
    assert!(clients[2].borrow().end().is_none(), "case 19: a cancelled request is told nothing");
    p.check_idle();
}

#[test]
fn without_a_queue_a_request_that_finds_no_slot_is_refused() {
    let mut p = Pipeline::single(|limits| (limits.slots, limits.queue_limit) = (1, 0));
    let _client = admitted(&mut p, 1, &ask([1], 3));
    assert!(matches!(p.admit(2, &ask([1], 1)), Err(AdmitError::QueueFull { queued: 0, limit: 0, .. })));
}

#[test]
fn a_request_starts_from_the_slot_with_the_longest_common_prefix() {
    let mut p = Pipeline::single(|_| ());
    let first = ask(1..=20, 4);
    let client = admitted(&mut p, 1, &first);
    let _other = admitted(&mut p, 2, &ask([9, 9], 4));
    p.run();
    let answer = client.borrow().tokens();
    let before = p.frames.len();
    let next = ask((1..=20).chain(answer.iter().copied()).chain([5, 6]), 4);
    let client = admitted(&mut p, 3, &next);
    p.run();
    assert_eq!(client.borrow().started(), Some((0, 23)), "the last token of the answer was never run");
    assert_eq!(rows_of(&p.frames[before]), [(0, 23, 3)]);
    assert!(ops(&p).is_empty(), "it only appends");
    check_answer(&p, &next, &client);
    p.check_idle();
}

#[test]
fn a_shorter_common_prefix_removes_what_follows_it() {
    let mut p = Pipeline::single(|limits| limits.slots = 1);
    for (key, prompt, cached) in [
        (1, vec![1, 2, 3, 4, 5, 6], 0),
        (2, vec![1, 2, 3, 9], 3),
        (3, vec![1, 2, 3, 9], 3),
        (4, vec![7, 7], 0),
    ] {
        let next = ask(prompt, 3);
        let client = admitted(&mut p, key, &next);
        p.run();
        assert_eq!(client.borrow().started(), Some((0, cached)));
        check_answer(&p, &next, &client);
    }
    let slot = SlotId(0);
    assert_eq!(ops(&p), [3, 3, 0].map(|from| KvOp::RemoveFrom { slot, from }));
}

#[test]
fn caches_that_cannot_go_back_start_over() {
    for rollback in [Rollback::AppendOnly, Rollback::Window(6)] {
        let mut p = Pipeline::single(|limits| (limits.slots, limits.rollback) = (1, rollback));
        for (key, prompt, cached) in
            [(1, vec![1, 2, 3, 4, 5, 6], 0), (2, vec![1, 2, 3, 9], 0), (3, vec![1, 2, 3, 9], 0)]
        {
            let next = ask(prompt, 6);
            let client = admitted(&mut p, key, &next);
            p.run();
            assert_eq!(client.borrow().started(), Some((0, cached)));
            check_answer(&p, &next, &client);
        }
    }
}

#[test]
fn a_request_after_a_cancelled_one_sees_nothing_of_it() {
    // Case 9: whether it was reading its prompt, in flight, or writing, and whatever of its prompt is shared.
    for cancel_at in 0..60 {
        for shared in 0..12 {
            let mut p = Pipeline::new(
                EngineLimits { slots: 1, ..roomy() },
                3,
                Costs { batch: 3, prefill_row: 1, link: 2, jitter: 2 },
                cancel_at * 100 + shared,
            );
            let gone = admitted(&mut p, 1, &ask(1..=12, 20));
            while p.next_at().is_some_and(|at| at <= cancel_at) {
                p.step();
            }
            p.cancel(1);
            gone.borrow_mut().left = true;
            let next = ask((1..=shared as Token).chain([30, 31]), 6);
            let client = admitted(&mut p, 2, &next);
            assert!(client.borrow().started().is_some(), "the slot is free at once");
            p.run();
            check_answer(&p, &next, &client);
            p.check_idle();
        }
    }
}

#[test]
fn a_slot_that_was_given_up_before_its_first_frame_keeps_its_tokens() {
    let mut p = Pipeline::single(|limits| (limits.slots, limits.prefill_frames) = (2, 1));
    let old = ask(1..=8, 1);
    admitted(&mut p, 1, &old);
    p.run();
    let _long = admitted(&mut p, 2, &ask(vec![9; 40], 1));
    let _never_sent = admitted(&mut p, 3, &ask([1, 2, 20], 1));
    p.cancel(3);
    let next = ask((1..=8).chain([21]), 2);
    let client = admitted(&mut p, 4, &next);
    assert_eq!(client.borrow().started(), Some((0, 8)));
    p.run();
    check_answer(&p, &next, &client);
    p.check_idle();
}

#[test]
fn a_client_that_is_gone_frees_its_slot_wherever_it_notices() {
    // Case 19: at Queued, Started, any token, the end.
    for leaves_after in 0..8 {
        let mut p = Pipeline::single(|limits| limits.slots = 1);
        let stays = ask([1, 2, 3], 3);
        let first = admitted(&mut p, 1, &stays);
        let gone = admitted(&mut p, 2, &Ask { leaves_after: Some(leaves_after), ..ask([4, 5], 4) });
        let last = admitted(&mut p, 3, &stays);
        p.run();
        assert_eq!(gone.borrow().left, leaves_after < 7);
        check_answer(&p, &stays, &first);
        check_answer(&p, &stays, &last);
        p.check_idle();
    }
}

#[test]
fn a_sampler_that_cannot_draw_fails_its_own_request_only() {
    let mut p = Pipeline::single(|_| ());
    let stuck = Ask { draw: Draw { fails_at: Some(5), ..Draw::default() }, ..ask([1, 2, 3], 9) };
    let wild = Ask { draw: Draw { always: Some(32), ..Draw::default() }, ..ask([1, 2], 9) };
    let fine = ask([3, 4], 9);
    let clients = [(1, &stuck), (2, &wild), (3, &fine)].map(|(key, ask)| p.admit(key, ask).unwrap());
    p.run();
    assert_eq!(
        clients[0].borrow().failure(),
        Some((FailureKind::Internal, "drawing the token at position 5 failed: no token is left"))
    );
    assert_eq!(clients[0].borrow().tokens().len(), 2);
    assert_eq!(
        clients[1].borrow().failure(),
        Some((FailureKind::Internal, "the sampler drew 32 for position 2, the vocabulary's ids are 0 to 31"))
    );
    check_answer(&p, &fine, &clients[2]);
    p.check_idle();
}

#[test]
fn a_step_without_its_logits_fails_those_who_wait_for_it() {
    struct Nothing;
    impl Logits for Nothing {
        fn row(&self, _: usize) -> Option<&[f32]> {
            None
        }
    }
    let mut p = Pipeline::single(|_| ());
    let client = admitted(&mut p, 1, &ask([1, 2], 5));
    p.engine.complete(p.frames[0].step, &Nothing, Duration::ZERO).unwrap();
    let message = "the last stage gave no logits for position 2";
    assert_eq!(client.borrow().failure(), Some((FailureKind::Internal, message)));
}

#[test]
fn a_lost_stage_fails_every_request_once_and_nothing_is_admitted_until_a_new_link() {
    let mut p = Pipeline::single(|limits| limits.slots = 2);
    let clients: Vec<_> = (0..4).map(|key| admitted(&mut p, key, &ask([1, 2, key as Token], 9))).collect();
    p.run_until(|p| p.engine.status().generated_tokens > 2);
    p.lose("stage 1 was lost");
    for client in &clients {
        assert_eq!(client.borrow().failure(), Some((FailureKind::ReplicaLost, "stage 1 was lost")));
    }
    let refused = p.admit(9, &ask([1], 1)).unwrap_err();
    assert_eq!(refused.to_string(), "the pipeline is not linked: stage 1 was lost");
    p.relink();
    let again = ask([1, 2, 0], 3);
    let client = admitted(&mut p, 10, &again);
    assert_eq!(client.borrow().started(), Some((0, 0)), "the stages have forgotten all");
    p.run();
    check_answer(&p, &again, &client);
    p.check_idle();
}

#[test]
fn what_was_generated_before_is_computed_a_few_rows_at_a_time_as_it_was_then() {
    let mut p = Pipeline::single(|limits| (limits.n_ctx, limits.prefill_chunk) = (256, 128));
    let replay = Ask { replayed: 75, ..ask((0..175).map(|i| i % 20 + 1), 3) };
    let client = admitted(&mut p, 7, &replay);
    p.run();
    assert_eq!(client.borrow().finish_reason(), Some(FinishReason::Length));
    let prefill = p.frames.iter().filter(|frame| frame.kind == FrameKind::Prefill);
    let rows: Vec<_> = prefill.flat_map(rows_of).collect();
    assert_eq!(rows, [(0, 0, 100), (0, 100, 32), (0, 132, 32), (0, 164, 11)]);
}

#[test]
fn a_replay_continues_the_same_answer() {
    let mut p = Pipeline::single(|_| ());
    let whole = Ask { draw: Draw { seed: 5, ..Draw::default() }, ..ask(1..=9, 12) };
    let first = admitted(&mut p, 1, &whole);
    p.run_until(|_| first.borrow().tokens().len() == 4);
    p.lose("stage 0 was lost");
    p.relink();
    let mut tokens = first.borrow().tokens();
    let prompt: Vec<_> = (1..=9).chain(tokens.iter().copied()).collect();
    let rest = Ask { prompt, replayed: 4, max_tokens: 8, ..whole.clone() };
    let second = admitted(&mut p, 2, &rest);
    p.run();
    tokens.extend(second.borrow().tokens());
    assert_eq!(tokens, p.model.answer(&whole.prompt, &whole.draw, 12, true).0);
}

#[test]
fn an_engine_that_was_never_linked_admits_nothing() {
    let mut p = Pipeline::single(|_| ());
    p.engine = FakeEngine::new(roomy(), FakeSampling { n_vocab: 32 }).unwrap();
    assert!(matches!(p.admit(1, &ask([1], 1)), Err(AdmitError::NotLinked { .. })));
}

#[test]
fn a_limit_of_zero_is_refused() {
    let limits = EngineLimits { micro_batches: 0, ..roomy() };
    let error = FakeEngine::new(limits, FakeSampling { n_vocab: 32 }).unwrap_err();
    assert_eq!(error.to_string(), "starting the engine: micro_batches is 0, it must be at least 1");
}

#[test]
fn a_long_prompt_delays_a_running_generation_by_one_chunk_at_most() {
    // Case 23. A chunk's pass takes `chunk` on each of k stages, a decode step `batch`.
    const BATCH: u64 = 10;
    const PREFILL_ROW: u64 = 4;
    const LINK: u64 = 1;
    for stages in 1..=4 {
        let limits = EngineLimits {
            n_ctx: 20_100,
            prefill_chunk: 256,
            prefill_frames: stages as u32,
            micro_batches: stages as u32,
            // A recurrent state makes the fake model's time linear in the prompt.
            rollback: Rollback::AppendOnly,
            ..roomy()
        };
        let costs = Costs { batch: BATCH, prefill_row: PREFILL_ROW, link: LINK, jitter: 0 };
        let mut p = Pipeline::new(limits, stages, costs, 1);
        let running = ask([1, 2, 3], 3_000);
        let client = admitted(&mut p, 1, &running);
        p.run_until(|_| client.borrow().tokens().len() == 10);
        let asked = p.now();
        let long = admitted(&mut p, 2, &ask(vec![7; 20_000], 1));
        p.run_until(|_| long.borrow().end().is_some());
        let chunk = BATCH + 256 * PREFILL_ROW;
        let step = BATCH + LINK;
        let bound = stages as u64 * (chunk + step);
        let gap = client.borrow().longest_gap();
        assert!(gap <= Duration::from_millis(bound), "{stages} stages: {gap:?}, chunk {chunk}");
        // And the prompt is not starved either: the pipeline's slowest stage is mostly with it.
        let alone = 20_000_u64.div_ceil(256) * chunk;
        let took = p.now() - asked;
        assert!(took < 2 * alone, "{stages} stages: {took} ticks, {alone} alone");
    }
}

#[test]
fn prefill_is_not_starved_by_running_generations() {
    // A single stage under decode-first alone would run no prefill until the generation ends.
    let mut p = Pipeline::single(|limits| limits.n_ctx = 1_000);
    let running = admitted(&mut p, 1, &ask([1, 2, 3], 900));
    p.run_until(|_| running.borrow().tokens().len() == 10);
    let newcomer = admitted(&mut p, 2, &ask(vec![7; 24], 1));
    p.run_until(|_| newcomer.borrow().end().is_some());
    let tokens = running.borrow().tokens().len();
    assert!(tokens <= 10 + 3 * 5, "{tokens} tokens while three chunks were waited for");
}

#[test]
fn every_stage_works_on_a_long_prompt_at_once() {
    // The wave: k chunks in flight take hardly longer than one stage's share of all.
    let costs = Costs { batch: 10, prefill_row: 10, link: 1, jitter: 0 };
    let took = |prefill_frames| {
        let limits = EngineLimits { n_ctx: 400, prefill_frames, ..roomy() };
        let mut p = Pipeline::new(limits, 4, costs, 1);
        let client = admitted(&mut p, 1, &ask(vec![7; 400], 1));
        p.run_until(|_| client.borrow().end().is_some());
        p.now()
    };
    let (one, four) = (took(1), took(4));
    assert!(four * 3 < one, "{one} ticks one by one, {four} as a wave");
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let limits = EngineLimits { n_ctx: 20_000, rollback: Rollback::AppendOnly, ..roomy() };
    let costs = Costs { batch: 10, prefill_row: 4, link: 1, jitter: 0 };
    let mut p = Pipeline::new(limits, 2, costs, 1);
    let long = admitted(&mut p, 1, &ask(vec![7; 20_000], 1));
    p.run_until(|p| p.frames.len() == 20);
    let short = admitted(&mut p, 2, &ask([1, 2, 3], 1));
    p.run_until(|_| short.borrow().end().is_some());
    // Two chunks were in flight; then each had its turn, the short one at the latest in the second frame.
    assert!(p.frames.len() <= 20 + 2 + 2, "{} frames", p.frames.len());
    assert!(long.borrow().end().is_none());
}
