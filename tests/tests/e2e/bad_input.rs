//! Bad input gets a clear error, the process stays up, and nothing else is disturbed.

use std::fs;
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tests::chat::{EventStream, chat_text, greedy};
use tests::models::{SMOLLM2, model_path};
use tests::process::shoal_binary;
use tests::server::Server;

/// Exit code and standard error of a `shoal` command.
fn shoal(args: &[&str]) -> (i32, String) {
    let output = Command::new(shoal_binary().unwrap()).args(args).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_file_that_is_no_gguf_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nonsense.gguf");
    fs::write(&path, b"not a model at all").unwrap();
    let (code, stderr) = shoal(&["serve", "-m", path.to_str().unwrap()]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("nonsense.gguf") && stderr.contains("magic"), "{stderr}");
}

#[test]
fn a_truncated_model_is_refused_with_offset_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("short.gguf");
    let whole = fs::read(model_path(SMOLLM2).unwrap()).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let (code, stderr) = shoal(&["slice", "info", path.to_str().unwrap()]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("short.gguf") && stderr.contains("offset"), "{stderr}");
}

#[test]
fn cuts_out_of_order_or_range_and_too_many_stages_are_refused() {
    for args in [&["--cuts", "20,10"][..], &["--cuts", "30"], &["--cuts", "0,10"], &["--stages", "31"]] {
        let (code, stderr) = shoal(&[&["serve", "-m", "SmolLM2"], args].concat());
        assert_ne!(code, 0, "{args:?}");
        assert!(stderr.contains("30"), "{args:?} names the model's 30 blocks: {stderr}");
    }
}

#[test]
fn roles_and_cuts_that_are_not_those_of_the_replicas_are_refused() {
    for (args, named) in [
        (&["--replicas", "2", "--roles", "prefill"][..], "--roles is given for 1 replicas, but there are 2"),
        (&["--roles", "prefill,decode"], "--roles is given for 2 replicas, but there are 1"),
        (&["--replicas", "2", "--roles", "prefill,cook"], "cook"),
        (&["--cuts", "10", "--cuts", "20"], "--cuts is given for 2 replicas, but there are 1"),
        (&["--cuts", "10,x"], "x"),
    ] {
        let (code, stderr) = shoal(&[&["serve", "-m", "SmolLM2"], args].concat());
        assert_eq!(code, 2, "{args:?}: {stderr}");
        assert!(stderr.contains(named), "{args:?}: {stderr}");
    }
}

#[test]
fn a_port_in_use_is_named() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap().to_string();
    let (code, stderr) = shoal(&["serve", "-m", "SmolLM2", "--listen", &address]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains(&address), "{stderr}");
}

#[test]
fn case_13_a_context_that_does_not_fit_memory_is_refused_with_both_numbers() {
    let (code, stderr) = shoal(&["serve", "-m", "SmolLM2", "--slots", "256", "--ctx", "8192"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("GiB") && stderr.contains("available"), "{stderr}");
}

#[test]
fn bad_usage_exits_with_2() {
    for args in [
        &["serve"][..],
        &["slice", "cut", "-m"],
        &["frobnicate"],
        &["serve", "-m", "SmolLM2", "--slots", "0"],
    ] {
        assert_eq!(shoal(args).0, 2, "{args:?}");
    }
}

#[test]
fn a_model_name_nobody_has_is_refused_with_the_folder_searched() {
    let (code, stderr) = shoal(&["serve", "-m", "NoSuchModel"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("NoSuchModel") && stderr.contains("models"), "{stderr}");
}

#[tokio::test]
async fn bad_requests_are_refused_in_openais_shape_and_the_server_goes_on() {
    let server = Server::start("SmolLM2", &["--stages", "2", "--slots", "2", "--ctx", "256"]).await.unwrap();
    let before = chat_text(&server, "Say hello.", 8).await.unwrap();
    let message = |role: &str| json!([{ "role": role, "content": "hi" }]);
    let long = "word ".repeat(400);
    let cases: Vec<(Value, &str)> = vec![
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": message("wizard") }), "wizard"),
        (json!({ "messages": message("user"), "max_tokens": 0 }), "max_tokens"),
        (json!({ "messages": message("user"), "max_tokens": -3 }), "max_tokens"),
        (json!({ "messages": message("user"), "max_tokens": 100_000 }), "256"),
        (json!({ "messages": message("user"), "n": 2 }), "n"),
        (json!({ "messages": message("user"), "best_of_breed": 1 }), "best_of_breed"),
        (json!({ "messages": message("user"), "temperature": -1 }), "temperature"),
        (json!({ "messages": [{ "role": "user", "content": long }] }), "context_length_exceeded"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }] }),
            "image",
        ),
        (json!({ "prompt": "no messages" }), "messages"),
    ];
    for (body, expected) in cases {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = stream.into();
            let (status, answer) = server.post("/v1/chat/completions", &body).await.unwrap();
            assert_eq!(status, StatusCode::BAD_REQUEST, "{body} → {answer}");
            let error = &answer["error"];
            assert!(error["message"].is_string() && error["type"].is_string(), "{answer}");
            assert!(answer.to_string().contains(expected), "{body} → {answer}");
        }
    }
    assert_eq!(chat_text(&server, "Say hello.", 8).await.unwrap(), before);
}

