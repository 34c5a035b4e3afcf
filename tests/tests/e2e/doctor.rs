//! `shoal doctor`: what it says of a cluster that serves, of one that does not, and of a host on which nothing runs.

use std::net::TcpListener;
use std::time::Duration;

use serde_json::Value;
use tests::cluster::Cluster;
use tests::process::{eventually, signal};
use tests::server::{READY_DEADLINE, Server, free_port};

const SOON: Duration = Duration::from_secs(30);

/// Whether it found nothing that fails, and what it found.
fn doctor(cluster: &Cluster, args: &[&str]) -> (bool, Vec<Value>) {
    let output = cluster.command().unwrap().args(["doctor", "--json"]).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    (output.status.success(), report["checks"].as_array().unwrap().clone())
}

fn verdict<'a>(checks: &'a [Value], subject: &str, check: &str) -> (&'a str, String) {
    let found = checks.iter().find(|line| line["subject"] == subject && line["check"] == check);
    let found = found.unwrap_or_else(|| panic!("no {subject}: {check} in {checks:#?}"));
    (found["verdict"].as_str().unwrap(), format!("{} {}", found["found"], found["remedy"]))
}

#[tokio::test]
async fn a_cluster_is_well_until_one_of_its_nodes_is_gone() {
    let cluster = Cluster::new().unwrap();
    let own = cluster.serve_args();
    let args = ["--cluster", "--stages", "2", "--slots", "1", "--ctx", "128", "--threads", "1"];
    let args: Vec<&str> = own.iter().map(String::as_str).chain(args).collect();
    let mut server = Server::launch("glassllm", &args).unwrap();
    eventually("the API", SOON, async || server.ready().await.ok()).await.unwrap();
    let (_a, mut b) = (cluster.join("a").await.unwrap(), cluster.join("b").await.unwrap());
    server.wait_ready(READY_DEADLINE).await.unwrap();
    for name in ["a", "b"] {
        let runs = |node: &Value| node["present"]["running"].as_array().is_some_and(|runs| runs.len() == 1);
        cluster.until(&server, name, runs).await.unwrap();
    }
    let url = server.url("");
    let (well, checks) = doctor(&cluster, &["--server", &url, "-m", "glassllm", "--stages", "2"]);
    for (subject, check) in [
        ("this host", "model"),
        ("the orchestrator", "serving"),
        ("node a", "attends"),
        ("node a", "build"),
        ("node a", "memory"),
        ("node b", "reached"),
        ("node b", "clock"),
        ("node b", "large packets"),
        ("path a → b", "reached"),
        ("path b → a", "reached"),
    ] {
        assert_eq!(verdict(&checks, subject, check).0, "ok", "{checks:#?}");
    }
    // How full the disk of the machine is that the test runs on is not for the test to say.
    assert_eq!(
        well,
        !checks.iter().any(|line| line["verdict"] == "fail" && line["check"] != "disk"),
        "{checks:#?}"
    );

    signal(b.pid(), "KILL").unwrap();
    b.wait_exit(SOON).await.unwrap();
    cluster.until(&server, "b", |node| node["present"].is_null()).await.unwrap();
    eventually("the loss to be told", SOON, async || {
        (!server.ready().await.ok()?.0.is_success()).then_some(())
    })
    .await
    .unwrap();
    let (well, checks) = doctor(&cluster, &["--server", &url]);
    assert!(!well);
    let (serving, why) = verdict(&checks, "the orchestrator", "serving");
    assert!(serving == "fail" && why.contains("stage 1"), "{why}");
    let (away, why) = verdict(&checks, "node b", "attends");
    assert!(away == "fail" && why.contains("last seen at") && why.contains("shoal node remove"), "{why}");
    assert_eq!(verdict(&checks, "node a", "reached").0, "ok");
}

#[test]
fn where_nothing_runs_it_says_what_is_at_the_port_and_whether_the_model_could_be_served() {
    let cluster = Cluster::new().unwrap();
    let url = format!("http://127.0.0.1:{}", free_port().unwrap());
    let (well, checks) = doctor(&cluster, &["--server", &url, "-m", "glassllm"]);
    let (serving, why) = verdict(&checks, "the orchestrator", "serving");
    assert!(!well && serving == "fail" && why.contains("the port is free"), "{why}");
    assert_eq!(verdict(&checks, "this host", "model").0, "ok");
    assert_eq!(verdict(&checks, "this host", "memory").0, "ok");

    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", other.local_addr().unwrap());
    // One that says nothing would be waited for; this one hangs up.
    let answering = std::thread::spawn(move || drop(other.accept()));
    let (_, checks) = doctor(&cluster, &["--server", &url, "-m", "no-such-model"]);
    answering.join().unwrap();
    assert_eq!(verdict(&checks, "the orchestrator", "serving").0, "fail");
    let (model, why) = verdict(&checks, "this host", "model");
    assert!(model == "fail" && why.contains("no model named"), "{why}");
    let text = cluster.command().unwrap().args(["doctor", "--server", &url]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("FAIL  the orchestrator: serving: ") && text.contains("1 failed"), "{text}");
}
