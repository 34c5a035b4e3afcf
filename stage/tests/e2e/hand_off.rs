//! Two replicas of one model, cut differently: one computes prompts and first tokens, the other takes over and goes on. The texts
//! are those of the whole model.

use std::time::Duration;

use futures::future::join_all;
use protocol::tls::ClusterCa;
use protocol::v1;
use protocol::v1::kv_client::KvClient;
use stage::Worker;
use tonic::Code;

use crate::replica::{Answer, Generating, Replica, SHAPE, Shape, Stages, blocks, configs, greedy};
use crate::whole::{N_LAYER, Slices, Whole, prompts};

/// Bytes of a token's keys and values in one of SmolLM2's blocks: three heads of 64 numbers of 16 bits, each twice.
const KV_BYTES: u64 = 3 * 64 * 2 * 2;

const HOLD_MS: u32 = 60_000;

/// A replica in a cluster with others.
async fn start(
    slices: &Slices,
    stages: Stages<'_>,
    (shape, ca): (Shape, &ClusterCa),
    model_hash: [u8; 32],
) -> (Replica, Vec<Worker>) {
    let mut workers = Vec::new();
    for mut config in configs(slices, stages, shape, ca) {
        config.model_hash = model_hash;
        workers.push(Worker::start(config).await.unwrap());
    }
    let addresses = workers.iter().map(Worker::address).collect();
    let mut replica = Replica::link(addresses, ca, shape).await;
    replica.blocks = blocks(slices, stages);
    replica.relink().await.unwrap();
    (replica, workers)
}

/// The one that computes prompts, and the one that goes on: cut at 10 and 20, and at 7 and 26 into two stages.
struct Pair {
    prefill: Replica,
    decode: Replica,
    _workers: Vec<Worker>,
    whole: Whole,
}

const PREFILL: Stages<'static> = &[&[0], &[1], &[2]];
const DECODE: Stages<'static> = &[&[0], &[1, 2]];

impl Pair {
    async fn new(shape: Shape, hash_of_decode: [u8; 32]) -> Self {
        let ca = ClusterCa::new().unwrap();
        let (one, other) = (Slices::cut(&[10, 20]), Slices::cut(&[7, 26]));
        let (prefill, mut workers) = start(&one, PREFILL, (shape, &ca), [1; 32]).await;
        let wider = Shape { slots: shape.slots + 2, ..shape };
        let (decode, others) = start(&other, DECODE, (wider, &ca), hash_of_decode).await;
        workers.extend(others);
        let whole = Whole::load(&one, shape.n_ctx);
        Self { prefill, decode, _workers: workers, whole }
    }

    async fn prefill(&self, prompt: &[i32], max_tokens: u32) -> Generating {
        let request = v1::GenerateRequest { hold_ms: HOLD_MS, ..greedy(prompt, max_tokens) };
        self.prefill.start(request).await.unwrap()
    }

    /// From one to the other: the whole text, and what the second replica said.
    async fn answer(&self, prompt: &[i32], max_tokens: u32) -> (Vec<i32>, Answer) {
        let mut first = self.prefill(prompt, max_tokens).await;
        let held = first.until_held().await;
        let answer = self.go_on(prompt, &first.answer.tokens, (max_tokens, held)).await;
        let text = [&first.answer.tokens[..], &answer.tokens].concat();
        (text, answer)
    }

    async fn go_on(&self, prompt: &[i32], first: &[i32], (max, held): (u32, v1::HeldSlot)) -> Answer {
        self.decode.start(go_on(prompt, first, (max, held))).await.unwrap().rest().await.unwrap()
    }
}

/// The request by which the second replica goes on.
pub(crate) fn go_on(prompt: &[i32], first: &[i32], (max, held): (u32, v1::HeldSlot)) -> v1::GenerateRequest {
    v1::GenerateRequest {
        replayed: first.len() as u32,
        from: Some(held),
        ..greedy(&[prompt, first].concat(), max - first.len() as u32)
    }
}

