//! The text of a replica is the text of the whole model, however it is cut, batched, encoded and interleaved.

use futures::StreamExt;
use protocol::sampling::Sampling;
use protocol::v1;

use crate::replica::{SHAPE, Shape, Stages, greedy, start};
use crate::whole::{Slices, Whole, prompts};

const MAX_TOKENS: u32 = 24;

async fn assert_whole_text(cuts: &[u32], stages: Stages<'_>, n_prompts: usize, at_once: usize) {
    let slices = Slices::cut(cuts);
    let mut whole = Whole::load(&slices, SHAPE.n_ctx);
    let prompts = prompts(&whole, n_prompts);
    let expected: Vec<Vec<i32>> =
        prompts.iter().map(|prompt| whole.greedy(prompt, MAX_TOKENS as usize)).collect();
    let (replica, _workers) = start(&slices, stages, SHAPE).await;
    let answers: Vec<_> = futures::stream::iter(&prompts)
        .map(|prompt| replica.generate(prompt, MAX_TOKENS))
        .buffered(at_once)
        .collect()
        .await;
    for ((prompt, expected), answer) in prompts.iter().zip(&expected).zip(answers) {
        let answer = answer.unwrap();
        assert_eq!(&answer.tokens, expected, "{answer:?}");
        let finished = answer.finished.unwrap();
        assert_eq!(finished.prompt_tokens as usize, prompt.len());
        assert_eq!(finished.generated_tokens as usize, expected.len());
        let reason = if expected.len() < MAX_TOKENS as usize {
            v1::FinishReason::Stop
        } else {
            v1::FinishReason::Length
        };
        assert_eq!(finished.reason(), reason);
    }
    let status = replica.wait_until_idle().await;
    assert_eq!(status.generated_tokens as usize, expected.iter().map(Vec::len).sum::<usize>());
    assert!(replica.status(0).await.link_failure.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn three_stages_give_the_whole_models_text_of_twenty_prompts_four_at_a_time() {
    assert_whole_text(&[10, 20], &[&[0], &[1], &[2]], 20, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_requests_than_slots_wait_their_turn_and_get_the_same_text() {
    assert_whole_text(&[15], &[&[0], &[1]], 14, 14).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_stage_is_a_replica_too() {
    assert_whole_text(&[], &[&[0]], 7, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_runs_several_slices_one_after_the_other() {
    assert_whole_text(&[4, 9, 22], &[&[0, 1], &[2, 3]], 7, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_travel_as_f16_on_request() {
    let slices = Slices::cut(&[10, 20]);
    let mut whole = Whole::load(&slices, SHAPE.n_ctx);
    let prompt = &prompts(&whole, 1)[0];
    let expected = whole.greedy(prompt, 8);
    let shape = Shape { encoding: v1::Encoding::F16, ..SHAPE };
    let (replica, _workers) = start(&slices, &[&[0], &[1], &[2]], shape).await;
    let answer = replica.generate(prompt, 8).await.unwrap();
    // Half precision may move a close call; the first tokens of this answer are none.
    assert_eq!(answer.tokens[..4], expected[..4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_turn_reuses_the_first_ones_cache() {
    let slices = Slices::cut(&[15]);
    let mut whole = Whole::load(&slices, SHAPE.n_ctx);
    let first = prompts(&whole, 1).remove(0);
    let (replica, _workers) = start(&slices, &[&[0], &[1]], SHAPE).await;
    let answer = replica.generate(&first, 8).await.unwrap();
    let second = [first.clone(), answer.tokens.clone(), whole.tokenize(" And of Spain?")].concat();
    let again = replica.generate(&second, 8).await.unwrap();
    assert!(again.cached as usize >= first.len() + answer.tokens.len() - 1, "{again:?}");
    assert_eq!(again.tokens, whole.greedy(&second, 8));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_from_any_point_continues_the_same_sampled_text() {
    let slices = Slices::cut(&[15]);
    let whole = Whole::load(&slices, SHAPE.n_ctx);
    let prompt = prompts(&whole, 2).remove(1);
    let (replica, _workers) = start(&slices, &[&[0], &[1]], SHAPE).await;
    let mut request = greedy(&prompt, 20);
    request.sampling = Some(v1::Sampling {
        temperature: 1.0,
        seed: 7,
        repeat_penalty: 1.3,
        repeat_last_n: -1,
        ..Sampling::greedy().into()
    });
    request.ignore_eos = true;
    let full = replica.start(request.clone()).await.unwrap().rest().await.unwrap().tokens;
    assert_eq!(full.len(), 20);
    for sent in [1, 7, 19] {
        let mut replay = request.clone();
        replay.prompt.extend(&full[..sent]);
        replay.replayed = sent as u32;
        replay.max_tokens = 20 - sent as u32;
        let rest = replica.start(replay).await.unwrap().rest().await.unwrap().tokens;
        assert_eq!(rest, full[sent..], "replayed from {sent}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_and_grammars_are_served() {
    let slices = Slices::cut(&[15]);
    let whole = Whole::load(&slices, SHAPE.n_ctx);
    let prompt = prompts(&whole, 1).remove(0);
    let (replica, _workers) = start(&slices, &[&[0], &[1]], SHAPE).await;
    let mut request = greedy(&prompt, 12);
    request.logprobs = true;
    request.top_logprobs = 2;
    request.sampling.as_mut().unwrap().grammar =
        Some(v1::Grammar { gbnf: "root ::= \"no\" | \"never\"".to_owned(), ..Default::default() });
    let answer = replica.start(request.clone()).await.unwrap().rest().await.unwrap();
    assert_eq!(answer.finished.unwrap().reason(), v1::FinishReason::Stop);
    assert!((1..=4).contains(&answer.tokens.len()), "{:?}", answer.tokens);
    assert_eq!(answer.logprobs.len(), answer.tokens.len());
    assert!(answer.logprobs.iter().all(|p| p.is_finite() && *p < 0.0));

    request.sampling.as_mut().unwrap().grammar =
        Some(v1::Grammar { gbnf: "root ::= (".to_owned(), ..Default::default() });
    let refused = replica.start(request).await.err().unwrap();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().contains("preparing the sampler failed: "), "{refused}");
}
