//! A model served by nodes that joined: it waits for them, gives the whole model's text, and outlives their certificates.

use std::process::Command;
use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tests::chat::{EventStream, chat_text};
use tests::cluster::Cluster;
use tests::models::{SMOLLM2, model_path};
use tests::process::{eventually, shoal_binary, signal};
use tests::reference::Reference;
use tests::server::{READY_DEADLINE, Server};

const SOON: Duration = Duration::from_secs(30);

fn launch(cluster: &Cluster, args: &[&str]) -> Server {
    let own = cluster.serve_args();
    let common = ["--cluster", "--slots", "2", "--ctx", "512", "--threads", "1"];
    let args: Vec<&str> = own.iter().map(String::as_str).chain(common).chain(args.iter().copied()).collect();
    Server::launch("SmolLM2", &args).unwrap()
}

/// Waits until it is reached over HTTP, which is before it serves.
async fn is_up(server: &Server) {
    eventually("the API", SOON, async || server.ready().await.ok()).await.unwrap();
}

fn status(cluster: &Cluster, server: &Server) -> Value {
    let mut command = Command::new(shoal_binary().unwrap());
    command.arg("--state").arg(cluster.state()).args(["status", "--json", "--server", &server.url("")]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn a_model_waits_for_two_nodes_and_they_give_the_whole_models_text() {
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let cluster = Cluster::new().unwrap();
    let mut server = launch(&cluster, &["--stages", "2"]);
    is_up(&server).await;
    let a = cluster.join("a").await.unwrap();
    let waits = eventually("the first node to be counted", SOON, async || {
        let (status, body) = server.ready().await.ok()?;
        let told = body.to_string().contains("1 of 2");
        (status == StatusCode::SERVICE_UNAVAILABLE && told).then_some(())
    });
    waits.await.unwrap();
    let b = cluster.join("b").await.unwrap();
    server.wait_ready(READY_DEADLINE).await.unwrap();
    assert!(server.workers().is_empty(), "a stage runs beside the server");
    assert_eq!((a.workers().len(), b.workers().len()), (1, 1));
    for prompt in ["The capital of France is", "def fibonacci(n):"] {
        let body = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 24 });
        let stream = EventStream::open(&server, "/v1/completions", body).await.unwrap();
        assert_eq!(stream.text().await.unwrap().0, reference.greedy_text(prompt, 24).unwrap(), "{prompt:?}");
    }
    let runs = |node: &Value| node["present"]["running"].as_array().is_some_and(|running| running.len() == 1);
    cluster.until(&server, "a", runs).await.unwrap();
    cluster.until(&server, "b", runs).await.unwrap();
    let shown = status(&cluster, &server);
    assert_eq!(shown["ready"]["status"], "ready");
    let running = |node: usize| shown["nodes"][node]["present"]["running"][0].clone();
    assert_eq!((&running(0)["stage"], &running(1)["stage"]), (&0.into(), &1.into()), "{shown}");
    assert_eq!(running(0)["end_block"], running(1)["first_block"], "{shown}");
}

#[tokio::test]
async fn a_replica_outlives_its_nodes_certificates_and_a_stage_that_is_replaced_later_is_let_in() {
    let cluster = Cluster::new().unwrap();
    let mut server = launch(&cluster, &["--stages", "2", "--certificate-ttl", "10s"]);
    is_up(&server).await;
    let a = cluster.join("a").await.unwrap();
    let b = cluster.join("b").await.unwrap();
    server.wait_ready(READY_DEADLINE).await.unwrap();
    let before = chat_text(&server, "Say hello.", 12).await.unwrap();
    let workers = [a.workers(), b.workers()].concat();
    for node in [&a, &b] {
        eventually("three renewals", Duration::from_secs(60), async || {
            (node.events("certificate_renewed").len() >= 3).then_some(())
        })
        .await
        .unwrap();
    }
    assert_eq!(chat_text(&server, "Say hello.", 12).await.unwrap(), before);
    assert_eq!([a.workers(), b.workers()].concat(), workers, "a worker was replaced for its certificate");
    // The worker that stays takes connections with the certificate that it was given since, and makes them with it.
    signal(workers[1], "KILL").unwrap();
    eventually("another worker", SOON, async || (b.workers() != workers[1..]).then_some(())).await.unwrap();
    server.wait_ready(READY_DEADLINE).await.unwrap();
    assert_eq!(chat_text(&server, "Say hello.", 12).await.unwrap(), before);
    assert_eq!(a.workers(), workers[..1], "the other stage was replaced too");
}
