//! A replica whose stages run on nodes: its text, and what happens when workers, nodes or the server go.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use reqwest::StatusCode;
use serde_json::json;
use tests::chat::{EventStream, chat_text, greedy};
use tests::models::{SMOLLM2, model_path};
use tests::node::{Node, Trust};
use tests::process::{eventually, is_alive, shoal_binary, signal};
use tests::reference::Reference;
use tests::server::{READY_DEADLINE, Server, sample};

const SOON: Duration = Duration::from_secs(20);

/// Two nodes, and the arguments with which `shoal serve` uses them.
struct Pair {
    trust: Trust,
    a: Node,
    b: Node,
    args: Vec<String>,
}

impl Pair {
    async fn start() -> Self {
        let trust = Trust::found().unwrap();
        let me = trust.issue("me").unwrap();
        let a = Node::start(&trust.issue("a").unwrap(), &[]).await.unwrap();
        let b = Node::start(&trust.issue("b").unwrap(), &[]).await.unwrap();
        let args = ["--slots", "2", "--ctx", "512", "--threads", "1", "--identity", me.to_str().unwrap()];
        let nodes = format!("{},{}", a.address(), b.address());
        let args = args.iter().chain(&["--node", &nodes]).map(ToString::to_string).collect();
        Self { trust, a, b, args }
    }

    fn args(&self) -> Vec<&str> {
        self.args.iter().map(String::as_str).collect()
    }
}

async fn gone(pids: &[u32]) {
    let all_gone = async || pids.iter().all(|&pid| !is_alive(pid)).then_some(());
    eventually("the workers' end", SOON, all_gone).await.unwrap();
}

#[tokio::test]
async fn two_nodes_give_the_whole_models_text_and_stop_their_workers_with_the_server() {
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let mut pair = Pair::start().await;
    let mut server = Server::start("SmolLM2", &pair.args()).await.unwrap();
    assert!(server.workers().is_empty(), "a stage runs beside the server");
    for prompt in ["The capital of France is", "def fibonacci(n):", "Le chat est sur la"] {
        let body = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 32 });
        let stream = EventStream::open(&server, "/v1/completions", body).await.unwrap();
        assert_eq!(stream.text().await.unwrap().0, reference.greedy_text(prompt, 32).unwrap(), "{prompt:?}");
    }
    let workers = [pair.a.workers(), pair.b.workers()].concat();
    assert_eq!(workers.len(), 2, "one stage on each");
    assert!(server.interrupt(SOON).await.unwrap().success());
    gone(&workers).await;

    // A server that dies without a word is missed by its nodes, and a node that stops takes its workers along.
    let mut server = Server::start("SmolLM2", &pair.args()).await.unwrap();
    let of_a = pair.a.workers();
    signal(server.pid(), "KILL").unwrap();
    server.wait_exit(SOON).await.unwrap();
    gone(&[of_a, pair.b.workers()].concat()).await;
    let server = Server::start("SmolLM2", &pair.args()).await.unwrap();
    let of_b = pair.b.workers();
    assert!(pair.b.interrupt(SOON).await.unwrap().success());
    gone(&of_b).await;
    drop(server);
}

