//! Two replicas behind one API: what clients see while stages of either are killed and frozen, which is nothing but a pause.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tests::chat::{Answer, EventStream};
use tests::draws::{BEGINNINGS, Draws};
use tests::models::{SMOLLM2, model_path};
use tests::process::{eventually, signal};
use tests::reference::Reference;
use tests::server::{READY_DEADLINE, Server, sample};

/// Two stages each; a thread per stage, because test machines have few cores.
const TWO_REPLICAS: &[&str] =
    &["--replicas", "2", "--stages", "2", "--slots", "4", "--ctx", "512", "--threads", "1"];

/// An error event fails the test.
pub(crate) async fn answer(server: &Server, body: Value) -> Answer {
    tests::chat::completion(server, body).await.unwrap()
}

/// Kills a stage of any replica a second or two after all serve, a few times: fewer than make a stage be given up. On a busy machine
/// a replica may take longer than that to be back, and a request that is never let to its first token is given up in the end.
pub(crate) async fn kill_stages(server: &Server, seed: u64) -> u32 {
    let mut draws = Draws::new(seed);
    let mut killed = 0;
    while killed < 8 {
        eventually("all replicas serve", READY_DEADLINE, async || all_serve(server).await).await.unwrap();
        tokio::time::sleep(draws.millis(1000, 2000)).await;
        let workers = server.workers();
        if draws.one_of(&workers).is_some_and(|&pid| signal(pid, "KILL").is_ok()) {
            killed += 1;
        }
    }
    killed
}

async fn all_serve(server: &Server) -> Option<()> {
    let metrics = server.metrics().await.ok()?;
    let mut ready = metrics.lines().filter(|line| line.starts_with("shoal_replica_ready{"));
    ready.all(|line| line.ends_with(" 1")).then_some(())
}

#[tokio::test]
async fn case_1_forty_requests_get_the_references_text_while_stages_of_either_replica_are_killed() {
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let server = Arc::new(two_replicas(&[]).await);
    let requests = BEGINNINGS.iter().cycle().take(40).enumerate().map(|(i, beginning)| {
        let (prompt, tokens) = (format!("({i}) {beginning}"), 24 + (i as u32 % 5) * 10);
        let body = json!({
            "prompt": prompt, "temperature": 0, "max_tokens": tokens, "stream_options": { "include_usage": true },
        });
        (prompt, tokens, body)
    });
    let asked: Vec<_> = requests.collect();
    let answers = futures::stream::iter(asked.clone()).map(|(_, _, body)| {
        let server = Arc::clone(&server);
        async move { answer(&server, body).await }
    });
    let answering = answers.buffered(8).collect::<Vec<_>>();
    let killing = kill_stages(&server, 1);
    tokio::pin!(answering, killing);
    let mut killed = None;
    let answers = loop {
        tokio::select! {
            answers = &mut answering => break answers,
            kills = &mut killing, if killed.is_none() => killed = Some(kills),
        }
    };
    for ((prompt, tokens, _), answer) in asked.iter().zip(&answers) {
        let expected = reference.greedy_text(prompt, *tokens as usize).unwrap();
        assert_eq!(answer.text, expected, "prompt {prompt:?}");
        let counted = answer.usage["completion_tokens"].as_u64().unwrap();
        assert!(counted == u64::from(*tokens) || answer.finish_reason == "stop", "{}", answer.usage);
        assert_eq!(answer.timings["predicted_n"], counted);
    }
    let metrics = server.metrics().await.unwrap();
    let replays = sample(&metrics, "shoal_replays_total").unwrap();
    assert!(replays > 0.0, "no kill met a request");
    let generations: f64 = ["stop", "length"]
        .iter()
        .filter_map(|end| sample(&metrics, &format!("shoal_generations_total{{end=\"{end}\"}}")))
        .sum();
    assert_eq!(generations, 40.0, "{metrics}");
}

