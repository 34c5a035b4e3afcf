//! Processes die, freeze and are interrupted: what the client and the operator see.

use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::Value;
use tests::chat::{EventStream, chat_text, greedy};
use tests::process::{eventually, is_alive, signal};
use tests::server::{READY_DEADLINE, Server};

const THREE_STAGES: &[&str] = &["--stages", "3", "--slots", "2", "--ctx", "1024"];

/// Requests whose replica is lost are not waited for.
const IMPATIENT: &[&str] = &["--stages", "3", "--slots", "2", "--ctx", "1024", "--replay-timeout", "0"];

/// Starts a long stream, does `harm` to the workers after a few tokens, and gives the stream's last event and
/// how long after the harm it came.
async fn last_event_after(server: &Server, harm: impl FnOnce(&[u32])) -> (Option<Value>, Duration) {
    let mut body = greedy("Count from one to one thousand in words.", 900);
    body["ignore_eos"] = true.into();
    let mut stream = EventStream::open(server, "/v1/chat/completions", body).await.unwrap();
    for _ in 0..4 {
        stream.next_json().await.unwrap().unwrap();
    }
    harm(&server.workers());
    let since = Instant::now();
    let mut last = None;
    while let Some(event) = stream.next_json().await.unwrap() {
        last = Some(event);
    }
    (last, since.elapsed())
}

async fn assert_lost_and_back(server: &mut Server, harm: impl FnOnce(&[u32]), limit: Duration) {
    let before = chat_text(server, "Say hello.", 12).await.unwrap();
    let (last, after) = last_event_after(server, harm).await;
    let error = last.expect("an event")["error"].clone();
    assert!(!error.is_null(), "the stream ends with an error event");
    assert!(after < limit, "the error came after {after:?}");
    server.wait_ready(READY_DEADLINE).await.unwrap();
    assert_eq!(chat_text(server, "Say hello.", 12).await.unwrap(), before);
}

#[tokio::test]
async fn case_1_a_killed_stage_ends_streams_that_may_not_wait_with_an_error_and_comes_back() {
    let mut server = Server::start("SmolLM2", IMPATIENT).await.unwrap();
    for victim in 0..3 {
        let kill = |workers: &[u32]| {
            assert_eq!(workers.len(), 3);
            signal(workers[victim], "KILL").unwrap();
        };
        assert_lost_and_back(&mut server, kill, Duration::from_secs(5)).await;
    }
}

#[tokio::test]
async fn case_5_a_frozen_stage_is_found_by_deadline_and_replaced() {
    let mut server = Server::start("SmolLM2", IMPATIENT).await.unwrap();
    let freeze = |workers: &[u32]| signal(workers[1], "STOP").unwrap();
    assert_lost_and_back(&mut server, freeze, Duration::from_secs(10)).await;
}

#[tokio::test]
async fn a_patient_server_bears_with_a_stage_that_stalls() {
    let server = Server::start("SmolLM2", &[IMPATIENT, &["--peer-timeout", "60"]].concat()).await.unwrap();
    let workers = server.workers();
    // For longer than the three seconds after which it would be lost.
    let stall = |workers: &[u32]| {
        signal(workers[1], "STOP").unwrap();
        std::thread::sleep(Duration::from_secs(5));
        signal(workers[1], "CONT").unwrap();
    };
    let (last, _) = last_event_after(&server, stall).await;
    let last = last.expect("an event");
    assert!(last["error"].is_null(), "{last}");
    assert_eq!(server.workers(), workers, "no stage was restarted");
}

#[tokio::test]
async fn case_2_a_replica_without_stages_is_not_ready_and_refuses_at_once() {
    let mut server = Server::start("SmolLM2", THREE_STAGES).await.unwrap();
    for pid in server.workers() {
        signal(pid, "KILL").unwrap();
    }
    let reason = eventually("/ready to be withdrawn", Duration::from_secs(5), async || {
        let (status, body) = server.ready().await.ok()?;
        (status == StatusCode::SERVICE_UNAVAILABLE).then_some(body)
    })
    .await
    .unwrap();
    assert!(reason.to_string().contains("stage"), "the reason names a stage: {reason}");
    server.wait_ready(READY_DEADLINE).await.unwrap();
    assert!(!chat_text(&server, "Say hello.", 8).await.unwrap().is_empty());
}

