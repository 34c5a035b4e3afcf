//! Several replicas behind one API, the queue before them, and requests that go on elsewhere when theirs is lost.

use reqwest::header::RETRY_AFTER;

use super::*;
use crate::testing::{Accepted, Call};

/// The masters of two replicas.
pub(super) struct Pair<'a> {
    masters: [&'a mut Master; 2],
}

impl Pair<'_> {
    pub(super) fn of(bench: &mut Bench) -> Pair<'_> {
        Pair { masters: [&mut bench.master, &mut bench.others[0].0] }
    }

    /// The next request that reaches either, and whom.
    pub(super) async fn call(&mut self) -> (usize, Call) {
        let [a, b] = &mut self.masters;
        tokio::select! {
            call = a.call() => (0, call),
            call = b.call() => (1, call),
        }
    }
}

pub(super) fn agent(bench: &Bench, replica: usize) -> &watch::Sender<ReplicaState> {
    if replica == 0 { &bench.agent } else { &bench.others[replica - 1].1 }
}

pub(super) fn down(reason: &str) -> ReplicaState {
    ReplicaState::Down { reason: reason.into() }
}

/// Waits until the orchestrator has got so many tokens.
pub(super) async fn received(bench: &Bench, tokens: u32) {
    let counted = async {
        while scrape(bench).await.get("shoal_generated_tokens_total") != Some(&f64::from(tokens)) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, counted).await.expect("the tokens arrive");
}

pub(super) fn patient() -> Limits {
    Limits { replay_timeout: DEADLINE, ..impatient() }
}