#[tokio::test]
async fn seeded_sampling_and_grammars_go_on_after_all_replicas_were_lost_as_if_nothing_had_been() {
    let mut server = Server::start("SmolLM2", TWO_REPLICAS).await.unwrap();
    let schema = json!({
        "type": "object", "required": ["name", "age", "town"], "additionalProperties": false,
        "properties": { "name": { "type": "string" }, "age": { "type": "integer" }, "town": { "type": "string" } },
    });
    let usage = json!({ "include_usage": true });
    for body in [
        json!({ "prompt": "My day began", "temperature": 0.9, "seed": 7, "max_tokens": 60, "repeat_penalty": 1.2,
                "stream_options": usage }),
        json!({ "prompt": "A person as JSON:", "temperature": 0.7, "seed": 3, "max_tokens": 60,
                "json_schema": schema, "stream_options": usage }),
    ] {
        let undisturbed = answer(&server, body.clone()).await;
        let before = replays(&server).await;
        let mut stream = EventStream::open(&server, "/v1/completions", body).await.unwrap();
        let mut text = String::new();
        for _ in 0..8 {
            let event = stream.next_json().await.unwrap().unwrap();
            text += event["choices"][0]["text"].as_str().unwrap_or_default();
        }
        for pid in server.workers() {
            signal(pid, "KILL").unwrap();
        }
        let (rest, reason) = stream.text().await.unwrap();
        assert_eq!(text + &rest, undisturbed.text);
        assert_eq!(reason, undisturbed.finish_reason);
        assert!(replays(&server).await > before, "the kill met the request");
        server.wait_ready(READY_DEADLINE).await.unwrap();
    }
}

/// A server both of whose replicas serve; its API is ready with one.
async fn two_replicas(more: &[&str]) -> Server {
    let server = Server::start("SmolLM2", &[TWO_REPLICAS, more].concat()).await.unwrap();
    eventually("both replicas", READY_DEADLINE, async || server.ready_replicas(2).await).await.unwrap();
    server
}

async fn replays(server: &Server) -> f64 {
    sample(&server.metrics().await.unwrap(), "shoal_replays_total").unwrap()
}

#[tokio::test]
async fn case_5_requests_of_a_frozen_stage_go_on_on_the_other_replica() {
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let server = two_replicas(&[]).await;
    let body =
        |prompt: &str| json!({ "prompt": prompt, "temperature": 0, "max_tokens": 150, "ignore_eos": true });
    let prompts = &BEGINNINGS[..4];
    let asking = prompts.iter().map(|prompt| answer(&server, body(prompt)));
    let asking = futures::future::join_all(asking);
    let freezing = async {
        eventually("tokens", Duration::from_secs(20), async || {
            (sample(&server.metrics().await.ok()?, "shoal_generated_tokens_total")? > 20.0).then_some(())
        })
        .await
        .unwrap();
        let frozen = server.workers()[1];
        signal(frozen, "STOP").unwrap();
        // Three seconds by the heartbeats' numbers, and one for a busy test machine.
        eventually("the frozen stage to be noticed", Duration::from_secs(4), async || {
            let (_, ready) = server.ready().await.ok()?;
            let replicas = ready["replicas"].as_array()?;
            replicas.iter().any(|replica| replica["status"] != "ready").then_some(())
        })
        .await
        .unwrap();
    };
    let (answers, ()) = tokio::join!(asking, freezing);
    for (prompt, answer) in prompts.iter().zip(answers) {
        // The reference stops where the model ends, which the request ignores.
        let expected = reference.greedy_text(prompt, 150).unwrap();
        assert!(answer.text.starts_with(&expected), "{prompt:?}: {:?} is not {expected:?}", answer.text);
    }
    assert!(replays(&server).await > 0.0, "the frozen stage had requests");
}

#[tokio::test]
async fn a_lost_replica_leaves_the_api_ready_and_is_told_of() {
    let server = two_replicas(&["--json"]).await;
    assert_eq!(server.workers().len(), 4);
    signal(server.workers()[0], "KILL").unwrap();
    eventually("the loss to be told", Duration::from_secs(5), async || server.ready_replicas(1).await)
        .await
        .unwrap();
    eventually("its return", READY_DEADLINE, async || server.ready_replicas(2).await).await.unwrap();
    let events: Vec<Value> =
        server.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let of = |event: &str, replica: u64| {
        events.iter().filter(|e| e["event"] == event && e["replica"] == replica).count()
    };
    let downs = of("down", 0) + of("down", 1);
    assert_eq!(downs, 1, "{events:?}");
    assert_eq!(of("ready", 0) + of("ready", 1), 3, "{events:?}");
}
