//! `/metrics` of a server that runs.

use std::time::Duration;

use serde_json::json;
use tests::chat::{EventStream, chat_text, greedy};
use tests::process::eventually;
use tests::server::{Server, sample};

/// Every block and the head take a millisecond: what matters is that steps are set against it.
fn profiles() -> serde_json::Value {
    let flat = json!({ "rows": [1], "ms": [1.0] });
    json!({ "profiles": [{
        "device": "here", "model": "SmolLM2-135M-Instruct.Q4_1", "runtime": "any", "hop_overhead_ms": 0.1,
        "buffers": { "prefill_bytes": 0, "decode_bytes": 0 },
        "cpu": {
            "head": flat,
            "blocks": [{
                "attention": { "type": "full" }, "feed_forward": "dense", "decode": flat, "prefill": flat,
            }],
        },
    }] })
}

#[tokio::test]
async fn counters_move_with_a_chat_and_steps_are_set_against_the_profile() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profiles.json");
    std::fs::write(&file, profiles().to_string()).unwrap();
    let server =
        Server::start("SmolLM2", &["--stages", "2", "--ctx", "512", "--profiles", file.to_str().unwrap()])
            .await
            .unwrap();
    let before = server.metrics().await.unwrap();
    assert_eq!(sample(&before, "shoal_ready"), Some(1.0));
    assert_eq!(sample(&before, "shoal_generated_tokens_total"), Some(0.0));
    let answer = chat_text(&server, "Tell me about the herring.", 64).await.unwrap();
    assert!(!answer.is_empty());
    // The agent looks a few times a second.
    let seen = eventually("the stages' steps", Duration::from_secs(20), async || {
        let text = server.metrics().await.unwrap();
        let decode = |stage| {
            format!("shoal_stage_predicted_compute_seconds_total{{stage=\"{stage}\",phase=\"decode\"")
        };
        (0..2).all(|stage| sample(&text, &decode(stage)).is_some()).then_some(text)
    });
    let after = seen.await.unwrap();
    assert!(sample(&after, "shoal_generated_tokens_total").unwrap() > 3.0);
    assert_eq!(sample(&after, "shoal_time_to_first_token_seconds_count"), Some(1.0));
    assert_eq!(sample(&after, "shoal_slots"), Some(4.0));
    for stage in 0..2 {
        let of = |name: &str| {
            sample(&after, &format!("shoal_stage_{name}{{stage=\"{stage}\",phase=\"decode\"")).unwrap()
        };
        let (steps, predicted) = (of("steps_total"), of("predicted_compute_seconds_total"));
        // A millisecond for each block and for the head, which is as heavy as a third of the blocks.
        let each = if stage == 0 { 0.022 } else { 0.009 };
        assert!((predicted / steps / each - 1.0).abs() < 1e-6, "{predicted} s of {steps} steps");
        assert!(of("compute_seconds_total") > 0.0);
        let resident =
            sample(&after, &format!("shoal_stage_resident_memory_bytes{{stage=\"{stage}\"")).unwrap();
        assert!(resident > 1e7, "{resident}");
    }
    assert!(!after.contains("herring"));
}

#[tokio::test]
async fn a_scrape_is_answered_while_every_slot_is_busy() {
    let server = Server::start("SmolLM2", &["--stages", "2", "--slots", "2", "--ctx", "1024"]).await.unwrap();
    let mut streams = Vec::new();
    for i in 0..4 {
        let body = greedy(&format!("Write a long story, number {i}."), 400);
        streams.push(EventStream::open(&server, "/v1/chat/completions", body).await.unwrap());
    }
    let busy = eventually("busy slots", Duration::from_secs(20), async || {
        let text = server.metrics().await.unwrap();
        let is = |name, value| sample(&text, name) == Some(value);
        (is("shoal_active_slots", 2.0) && is("shoal_queued_requests", 2.0) && is("shoal_open_requests", 4.0))
            .then_some(())
    });
    busy.await.unwrap();
    // A scrape has a deadline of its own.
    for _ in 0..20 {
        server.metrics().await.unwrap();
    }
    drop(streams);
}

#[tokio::test]
async fn profiles_of_another_model_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profiles.json");
    std::fs::write(&file, profiles().to_string().replace("SmolLM2-135M-Instruct.Q4_1", "whale-7B")).unwrap();
    let mut server = Server::launch("SmolLM2", &["--profiles", file.to_str().unwrap()]).unwrap();
    let status = server.wait_exit(Duration::from_secs(20)).await.unwrap();
    assert_eq!(status.code(), Some(1), "{}", server.log());
    assert!(server.log().contains("whale-7B") && server.log().contains("SmolLM2"), "{}", server.log());
}