#[tokio::test]
async fn ctrl_c_ends_the_server_and_leaves_no_child() {
    let mut server = Server::start("SmolLM2", THREE_STAGES).await.unwrap();
    let workers = server.workers();
    assert_eq!(workers.len(), 3);
    let status = server.interrupt(Duration::from_secs(10)).await.unwrap();
    assert!(status.success(), "{status}: {}", server.log());
    assert!(!workers.iter().any(|&pid| is_alive(pid)), "{}", server.log());
}

#[tokio::test]
async fn a_killed_server_leaves_no_child() {
    let mut server = Server::start("SmolLM2", THREE_STAGES).await.unwrap();
    let workers = server.workers();
    signal(server.pid(), "KILL").unwrap();
    server.wait_exit(Duration::from_secs(5)).await.unwrap();
    eventually("the workers' end", Duration::from_secs(10), async || {
        (!workers.iter().any(|&pid| is_alive(pid))).then_some(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn case_8_garbage_on_a_stage_port_disturbs_nothing() {
    let server = Server::start("SmolLM2", THREE_STAGES).await.unwrap();
    let before = chat_text(&server, "Say hello.", 16).await.unwrap();
    let workers = server.workers();
    let ports: Vec<u16> = workers.iter().flat_map(|&pid| listening_ports(pid)).collect();
    assert_eq!(ports.len(), 3, "one port per stage: {ports:?}");
    for &port in &ports {
        for garbage in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], b"\x16\x03\x01\x00\x05hello", &noise()] {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            // The server may close while we write; that is its right.
            let _ = stream.write_all(garbage);
        }
    }
    assert_eq!(chat_text(&server, "Say hello.", 16).await.unwrap(), before);
    assert_eq!(server.workers(), workers, "no stage was restarted");
    let lines = server.log().lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).count();
    assert!(lines < 20, "log lines are limited:\n{}", server.log());
}

#[tokio::test]
async fn case_19_a_client_that_disconnects_frees_its_slot() {
    let server = Server::start("SmolLM2", &["--stages", "2", "--slots", "1", "--ctx", "2048"]).await.unwrap();
    let mut body = greedy("Tell me a very long story.", 1500);
    body["ignore_eos"] = true.into();
    let mut running = EventStream::open(&server, "/v1/chat/completions", body.clone()).await.unwrap();
    running.next_json().await.unwrap();
    // Waits in the queue, then leaves it.
    let queued = tokio::time::timeout(
        Duration::from_millis(300),
        EventStream::open(&server, "/v1/completions", greedy("never answered", 4)),
    )
    .await;
    drop(queued);
    drop(running);
    let start = Instant::now();
    assert!(!chat_text(&server, "Say hello.", 8).await.unwrap().is_empty());
    assert!(start.elapsed() < Duration::from_secs(20), "the slot was not freed");
}

#[tokio::test]
async fn case_9_a_request_after_a_cancelled_one_sees_none_of_it() {
    let server = Server::start("SmolLM2", &["--stages", "3", "--slots", "1", "--ctx", "1024"]).await.unwrap();
    let clean = chat_text(&server, "Name a fruit.", 24).await.unwrap();
    for _ in 0..4 {
        let mut stream =
            EventStream::open(&server, "/v1/chat/completions", greedy("Name a fruit and a city.", 200))
                .await
                .unwrap();
        stream.next_json().await.unwrap();
        drop(stream);
        assert_eq!(chat_text(&server, "Name a fruit.", 24).await.unwrap(), clean);
    }
}

/// TCP ports a process listens on.
fn listening_ports(pid: u32) -> Vec<u16> {
    let output = Command::new("ss").args(["-Hltnp"]).output().unwrap();
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| line.contains(&format!("pid={pid},")))
        .filter_map(|line| line.split_whitespace().nth(3)?.rsplit(':').next()?.parse().ok())
        .collect()
}

/// A megabyte that is no protocol.
fn noise() -> Vec<u8> {
    let mut state = 1_u64;
    (0..1 << 20)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect()
}