#[tokio::test]
async fn requests_are_spread_over_replicas_and_ready_tells_of_each() {
    let mut bench = Bench::with(2, patient()).await;
    let _replies: Vec<_> = (0..4).map(|_| bench.send(CHAT, chat(json!({})))).collect();
    let mut reached = [0, 0];
    let mut calls = Vec::new();
    for _ in 0..4 {
        let (replica, call) = Pair::of(&mut bench).call().await;
        reached[replica] += 1;
        calls.push(call);
    }
    assert_eq!(reached, [2, 2]);
    bench.agent.send_replace(down("stage 1 was killed"));
    let (status, ready) = bench.get("/ready").await;
    assert_eq!(status, StatusCode::OK, "the other serves: {ready}");
    let first = json!({ "replica": 0, "status": "down", "reason": "stage 1 was killed" });
    assert_eq!(ready["replicas"], json!([first, { "replica": 1, "status": "ready", "epoch": 1 }]));
    agent(&bench, 1).send_replace(down("the cable was pulled"));
    let (status, ready) = bench.get("/ready").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(ready["reason"], "replica 0: stage 1 was killed; replica 1: the cable was pulled");
    let samples = scrape(&bench).await;
    assert_eq!(samples[r#"shoal_replica_ready{replica="1"}"#], 0.0);
}

#[tokio::test]
async fn a_stream_goes_on_elsewhere_without_a_token_more_or_less() {
    let mut bench = Bench::with(2, patient()).await;
    let answer = "Grüße 🐟 and 你好, one two three!";
    let tokens = bench.tokens(answer);
    let more = json!({
        "stream_options": { "include_usage": true }, "seed": 7, "max_tokens": 100, "stop": "three!!",
    });
    let reply = bench.send(CHAT, stream(more));
    let (first, call) = Pair::of(&mut bench).call().await;
    let asked = call.request.clone();
    let accepted = call.accept();
    accepted.start(3).await;
    // In the middle of the fish.
    let (before, after) = tokens.split_at(6);
    accepted.tokens(before).await;
    let reply = reply.await.unwrap();
    // What was sent counts, even if the agent's word comes first.
    drop(accepted);
    let (second, call) = Pair::of(&mut bench).call().await;
    assert_ne!(first, second);
    let again = call.request.clone();
    assert_eq!(again.prompt, [&asked.prompt[..], before].concat());
    assert_eq!((again.replayed, again.max_tokens), (6, 94));
    assert_eq!((&again.sampling, &again.request), (&asked.sampling, &asked.request));
    let accepted = call.accept();
    accepted.start(0).await;
    accepted.tokens(after).await;
    accepted.finish(FinishReason::Stop, after.len() as u32).await;
    let events = events(reply).await;
    assert_eq!(content(&events), answer);
    assert_eq!(finish_reason(&events), "stop");
    let [.., last, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done, "[DONE]");
    assert_eq!(last["usage"]["prompt_tokens"], asked.prompt.len());
    assert_eq!(last["usage"]["completion_tokens"], tokens.len());
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(last["timings"]["predicted_n"], tokens.len());
    let samples = scrape(&bench).await;
    assert_eq!(samples["shoal_replays_total"], 1.0);
    assert_eq!(samples[r#"shoal_generations_total{end="stop"}"#], 1.0);
    assert_eq!(samples["shoal_generated_tokens_total"], tokens.len() as f64);
    assert_eq!(samples["shoal_prompt_tokens_total"], asked.prompt.len() as f64);
}

#[tokio::test]
async fn a_stop_string_and_logprobs_span_the_loss() {
    let mut bench = Bench::with(2, patient()).await;
    let reply = bench.send(CHAT, chat(json!({ "logprobs": true, "stop": "four five" })));
    let tokens = bench.tokens("one two three four five");
    let tell = async |accepted: &Accepted, tokens: &[i32]| {
        for &id in tokens {
            let token = v1::GeneratedToken { id, logprob: Some(-0.5), ..Default::default() };
            accepted.tell(Event::Token(token)).await;
        }
    };
    let (before, after) = tokens.split_at(tokens.len() - 1);
    let (_, call) = Pair::of(&mut bench).call().await;
    let accepted = call.accept();
    accepted.start(0).await;
    tell(&accepted, before).await;
    drop(accepted);
    let (_, call) = Pair::of(&mut bench).call().await;
    let accepted = call.accept();
    accepted.start(0).await;
    tell(&accepted, after).await;
    tokio::time::timeout(DEADLINE, accepted.cancelled()).await.expect("the request is cancelled");
    let body: Value = reply.await.unwrap().json().await.unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "one two three ");
    let told: String = body["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token["token"].as_str().unwrap())
        .collect();
    assert!(told.starts_with("one two three"), "{told}");
    assert_eq!(body["usage"]["completion_tokens"], tokens.len());
}

#[tokio::test]
async fn an_answer_that_lacks_only_its_end_is_not_sent_again() {
    let mut bench = Bench::with(2, patient()).await;
    let reply = bench.send(CHAT, chat(json!({ "max_tokens": 2 })));
    let (first, call) = Pair::of(&mut bench).call().await;
    let accepted = call.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens("one two")).await;
    received(&bench, 2).await;
    agent(&bench, first).send_replace(down("stage 1 was killed"));
    let body: Value = reply.await.unwrap().json().await.unwrap();
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["choices"][0]["message"]["content"], "one two");
    assert_eq!(body["usage"]["completion_tokens"], 2);
    assert!(bench.master.is_idle() && bench.others[0].0.is_idle());
}

#[tokio::test]
async fn case_1_a_request_goes_on_on_the_same_replica_once_that_is_back() {
    let mut bench = Bench::with(1, patient()).await;
    let reply = bench.send(CHAT, chat(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens("one")).await;
    received(&bench, 1).await;
    // A silent master, as a frozen one would be: the agent's word must do.
    bench.agent.send_replace(down("stage 1 did not answer"));
    tokio::time::timeout(DEADLINE, accepted.cancelled()).await.expect("the lost master is not listened to");
    assert_eq!(bench.get("/ready").await.0, StatusCode::SERVICE_UNAVAILABLE);
    let master = bench.master.address;
    bench.agent.send_replace(ReplicaState::Ready { master, epoch: Epoch(2) });
    let call = bench.master.call().await;
    assert_eq!(call.request.replayed, 1);
    let accepted = call.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens(" two")).await;
    accepted.finish(FinishReason::Stop, 1).await;
    let body: Value = reply.await.unwrap().json().await.unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "one two");
    assert_eq!(body["usage"]["completion_tokens"], 2);
}

#[tokio::test]
async fn a_request_that_kills_replicas_is_sent_again_four_times_and_then_blamed() {
    let mut bench = Bench::with(1, patient()).await;
    let reply = bench.send(CHAT, stream(json!({})));
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens("one")).await;
    let reply = reply.await.unwrap();
    received(&bench, 1).await;
    let master = bench.master.address;
    for epoch in 2..=5 {
        bench.agent.send_replace(ReplicaState::Ready { master, epoch: Epoch(epoch) });
        let call = bench.master.call().await;
        assert_eq!(call.request.replayed, 1);
        call.accept().start(0).await;
    }
    bench.agent.send_replace(ReplicaState::Ready { master, epoch: Epoch(6) });
    let events = events(reply).await;
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["code"], "replica_lost_repeatedly", "{error}");
    assert!(error["message"].as_str().unwrap().contains("5 times"), "{error}");
    assert!(bench.master.is_idle());
    assert_eq!(scrape(&bench).await["shoal_replays_total"], 4.0);
}