/// Bytes that should have travelled for an answer: what its slot did not hold already.
fn bytes_of(answer: &Answer, prompt: &[i32]) -> u64 {
    (prompt.len() as u64 - u64::from(answer.cached)) * u64::from(N_LAYER) * KV_BYTES
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_changes_hands_is_the_text_of_the_whole_model() {
    let mut pair = Pair::new(SHAPE, [1; 32]).await;
    let prompts = prompts(&pair.whole, 12);
    let expected: Vec<_> = prompts.iter().map(|prompt| pair.whole.greedy(prompt, 20)).collect();
    let answers = join_all(prompts.iter().map(|prompt| pair.answer(prompt, 20))).await;
    let (mut bytes, mut due) = (0, 0);
    for (((text, answer), prompt), expected) in answers.iter().zip(&prompts).zip(&expected) {
        assert_eq!(text, expected);
        let handed_over = answer.handed_over.as_ref().unwrap();
        assert_eq!((handed_over.failure.as_str(), handed_over.tokens as usize), ("", prompt.len()));
        bytes += handed_over.bytes;
        due += bytes_of(answer, prompt);
    }
    let excess = bytes as f64 / due as f64 - 1.0;
    println!("{bytes} bytes travelled, tokens x blocks x bytes are {due}: {:.2} % more", excess * 100.0);
    assert!((0.0..0.02).contains(&excess), "{bytes} bytes travelled, {due} were due");
    let status = pair.decode.wait_until_idle().await;
    assert_eq!((status.taken_over, status.not_taken_over, status.taken_over_bytes), (12, 0, bytes));
    let prefilled: usize = prompts.iter().map(Vec::len).sum();
    assert!(status.prefilled_tokens <= 12, "one token of each is computed again, not {prefilled}");
    let status = pair.prefill.wait_until_idle().await;
    assert_eq!((status.held, status.generated_tokens), (0, 12));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_the_slot_lacks_travels() {
    let mut pair = Pair::new(Shape { slots: 1, ..SHAPE }, [1; 32]).await;
    let prompt = prompts(&pair.whole, 4).remove(3);
    let expected = pair.whole.greedy(&prompt, 10);
    assert_eq!(pair.answer(&prompt, 10).await.0, expected);
    // The second turn begins with the first, all of which the slot holds but the last token.
    let turn =
        pair.whole.tokenize("<|im_end|>\n<|im_start|>user\nAnd at night?<|im_end|>\n<|im_start|>assistant\n");
    let longer = [&prompt[..], &expected, &turn].concat();
    let expected = pair.whole.greedy(&longer, 10);
    let (text, answer) = pair.answer(&longer, 10).await;
    assert_eq!(text, expected);
    assert!(answer.cached as usize >= prompt.len(), "{} tokens were there", answer.cached);
    let handed_over = answer.handed_over.clone().unwrap();
    assert_eq!(handed_over.failure, "");
    let due = bytes_of(&answer, &longer);
    let excess = handed_over.bytes as f64 / due as f64 - 1.0;
    assert!((0.0..0.02).contains(&excess), "{} bytes travelled, {due} were due", handed_over.bytes);
    // All of it again, and one token more: nothing is missing, so nothing is asked for.
    let mut first = pair.prefill(&longer, 10).await;
    let held = first.until_held().await;
    let answer = pair.go_on(&longer, &first.answer.tokens, (10, held)).await;
    assert_eq!([&first.answer.tokens[..], &answer.tokens].concat(), expected);
    assert_eq!((answer.cached as usize, answer.handed_over), (longer.len(), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_is_refused_by_its_hash_and_the_prompt_is_computed() {
    let mut pair = Pair::new(SHAPE, [2; 32]).await;
    let prompt = prompts(&pair.whole, 1).remove(0);
    let expected = pair.whole.greedy(&prompt, 10);
    let (text, answer) = pair.answer(&prompt, 10).await;
    assert_eq!(text, expected);
    let handed_over = answer.handed_over.unwrap();
    let named = |byte: &str| handed_over.failure.contains(&byte.repeat(32));
    assert!(named("01") && named("02"), "{}", handed_over.failure);
    assert_eq!(handed_over.bytes, 0);
    let status = pair.decode.wait_until_idle().await;
    assert_eq!((status.taken_over, status.not_taken_over), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_slot_that_nobody_takes_is_freed_when_its_time_is_up() {
    let mut pair = Pair::new(Shape { slots: 1, ..SHAPE }, [1; 32]).await;
    let prompts = prompts(&pair.whole, 2);
    let expected = prompts.iter().map(|prompt| pair.whole.greedy(prompt, 8)).collect::<Vec<_>>();
    let request = v1::GenerateRequest { hold_ms: 300, ..greedy(&prompts[0], 8) };
    let mut first = pair.prefill.start(request).await.unwrap();
    let held = first.until_held().await;
    // It waits for the only slot.
    let other = pair.prefill.generate(&prompts[1], 8).await.unwrap();
    assert_eq!(other.tokens, expected[1]);
    let tokens = first.answer.tokens.clone();
    let finished = first.rest().await.unwrap().finished.unwrap();
    assert_eq!((finished.reason(), finished.generated_tokens), (v1::FinishReason::HoldExpired, 1));
    // Whoever comes too late computes the prompt.
    let answer = pair.go_on(&prompts[0], &tokens, (8, held)).await;
    assert_eq!([&tokens[..], &answer.tokens].concat(), expected[0]);
    let failure = answer.handed_over.unwrap().failure;
    assert!(failure.contains("holds") || failure.contains("no longer held"), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_slot_is_freed_at_once_when_its_client_leaves_and_when_it_is_released() {
    let pair = Pair::new(Shape { slots: 1, ..SHAPE }, [1; 32]).await;
    let prompt = prompts(&pair.whole, 1).remove(0);
    let mut first = pair.prefill(&prompt, 8).await;
    let left = first.until_held().await;
    drop(first);
    let mut second = pair.prefill(&prompt, 8).await;
    let held = second.until_held().await;
    let channel = protocol::tls::connect(pair.prefill.addresses[2], &pair.prefill.identity).await.unwrap();
    let mut master = KvClient::new(channel);
    let mut release = async |held: &v1::HeldSlot| {
        let v1::HeldSlot { epoch, slot, hold, .. } = *held;
        master.release(v1::ReleaseRequest { epoch, slot, hold }).await.unwrap().into_inner().held
    };
    assert!(!release(&left).await, "its hold is over");
    assert!(release(&held).await);
    assert!(!release(&held).await, "once only");
    let finished = second.rest().await.unwrap().finished.unwrap();
    assert_eq!(finished.reason(), v1::FinishReason::HandedOff);
    assert_eq!(pair.prefill.wait_until_idle().await.held, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_refused_before_anything_is_moved() {
    let mut pair = Pair::new(Shape { slots: 1, ..SHAPE }, [1; 32]).await;
    let prompt = prompts(&pair.whole, 1).remove(0);
    let mut first = pair.prefill(&prompt, 8).await;
    let held = first.until_held().await;
    let channel = protocol::tls::connect(pair.prefill.addresses[0], &pair.prefill.identity).await.unwrap();
    let mut stage = KvClient::new(channel);
    let mut pull = async |change: fn(&mut v1::PullRequest)| {
        let from = Some(held.clone());
        let mut request = v1::PullRequest { from, first_block: 0, end_block: 10, first_position: 0 };
        change(&mut request);
        stage.pull(request).await.map(|_| ()).map_err(|status| status.code())
    };
    assert_eq!(pull(|_| ()).await, Ok(()));
    assert_eq!(pull(|r| r.end_block = 11).await, Err(Code::InvalidArgument));
    assert_eq!(pull(|r| r.end_block = 0).await, Err(Code::InvalidArgument));
    assert_eq!(pull(|r| r.from = None).await, Err(Code::InvalidArgument));
    assert_eq!(pull(|r| r.from.as_mut().unwrap().slot = 9).await, Err(Code::InvalidArgument));
    assert_eq!(pull(|r| r.from.as_mut().unwrap().epoch = 1).await, Err(Code::FailedPrecondition));
    let tokens = |r: &mut v1::PullRequest| {
        let from = r.from.as_mut().unwrap();
        (from.hold, from.tokens) = (99, from.tokens + 1);
    };
    assert_eq!(pull(tokens).await, Err(Code::FailedPrecondition));
    let transfer = v1::TransferRequest { epoch: pair.prefill.epoch, transfer: 5, slot: 0 };
    assert_eq!(stage.commit(transfer).await.unwrap_err().code(), Code::FailedPrecondition);
    stage.abort(transfer).await.unwrap();
    // Without the stages' addresses, nobody could be told where to pull from.
    pair.decode.blocks.clear();
    pair.decode.relink().await.unwrap();
    let refused = pair.decode.start(go_on(&prompt, &[1], (8, held.clone()))).await.err().unwrap();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    drop(first);
    tokio::time::timeout(Duration::from_secs(60), pair.prefill.wait_until_idle()).await.unwrap();
}
