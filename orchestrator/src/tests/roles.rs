//! One replica computes prompts, another one goes on: what the masters of both are asked for, and what becomes of a request
//! whatever fails in between. Nobody but the masters sees any of it.

use cluster::Role;

use super::several::{Pair, agent, down, patient, received};
use super::*;
use crate::testing::{Accepted, Call};

/// Replica 0 computes prompts, replica 1 (and 2, if there is one) goes on.
async fn with_roles(replicas: usize) -> Bench {
    let bench = Bench::with(replicas, patient()).await;
    bench.fleet.set_role(0, Role::Prefill);
    (1..replicas).for_each(|replica| bench.fleet.set_role(replica, Role::Decode));
    bench
}

fn slot(hold: u64, tokens: u32) -> v1::HeldSlot {
    v1::HeldSlot { epoch: 1, slot: 2, hold, tokens, chain: Vec::new() }
}

/// Answers a prefill-only request with its first token, and holds it.
async fn hold(call: Call, first: &[i32]) -> (Accepted, v1::HeldSlot) {
    assert!(call.request.hold_ms > 0, "its slot is held");
    assert_eq!(call.request.from, None);
    let held = slot(7, call.request.prompt.len() as u32);
    let accepted = call.accept();
    accepted.start(0).await;
    accepted.tokens(first).await;
    accepted.tell(Event::Held(held.clone())).await;
    (accepted, held)
}

async fn gone(accepted: &Accepted) {
    tokio::time::timeout(DEADLINE, accepted.cancelled()).await.expect("its slot is given back");
}

fn handed_over(tokens: u32, failure: &str) -> Event {
    let failure = failure.to_owned();
    Event::HandedOver(v1::HandedOver { tokens, bytes: 1000, took_ms: 20.0, failure })
}