#[tokio::test]
async fn no_replica_gets_more_requests_than_it_has_slots_and_the_rest_wait_in_order() {
    let mut bench = Bench::with(1, Limits { queue: 2, ..patient() }).await;
    let mut running = Vec::new();
    let mut replies = Vec::new();
    for _ in 0..4 {
        replies.push(bench.send(CHAT, chat(json!({}))));
        let accepted = bench.master.call().await.accept();
        accepted.start(0).await;
        running.push(accepted);
    }
    let mut waiting = Vec::new();
    for position in ["1", "2"] {
        let reply = bench.send(CHAT, stream(json!({}))).await.unwrap();
        assert_eq!(reply.status(), StatusCode::OK, "its stream begins while it waits");
        assert_eq!(reply.headers()["x-shoal-queue-position"], position);
        let wait = reply.headers()["x-shoal-predicted-wait-ms"].to_str().unwrap();
        assert!(wait.parse::<u64>().unwrap() > 0, "{wait}");
        waiting.push(reply);
    }
    assert!(bench.master.is_idle());
    let samples = scrape(&bench).await;
    assert_eq!(samples["shoal_queued_requests"], 2.0);
    assert_eq!(samples[r#"shoal_replica_queued_requests{replica="0"}"#], 2.0);
    let refused = bench.send(CHAT, stream(json!({}))).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE, "case 25");
    let seconds: u32 = refused.headers()[RETRY_AFTER].to_str().unwrap().parse().unwrap();
    assert!(seconds >= 1);
    assert_eq!(refused.json::<Value>().await.unwrap()["error"]["code"], "queue_full");
    // One that waits leaves; the other gets the slot that is freed.
    drop(waiting.remove(0));
    running.pop().unwrap().finish(FinishReason::Stop, 0).await;
    let accepted = bench.master.call().await.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens("at last")).await;
    accepted.finish(FinishReason::Stop, 2).await;
    assert_eq!(content(&events(waiting.remove(0)).await), "at last");
    assert!(bench.master.is_idle());
}