#[tokio::test]
async fn a_worker_is_replaced_and_a_node_that_went_away_is_used_again_when_it_is_back() {
    let mut pair = Pair::start().await;
    let mut server = Server::start("SmolLM2", &pair.args()).await.unwrap();
    let before = chat_text(&server, "Say hello.", 12).await.unwrap();

    let counted = greedy("Count from one to one thousand in words.", 60);
    let (_, undisturbed) = server.post("/v1/chat/completions", &counted).await.unwrap();
    let mut stream = EventStream::open(&server, "/v1/chat/completions", counted).await.unwrap();
    let begun = stream.next_json().await.unwrap().unwrap();
    signal(pair.b.workers()[0], "KILL").unwrap();
    let (rest, _) = stream.text().await.unwrap();
    let text = begun["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned() + &rest;
    assert_eq!(text, undisturbed["choices"][0]["message"]["content"].as_str().unwrap());
    server.wait_ready(READY_DEADLINE).await.unwrap();
    assert_eq!(chat_text(&server, "Say hello.", 12).await.unwrap(), before);

    // Field case 4: the node comes back as the same node, at the same address.
    let (pid, address) = (pair.b.pid(), pair.b.address());
    let workers = pair.b.workers();
    signal(pid, "KILL").unwrap();
    let reason = eventually("/ready to say that the node is away", SOON, async || {
        let (status, body) = server.ready().await.ok()?;
        let told = status == StatusCode::SERVICE_UNAVAILABLE && body.to_string().contains("stage 1");
        told.then(|| body.to_string())
    });
    assert!(reason.await.unwrap().contains("stage 1"));
    gone(&workers).await;
    let identity = pair.trust.folder().join("b.json");
    pair.b = node_at(&address, &identity).await;
    server.wait_ready(READY_DEADLINE).await.unwrap();
    assert_eq!(chat_text(&server, "Say hello.", 12).await.unwrap(), before);
}

#[tokio::test]
async fn a_replica_on_each_node_serves_and_when_one_node_is_gone_the_other_does() {
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let mut pair = Pair::start().await;
    let identity = pair.trust.folder().join("me.json");
    let identity = ["--identity", identity.to_str().unwrap()];
    let (a, b) = (pair.a.address(), pair.b.address());
    let args = ["--ctx", "512", "--threads", "1", "--replica", &a, "--replica", &b];
    let server = Server::start("SmolLM2", &[&identity[..], &args].concat()).await.unwrap();
    let ready = async |n: usize| {
        let (status, body) = server.ready().await.ok()?;
        let replicas = body["replicas"].as_array()?;
        let ready = replicas.iter().filter(|replica| replica["status"] == "ready").count();
        (status == StatusCode::OK && replicas.len() == 2 && ready == n).then_some(())
    };
    eventually("both replicas", READY_DEADLINE, async || ready(2).await).await.unwrap();
    assert_eq!((pair.a.workers().len(), pair.b.workers().len()), (1, 1));

    let prompt = "The capital of France is";
    let body = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 40 });
    let expected = reference.greedy_text(prompt, 40).unwrap();
    let asked = futures::future::join_all((0..4).map(|_| server.post("/v1/completions", &body)));
    let stopped = async {
        eventually("tokens", SOON, async || {
            (sample(&server.metrics().await.ok()?, "shoal_generated_tokens_total")? > 8.0).then_some(())
        })
        .await
        .unwrap();
        pair.b.interrupt(SOON).await.unwrap();
    };
    let (answers, ()) = tokio::join!(asked, stopped);
    for answer in answers {
        let (status, body) = answer.unwrap();
        assert_eq!(status, StatusCode::OK, "{body}");
        assert_eq!(body["choices"][0]["text"], expected.as_str());
    }
    eventually("the loss to be told", SOON, async || ready(1).await).await.unwrap();

    for args in [
        &["--replica", "a,b", "--cuts", "10,20"][..],
        &["--replica", "a", "--node", "b"],
        &["--replica", "a", "--replicas", "2"],
        &["--node", "a", "--replicas", "2"],
    ] {
        let mut server = Server::launch("SmolLM2", &[&identity[..], args].concat()).unwrap();
        let status = server.wait_exit(SOON).await.unwrap();
        assert_eq!(status.code(), Some(2), "{args:?}: {}", server.log());
    }
}

async fn node_at(address: &str, identity: &Path) -> Node {
    let mut command = Command::new(shoal_binary().unwrap());
    command.args(["node", "--bind", address]);
    Node::run(command, identity, &[]).await.unwrap()
}

#[tokio::test]
async fn nodes_that_cannot_serve_say_why() {
    let pair = Pair::start().await;
    let identity = pair.trust.folder().join("me.json");
    let refused = async |args: &[&str]| {
        let args = [&["--identity", identity.to_str().unwrap()], args].concat();
        let mut server = Server::launch("SmolLM2", &args).unwrap();
        let status = server.wait_exit(READY_DEADLINE).await.unwrap();
        (status.code().unwrap(), server.log())
    };
    let (code, log) = refused(&["--node", &pair.a.address(), "--cuts", "10,20"]).await;
    assert!(code == 2 && log.contains("3 stages"), "{log}");
    let (code, log) = refused(&["--node", "127.0.0.1:1"]).await;
    assert!(code == 1 && log.contains("127.0.0.1:1"), "{log}");
    drop(pair.b);
}

#[tokio::test]
async fn links_that_were_measured_before_are_believed_and_a_file_without_one_is_refused() {
    let pair = Pair::start().await;
    let file = pair.trust.folder().join("cluster.json");
    let path = file.to_str().unwrap();
    let link = |from, to| json!({ "from": from, "to": to, "mbit_per_s": 900.0, "one_way_ms": 40.0 });
    let write = |links: &[serde_json::Value]| {
        let cluster = json!({ "nodes": [], "links": { "measured": links } });
        std::fs::write(&file, cluster.to_string()).unwrap();
    };
    let args = [&pair.args()[..], &["--json", "--links", path]].concat();

    write(&[link("a", "b")]);
    let mut server = Server::launch("SmolLM2", &args).unwrap();
    assert_eq!(server.wait_exit(SOON).await.unwrap().code(), Some(1), "{}", server.log());
    let said = server.log();
    assert!(said.contains("the link from b to a") && said.contains("shoal links -o"), "{said}");
    let local = Server::launch("SmolLM2", &["--links", path]).unwrap().wait_exit(SOON).await.unwrap();
    assert_eq!(local.code(), Some(2), "stages of this host have no links");

    write(&[link("a", "b"), link("b", "a")]);
    let server = Server::start("SmolLM2", &args).await.unwrap();
    let mut story = greedy("Tell a story.", 400);
    story["ignore_eos"] = true.into();
    let story = EventStream::open(&server, "/v1/chat/completions", story).await.unwrap();
    let foretold = eventually("a prediction", SOON, async || {
        sample(&server.metrics().await.ok()?, "shoal_step_hops_predicted_seconds{")
    });
    let foretold = foretold.await.unwrap();
    assert!((0.08..0.081).contains(&foretold), "{foretold}");
    drop(story);
    assert!(
        !server.log().contains(r#""event":"links""#),
        "they are not measured at the start: {}",
        server.log()
    );
}