#[tokio::test]
async fn bodies_that_are_too_large_not_utf8_or_not_json_are_refused() {
    let server = Server::start("SmolLM2", &["--ctx", "256"]).await.unwrap();
    let post = async |body: Vec<u8>| {
        let request = server.client().post(server.url("/v1/chat/completions"));
        let reply = request.header("content-type", "application/json").body(body).send().await.unwrap();
        (reply.status(), reply.json::<Value>().await.unwrap())
    };
    let large = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(12 << 20));
    let (status, answer) = post(large.into_bytes()).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "{answer}");
    for body in [&b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}"[..], b"{", b""] {
        let (status, answer) = post(body.to_vec()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
    let reply = server.client().get(server.url("/v1/nonsense")).send().await.unwrap();
    assert_eq!(reply.status(), StatusCode::NOT_FOUND);
    assert!(reply.json::<Value>().await.unwrap()["error"]["message"].is_string());
}

#[tokio::test]
async fn case_20_a_prompt_longer_than_the_slot_is_refused_with_both_numbers() {
    let server = Server::start("SmolLM2", &["--ctx", "256"]).await.unwrap();
    let body = greedy(&"word ".repeat(400), 16);
    let error = EventStream::open(&server, "/v1/chat/completions", body).await.err().unwrap().to_string();
    assert!(error.starts_with("400"), "{error}");
    assert!(
        error.contains("context_length_exceeded") && error.contains("256") && error.contains("4"),
        "{error}"
    );
}

#[tokio::test]
async fn case_25_a_full_queue_answers_503_with_retry_after() {
    let args = ["--stages", "2", "--slots", "1", "--queue", "1", "--ctx", "2048"];
    let server = Server::start("SmolLM2", &args).await.unwrap();
    let mut body = greedy("Tell me a very long story.", 1500);
    body["ignore_eos"] = true.into();
    let mut running = EventStream::open(&server, "/v1/chat/completions", body.clone()).await.unwrap();
    running.next_json().await.unwrap();
    let queued = EventStream::open(&server, "/v1/chat/completions", body.clone());
    let (_queued, refused) = tokio::join!(tokio::time::timeout(Duration::from_secs(3), queued), async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let request = server.client().post(server.url("/v1/chat/completions"));
        request.json(&body).send().await.unwrap()
    });
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers().contains_key("retry-after"));
}

#[tokio::test]
async fn case_24_generation_that_reaches_the_slots_end_finishes_with_length_and_others_go_on() {
    let server = Server::start("SmolLM2", &["--slots", "2", "--ctx", "256"]).await.unwrap();
    let mut endless = greedy("Count without end.", 250);
    endless["ignore_eos"] = true.into();
    let short = greedy("Say hello.", 8);
    let (endless, short) = tokio::join!(
        EventStream::open(&server, "/v1/chat/completions", endless),
        server.post("/v1/chat/completions", &short)
    );
    assert_eq!(endless.unwrap().text().await.unwrap().1, "length");
    assert_eq!(short.unwrap().0, StatusCode::OK);
}

#[tokio::test]
async fn case_26_health_answers_at_once_while_every_slot_is_in_prefill() {
    let server = Server::start("SmolLM2", &["--stages", "2", "--slots", "2", "--ctx", "4096"]).await.unwrap();
    let body = greedy(&"lorem ipsum dolor ".repeat(300), 4);
    let busy = futures::future::join_all((0..2).map(|_| server.post("/v1/chat/completions", &body)));
    let probe = async {
        for _ in 0..10 {
            let health = server.client().get(server.url("/health")).send();
            let reply = tokio::time::timeout(Duration::from_secs(1), health).await.expect("in time").unwrap();
            assert_eq!(reply.status(), StatusCode::OK);
        }
    };
    let (answers, ()) = tokio::join!(busy, probe);
    for answer in answers {
        let (status, body) = answer.unwrap();
        assert_eq!(status, StatusCode::OK, "{body}");
    }
}