#[tokio::test]
async fn who_waits_too_long_is_told_so() {
    let limits = Limits { queue_timeout: Duration::from_millis(50), ..patient() };
    let mut bench = Bench::with(1, limits).await;
    let mut running = Vec::new();
    for _ in 0..4 {
        let _reply = bench.send(CHAT, chat(json!({})));
        running.push(bench.master.call().await.accept());
    }
    let late = bench.send(CHAT, chat(json!({}))).await.unwrap();
    assert_eq!(late.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(late.headers().contains_key(RETRY_AFTER));
    assert_eq!(late.json::<Value>().await.unwrap()["error"]["code"], "queue_timeout");
}

#[tokio::test]
async fn who_waits_for_a_lost_replica_gets_another() {
    let mut bench = Bench::with(2, patient()).await;
    let mut running = [Vec::new(), Vec::new()];
    for _ in 0..8 {
        let _reply = bench.send(CHAT, chat(json!({})));
        let (replica, call) = Pair::of(&mut bench).call().await;
        running[replica].push(call.accept());
    }
    let waiting = bench.send(CHAT, stream(json!({ "max_tokens": 77 }))).await.unwrap();
    agent(&bench, 0).send_replace(down("stage 0 was killed"));
    let freed = running[1].pop().unwrap();
    freed.finish(FinishReason::Stop, 0).await;
    // Those that ran on the lost one are older.
    for i in 0..5 {
        let call = bench.others[0].0.call().await;
        assert_eq!(call.request.max_tokens == 77, i == 4, "call {i}");
        call.accept().finish(FinishReason::Stop, 0).await;
    }
    assert_eq!(finish_reason(&events(waiting).await), "stop");
}

#[tokio::test]
async fn a_replica_that_joins_gets_requests_and_one_that_is_drained_finishes_what_it_has() {
    let mut bench = Bench::with(1, patient()).await;
    let running = bench.send(CHAT, chat(json!({})));
    let first = bench.master.call().await.accept();
    first.start(0).await;
    let (mut second, _agent, feed) = replica(&bench.identity).await;
    assert_eq!(bench.fleet.add(feed), 1);
    bench.fleet.drain(0);
    let (status, ready) = bench.get("/ready").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(
        (&ready["replicas"][0]["status"], &ready["replicas"][1]["status"]),
        (&"draining".into(), &"ready".into())
    );
    let replies: Vec<_> = (0..3).map(|_| bench.send(CHAT, chat(json!({})))).collect();
    let mut calls = Vec::new();
    for _ in 0..3 {
        calls.push(second.call().await);
    }
    assert!(bench.master.is_idle());
    let fleet = bench.fleet.clone();
    let mut drained = tokio::spawn(async move { fleet.drained(0).await });
    assert!(futures::poll!(&mut drained).is_pending());
    first.tokens(&bench.tokens("Hello")).await;
    first.finish(FinishReason::Stop, 1).await;
    assert_eq!(running.await.unwrap().status(), StatusCode::OK);
    tokio::time::timeout(DEADLINE, drained).await.expect("nobody has a slot there").unwrap();
    bench.fleet.remove(0);
    let (_, ready) = bench.get("/ready").await;
    assert_eq!(ready["replicas"], json!([{ "replica": 1, "status": "ready", "epoch": 1 }]));
    let samples = scrape(&bench).await;
    assert_eq!(samples[r#"shoal_replica_ready{replica="1"}"#], 1.0);
    assert!(!samples.contains_key(r#"shoal_replica_ready{replica="0"}"#));
    for call in calls {
        call.accept().finish(FinishReason::Stop, 0).await;
    }
    for reply in replies {
        assert_eq!(reply.await.unwrap().status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_replica_that_is_taken_away_while_it_generates_is_lost_to_its_requests_and_they_go_on_elsewhere() {
    let mut bench = Bench::with(2, patient()).await;
    let reply = bench.send(CHAT, chat(json!({})));
    let (replica, call) = Pair::of(&mut bench).call().await;
    let accepted = call.accept();
    let hello = bench.tokens("Hello");
    accepted.tokens(&hello).await;
    received(&bench, hello.len() as u32).await;
    bench.fleet.drain(replica);
    bench.fleet.remove(replica);
    agent(&bench, replica).send_replace(down("it was stopped"));
    let (other, call) = Pair::of(&mut bench).call().await;
    assert_ne!(other, replica);
    assert_eq!(call.request.replayed, hello.len() as u32);
    call.accept().finish(FinishReason::Stop, 0).await;
    assert_eq!(reply.await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn without_a_replica_it_is_said_for_what_it_is_waited() {
    let bench = Bench::with(1, patient()).await;
    bench.fleet.remove(0);
    bench.fleet.wait_for("nodes that joined: 1 of 2 are there".to_owned());
    let (status, ready) = bench.get("/ready").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        ready,
        json!({ "status": "loading", "reason": "nodes that joined: 1 of 2 are there", "replicas": [] })
    );
}