async fn outcome(bench: &Bench, outcome: &str) -> f64 {
    let name = format!(r#"shoal_hand_offs_total{{outcome="{outcome}"}}"#);
    scrape(bench).await.get(&name).copied().unwrap_or(0.0)
}

#[tokio::test]
async fn a_prompt_is_computed_by_one_replica_and_decoded_by_another_and_nobody_sees_it() {
    let mut bench = with_roles(2).await;
    let tokens = bench.tokens("one two three");
    let more = json!({ "stream_options": { "include_usage": true }, "max_tokens": 9 });
    let reply = bench.send(CHAT, stream(more));
    let call = bench.master.call().await;
    let asked = call.request.clone();
    let (holder, held) = hold(call, &tokens[..1]).await;
    let reply = reply.await.unwrap();
    let call = bench.others[0].0.call().await;
    assert_eq!(call.request.from.as_ref(), Some(&held));
    assert_eq!(call.request.prompt, [&asked.prompt[..], &tokens[..1]].concat());
    assert_eq!((call.request.replayed, call.request.max_tokens, call.request.hold_ms), (1, 8, 0));
    let accepted = call.accept();
    accepted.start(3).await;
    let samples = scrape(&bench).await;
    assert_eq!(samples[r#"shoal_replica_role{role="prefill",replica="0"}"#], 1.0);
    accepted.tell(handed_over(held.tokens, "")).await;
    // Its slot there is given back by the hand-off, and would be by this.
    gone(&holder).await;
    accepted.tokens(&tokens[1..]).await;
    accepted.finish(FinishReason::Stop, tokens.len() as u32 - 1).await;
    let events = events(reply).await;
    assert_eq!(content(&events), "one two three");
    let [.., last, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done, "[DONE]");
    assert_eq!(last["usage"]["prompt_tokens"], asked.prompt.len());
    assert_eq!(last["usage"]["completion_tokens"], tokens.len());
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{last}");
    let samples = scrape(&bench).await;
    assert_eq!(samples[r#"shoal_hand_offs_total{outcome="moved"}"#], 1.0);
    assert_eq!(samples["shoal_hand_off_bytes_total"], 1000.0);
    assert_eq!(samples["shoal_hand_off_seconds_count"], 1.0);
    assert_eq!(samples["shoal_replays_total"], 0.0);
}

#[tokio::test]
async fn what_the_second_replica_cannot_take_over_it_computes() {
    let mut bench = with_roles(2).await;
    let tokens = bench.tokens("one two");
    for refused in [false, true] {
        let reply = bench.send(CHAT, chat(json!({})));
        let (holder, held) = hold(bench.master.call().await, &tokens[..1]).await;
        let mut call = bench.others[0].0.call().await;
        if refused {
            call.refuse(Status::failed_precondition("slots cannot change hands here"));
            call = bench.others[0].0.call().await;
            assert_eq!(call.request.from, None);
            gone(&holder).await;
        }
        let accepted = call.accept();
        accepted.start(0).await;
        if !refused {
            accepted.tell(handed_over(0, "blocks 0..3: no answer for 3 s")).await;
            gone(&holder).await;
        }
        accepted.tokens(&tokens[1..]).await;
        accepted.finish(FinishReason::Stop, 1).await;
        let body: Value = reply.await.unwrap().json().await.unwrap();
        assert_eq!(body["choices"][0]["message"]["content"], "one two");
        assert_eq!(body["usage"]["prompt_tokens"], held.tokens);
    }
    assert_eq!(outcome(&bench, "failed").await, 2.0);
}

#[tokio::test]
async fn a_replica_that_cannot_hold_its_slots_goes_on_itself() {
    let mut bench = with_roles(2).await;
    let reply = bench.send(CHAT, chat(json!({})));
    let call = bench.master.call().await;
    assert!(call.request.hold_ms > 0);
    call.refuse(Status::failed_precondition("recurrent states cannot change hands"));
    let call = bench.master.call().await;
    assert_eq!(call.request.hold_ms, 0);
    let accepted = call.accept();
    accepted.start(0).await;
    accepted.tokens(&bench.tokens("one two")).await;
    accepted.finish(FinishReason::Stop, 2).await;
    let body: Value = reply.await.unwrap().json().await.unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "one two");
    assert!(bench.others[0].0.is_idle());
}

#[tokio::test]
async fn case_1_when_the_second_replica_is_lost_a_third_gets_what_the_first_still_holds() {
    let mut bench = with_roles(3).await;
    let tokens = bench.tokens("one two");
    let reply = bench.send(CHAT, chat(json!({})));
    let (holder, held) = hold(bench.master.call().await, &tokens[..1]).await;
    let (second, call) = decoder(&mut bench).await;
    let accepted = call.accept();
    accepted.start(0).await;
    agent(&bench, second).send_replace(down("stage 1 was killed"));
    gone(&accepted).await;
    let (third, call) = decoder(&mut bench).await;
    assert_ne!(second, third);
    assert_eq!(call.request.from.as_ref(), Some(&held));
    let accepted = call.accept();
    accepted.start(0).await;
    accepted.tell(handed_over(held.tokens, "")).await;
    gone(&holder).await;
    accepted.tokens(&tokens[1..]).await;
    accepted.finish(FinishReason::Stop, 1).await;
    let body: Value = reply.await.unwrap().json().await.unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "one two");
}

/// The next request that reaches a replica that decodes, and which.
async fn decoder(bench: &mut Bench) -> (usize, Call) {
    let [(a, _), (b, _)] = &mut bench.others[..] else { panic!("there are three replicas") };
    tokio::select! {
        call = a.call() => (1, call),
        call = b.call() => (2, call),
    }
}

#[tokio::test]
async fn case_1_when_the_first_replica_is_lost_the_prompt_is_computed_where_it_is_decoded() {
    let mut bench = with_roles(2).await;
    let tokens = bench.tokens("one two");
    let reply = bench.send(CHAT, chat(json!({})));
    let (holder, _) = hold(bench.master.call().await, &tokens[..1]).await;
    let accepted = bench.others[0].0.call().await.accept();
    accepted.start(0).await;
    bench.agent.send_replace(down("stage 1 was killed"));
    // The other one finds out by itself.
    accepted.tell(handed_over(0, "blocks 0..3 from the first: connection refused")).await;
    gone(&holder).await;
    accepted.tokens(&tokens[1..]).await;
    accepted.finish(FinishReason::Stop, 1).await;
    let body: Value = reply.await.unwrap().json().await.unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "one two");
    // Who comes now finds no replica that prefills.
    let _reply = bench.send(CHAT, chat(json!({})));
    let call = bench.others[0].0.call().await;
    assert_eq!((call.request.hold_ms, &call.request.from), (0, &None));
}

#[tokio::test]
async fn a_request_whose_hold_has_ended_or_whose_holder_is_lost_is_sent_again() {
    for lost in [false, true] {
        let mut bench = with_roles(2).await;
        // Nobody can take it over yet.
        let mut busy = Vec::new();
        for _ in 0..4 {
            let _reply = bench.send(CHAT, chat(json!({})));
            let (holder, held) = hold(bench.master.call().await, &bench.tokens("x")).await;
            let accepted = bench.others[0].0.call().await.accept();
            accepted.start(0).await;
            accepted.tell(handed_over(held.tokens, "")).await;
            gone(&holder).await;
            busy.push(accepted);
        }
        let tokens = bench.tokens("one two");
        let reply = bench.send(CHAT, chat(json!({})));
        let (holder, _) = hold(bench.master.call().await, &tokens[..1]).await;
        received(&bench, 5).await;
        let waiting = async {
            while scrape(&bench).await["shoal_decode_queued_requests"] != 1.0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, waiting).await.expect("it waits in the line for decode slots");
        if lost {
            let master = bench.master.address;
            bench.agent.send_replace(ReplicaState::Ready { master, epoch: Epoch(2) });
        } else {
            holder.finish(FinishReason::HoldExpired, 1).await;
        }
        let call = bench.master.call().await;
        assert_eq!(call.request.replayed, 1);
        let (_holder, held) = hold(call, &tokens[1..]).await;
        busy.pop().unwrap().finish(FinishReason::Stop, 0).await;
        let call = bench.others[0].0.call().await;
        assert_eq!((call.request.replayed, call.request.from.as_ref()), (2, Some(&held)));
        let accepted = call.accept();
        accepted.start(0).await;
        accepted.tell(handed_over(held.tokens, "")).await;
        accepted.finish(FinishReason::Stop, 0).await;
        let body: Value = reply.await.unwrap().json().await.unwrap();
        assert_eq!(body["choices"][0]["message"]["content"], "one two");
    }
}

#[tokio::test]
async fn a_request_goes_on_where_it_is_held_when_nobody_decodes_any_more() {
    let mut bench = with_roles(2).await;
    let tokens = bench.tokens("one two");
    let reply = bench.send(CHAT, chat(json!({})));
    let (holder, _) = hold(bench.master.call().await, &tokens[..1]).await;
    let accepted = bench.others[0].0.call().await.accept();
    accepted.start(0).await;
    agent(&bench, 1).send_replace(down("the cable was pulled"));
    gone(&accepted).await;
    gone(&holder).await;
    let call = bench.master.call().await;
    assert_eq!((call.request.replayed, call.request.hold_ms, &call.request.from), (1, 0, &None));
    let accepted = call.accept();
    accepted.start(9).await;
    accepted.tokens(&tokens[1..]).await;
    accepted.finish(FinishReason::Stop, 1).await;
    let body: Value = reply.await.unwrap().json().await.unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "one two");
    assert_eq!(outcome(&bench, "stayed").await, 1.0);
}

#[tokio::test]
async fn a_client_that_leaves_during_a_hand_off_frees_both_slots() {
    let mut bench = with_roles(2).await;
    let reply = bench.send(CHAT, stream(json!({})));
    let (holder, _) = hold(bench.master.call().await, &bench.tokens("one")).await;
    let reply = reply.await.unwrap();
    let accepted = bench.others[0].0.call().await.accept();
    accepted.start(0).await;
    drop(reply);
    gone(&accepted).await;
    gone(&holder).await;
    let loads: Vec<_> = bench.fleet.dispatch().queue().loads.iter().map(|load| load.held).collect();
    assert_eq!(loads, [0, 0]);
}

#[tokio::test]
async fn a_link_over_which_computing_again_is_faster_is_left_out() {
    let mut bench = with_roles(2).await;
    let tokens = bench.tokens("one two");
    for first in [true, false] {
        let reply = bench.send(CHAT, chat(json!({})));
        let (holder, held) = hold(bench.master.call().await, &tokens[..1]).await;
        let call = bench.others[0].0.call().await;
        assert_eq!(call.request.from.is_some(), first);
        let accepted = call.accept();
        accepted.start(0).await;
        if first {
            let slow =
                v1::HandedOver { tokens: held.tokens, bytes: 9, took_ms: 60_000.0, failure: String::new() };
            accepted.tell(Event::HandedOver(slow)).await;
        }
        gone(&holder).await;
        accepted.tokens(&tokens[1..]).await;
        accepted.finish(FinishReason::Stop, 1).await;
        let body: Value = reply.await.unwrap().json().await.unwrap();
        assert_eq!(body["choices"][0]["message"]["content"], "one two");
    }
    assert_eq!((outcome(&bench, "moved").await, outcome(&bench, "left_out").await), (1.0, 1.0));
}

#[tokio::test]
async fn roles_flip_while_requests_run_and_both_kinds_do_both_when_they_are_mixed() {
    let mut bench = with_roles(2).await;
    let reply = bench.send(CHAT, chat(json!({})));
    let (holder, held) = hold(bench.master.call().await, &bench.tokens("one")).await;
    let accepted = bench.others[0].0.call().await.accept();
    accepted.start(0).await;
    accepted.tell(handed_over(held.tokens, "")).await;
    gone(&holder).await;
    bench.fleet.set_role(0, Role::Decode);
    bench.fleet.set_role(1, Role::Prefill);
    // The other way round now; who runs goes on.
    let other = bench.send(CHAT, chat(json!({})));
    let (holder, held) = hold(bench.others[0].0.call().await, &bench.tokens("two")).await;
    let to = bench.master.call().await.accept();
    to.start(0).await;
    to.tell(handed_over(held.tokens, "")).await;
    gone(&holder).await;
    for (accepted, reply, text) in [(accepted, reply, "one"), (to, other, "two")] {
        accepted.finish(FinishReason::Stop, 0).await;
        let body: Value = reply.await.unwrap().json().await.unwrap();
        assert_eq!(body["choices"][0]["message"]["content"], text);
    }
    bench.fleet.set_role(0, Role::Mixed);
    bench.fleet.set_role(1, Role::Mixed);
    for _ in 0..2 {
        let _reply = bench.send(CHAT, chat(json!({})));
        let (_, call) = Pair::of(&mut bench).call().await;
        assert_eq!(call.request.hold_ms, 0);
    }
}
