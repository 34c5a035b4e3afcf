//! Hosts that join a cluster: with which tokens, as whom, and what happens to those that may not.

use std::net::TcpStream;
use std::time::Duration;

use reqwest::StatusCode;
use serde_json::Value;
use tests::cluster::Cluster;
use tests::node::{Node, Trust, links};
use tests::process::{eventually, listening_ports, shoal_binary, signal};
use tests::server::{READY_DEADLINE, Server};

const MODEL: &str = "glassllm";

/// What every server here is asked for: little.
const SMALL: [&str; 6] = ["--slots", "1", "--ctx", "128", "--threads", "1"];

const SOON: Duration = Duration::from_secs(20);

fn event_kinds(events: &Value) -> Vec<&str> {
    events["data"].as_array().unwrap().iter().map(|event| event["kind"].as_str().unwrap()).collect()
}

/// Lines of a log that tell of refused hosts.
fn refusals(server: &Server) -> Vec<String> {
    server.log().lines().filter(|line| line.contains("was refused")).map(str::to_owned).collect()
}

/// A node that is started, and must not come to listen; what it said.
async fn refused(cluster: &Cluster, name: &str, token: &str) -> String {
    let mut command = cluster.node_command(name).unwrap();
    command.args(["--join", token]);
    let mut node = Node::launch(command).unwrap();
    let status = node.wait_exit(SOON).await.unwrap();
    assert!(!status.success() && node.events("listening").is_empty(), "{}", node.log());
    node.log()
}

#[tokio::test]
async fn a_host_joins_with_a_token_and_is_the_same_node_after_a_restart_without_one() {
    let cluster = Cluster::new().unwrap();
    let server = cluster.serve(MODEL, &SMALL).await.unwrap();
    let mut node = cluster.join("desk").await.unwrap();
    let there = |node: &Value| node["present"]["address"].is_string();
    let first = cluster.until(&server, "desk", there).await.unwrap();
    assert_eq!((&first["state"], &first["version"]), (&"approved".into(), &env!("CARGO_PKG_VERSION").into()));
    assert!(first["present"]["devices"].as_array().is_some_and(|devices| !devices.is_empty()), "{first}");
    assert!(first["certificate_expires"].is_string(), "{first}");

    // It is missed as soon as its process is gone, and is the same node when it is back, with no token.
    signal(node.pid(), "KILL").unwrap();
    node.wait_exit(SOON).await.unwrap();
    cluster.until(&server, "desk", |node| node["present"].is_null()).await.unwrap();
    let mut node = Node::launch(cluster.node_command("desk").unwrap()).unwrap();
    node.event("reached").await.unwrap();
    let second = cluster.until(&server, "desk", there).await.unwrap();
    assert_eq!(second["id"], first["id"]);
    let nodes = cluster.admin(&server, "/admin/v1/nodes").await.unwrap();
    assert_eq!(nodes["data"].as_array().unwrap().len(), 1, "{nodes}");
    assert!(node.events("joined").is_empty(), "it joined twice");

    // The token that it was started with may stay where it is, and does nothing.
    assert!(node.interrupt(SOON).await.unwrap().success());
    let uses = |cluster: &Cluster| cluster.json(&["token", "list"]).unwrap()[0]["uses"].clone();
    assert_eq!(uses(&cluster), 1);
    let node = cluster.join("desk").await.unwrap();
    assert!(node.events("joined").is_empty());
    let tokens = cluster.json(&["token", "list"]).unwrap();
    let uses: u64 = tokens.as_array().unwrap().iter().map(|token| token["uses"].as_u64().unwrap()).sum();
    assert_eq!(uses, 1, "{tokens}");
    let events = cluster.admin(&server, "/admin/v1/events").await.unwrap();
    let kinds = event_kinds(&events);
    for kind in ["token_made", "node_joined", "node_here", "node_away"] {
        assert!(kinds.contains(&kind), "{kind} is missing in {kinds:?}");
    }
}

// Field case 31.
#[tokio::test]
async fn case_31_wrong_expired_and_revoked_tokens_and_those_of_other_clusters_are_refused_once_and_change_nothing()
 {
    let (cluster, other) = (Cluster::new().unwrap(), Cluster::new().unwrap());
    let server = cluster.serve(MODEL, &SMALL).await.unwrap();
    let create = |args: &[&str]| {
        let address = cluster.address();
        let args = [&["token", "create", "--address", &address][..], args].concat();
        let created = cluster.json(&args).unwrap();
        (created["token"].as_str().unwrap().to_owned(), created["id"].as_str().unwrap().to_owned())
    };
    let (good, _) = create(&[]);

    // Damaged in copying: seen here, and nobody is asked.
    let output = std::process::Command::new(shoal_binary().unwrap())
        .args(["node", "--join", &good[..good.len() - 5]])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("damaged"), "{said}");

    // Of another cluster: recognised by its CA before anything secret is sent.
    let foreign = other.json(&["token", "create", "--address", &cluster.address()]).unwrap();
    let said = refused(&cluster, "a", foreign["token"].as_str().unwrap()).await;
    assert!(said.contains("belongs to another cluster"), "{said}");
    assert!(refusals(&server).is_empty(), "{}", server.log());

    // One whose secret is another's: the same cluster, but not one of its tokens.
    let guessed = with_other_secret(&good);
    let (expired, _) = create(&["--ttl", "1s"]);
    let (revoked, id) = create(&[]);
    cluster.run(&["token", "revoke", &id]).unwrap();
    eventually("the token to expire", SOON, async || {
        let tokens = cluster.json(&["token", "list"]).unwrap();
        tokens.as_array().unwrap().iter().any(|token| token["state"] == "expired").then_some(())
    })
    .await
    .unwrap();
    for (name, token, reason) in [
        ("b", &guessed, "not one of this cluster"),
        ("c", &expired, "expired at"),
        ("d", &revoked, "was revoked at"),
    ] {
        let said = refused(&cluster, name, token).await;
        assert!(said.contains(reason), "{said}");
    }
    let told = refusals(&server);
    assert_eq!(told.len(), 3, "each is logged once: {told:?}");
    let nodes = cluster.admin(&server, "/admin/v1/nodes").await.unwrap();
    assert_eq!(nodes["data"], serde_json::json!([]));
    let events = cluster.admin(&server, "/admin/v1/events").await.unwrap();
    assert_eq!(event_kinds(&events).iter().filter(|kind| **kind == "join_refused").count(), 3);

    // A host that was refused may join with a good one.
    let mut command = cluster.node_command("b").unwrap();
    command.args(["--join", &good]);
    Node::launch(command).unwrap().event("reached").await.unwrap();
}

fn with_other_secret(token: &str) -> String {
    let mut token: protocol::token::JoinToken = token.parse().unwrap();
    token.secret.0[3] ^= 0x55;
    token.to_text()
}

/// Every internal port of a cluster with a served model: the orchestrator's, a node's, and those of its workers.
#[tokio::test]
async fn a_client_without_a_certificate_gets_nowhere_on_any_internal_port() {
    use protocol::pin::{connect_as_stranger, pinned_ca, shown_ca};
    use protocol::v1;

    let cluster = Cluster::new().unwrap();
    let server = cluster.serve(MODEL, &SMALL).await.unwrap();
    let node = cluster.join("desk").await.unwrap();
    let orchestrator = cluster.address();
    let shown = shown_ca(&orchestrator).await.unwrap();
    let ca = pinned_ca(&orchestrator, shown.fingerprint).await.unwrap();

    // The orchestrator lets strangers in to join, and answers nothing else.
    let channel = connect_as_stranger(&orchestrator, &ca).await.unwrap();
    let mut membership = v1::membership_client::MembershipClient::new(channel.clone());
    let refused = membership.leave(v1::LeaveRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unauthenticated, "{refused}");
    let refused = membership.renew(v1::RenewRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unauthenticated, "{refused}");
    let nothing = tokio_stream::iter([v1::NodeWord::default()]);
    assert_eq!(membership.attend(nothing).await.unwrap_err().code(), tonic::Code::Unauthenticated);
    let mut as_node = v1::node_client::NodeClient::new(channel);
    assert_eq!(
        as_node.describe(v1::DescribeRequest {}).await.unwrap_err().code(),
        tonic::Code::Unimplemented
    );

    // A node and a worker do not get past the handshake with who shows nothing, nor with who is of another cluster.
    let workers = listening_ports(&server.workers()).unwrap();
    assert_eq!(workers.len(), 1, "the model has one stage here");
    let other = Trust::found().unwrap();
    let stranger = other.issue("x").unwrap();
    for port in workers.into_iter().chain([node.port()]) {
        let address = format!("127.0.0.1:{port}");
        let described = match connect_as_stranger(&address, &ca).await {
            Ok(channel) => {
                v1::node_client::NodeClient::new(channel).describe(v1::DescribeRequest {}).await.map(drop)
            }
            Err(error) => Err(tonic::Status::unauthenticated(error.to_string())),
        };
        assert!(described.is_err(), "port {port} answered a stranger");
        let args = ["--node", &address, "--node", &node.address(), "--n-embd", "64"];
        let command = std::process::Command::new(shoal_binary().unwrap());
        let (ok, _, said) = links(command, &stranger, &args).await.unwrap();
        assert!(!ok && said.contains("0 could be connected to"), "{said}");
    }
    // None of it has changed anything.
    assert_eq!(server.ready().await.unwrap().0, StatusCode::OK);
    cluster.until(&server, "desk", |node| node["present"]["address"].is_string()).await.unwrap();
    assert_eq!(cluster.json(&["node", "list"]).unwrap().as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn certificates_are_renewed_while_a_node_works_and_none_of_its_work_ends() {
    let cluster = Cluster::new().unwrap();
    let server = cluster.serve(MODEL, &[&SMALL[..], &["--certificate-ttl", "12s"]].concat()).await.unwrap();
    let mut node = cluster.join("desk").await.unwrap();
    let there = |node: &Value| node["present"]["address"].is_string();
    let before = cluster.until(&server, "desk", there).await.unwrap();
    // Past the first certificate's life, over renewals at half of it.
    eventually("three renewals", Duration::from_secs(60), async || {
        (node.events("certificate_renewed").len() >= 3).then_some(())
    })
    .await
    .unwrap();
    let after = cluster.until(&server, "desk", there).await.unwrap();
    assert_eq!(before["present"]["since"], after["present"]["since"], "its stream was ended");
    assert!(node.events("away").is_empty(), "{}", node.log());
    // What it kept is good: it is known after a restart.
    assert!(node.interrupt(SOON).await.unwrap().success());
    let mut node = Node::launch(cluster.node_command("desk").unwrap()).unwrap();
    node.event("reached").await.unwrap();
}

#[tokio::test]
async fn a_node_that_was_off_for_longer_than_its_certificate_was_good_comes_back_and_one_that_was_removed_does_not()
 {
    let cluster = Cluster::new().unwrap();
    let args = [&SMALL[..], &["--certificate-ttl", "10s"]].concat();
    let server = cluster.serve(MODEL, &args).await.unwrap();
    let mut node = cluster.join("desk").await.unwrap();
    assert!(node.interrupt(SOON).await.unwrap().success());
    let expires =
        cluster.json(&["node", "list"]).unwrap()[0]["certificate_expires"].as_str().unwrap().to_owned();
    eventually("the certificate to expire", Duration::from_secs(30), async || {
        let output = std::process::Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"]).output().ok()?;
        (String::from_utf8(output.stdout).ok()?.trim() > expires.as_str()).then_some(())
    })
    .await
    .unwrap();
    let mut node = Node::launch(cluster.node_command("desk").unwrap()).unwrap();
    node.event("reached").await.unwrap();
    cluster.until(&server, "desk", |node| node["present"]["address"].is_string()).await.unwrap();

    cluster.run(&["node", "remove", "desk"]).unwrap();
    assert!(!node.wait_exit(SOON).await.unwrap().success());
    assert!(node.log().contains("removed"), "{}", node.log());
    cluster.until(&server, "desk", |node| node["state"] == "left").await.unwrap();
    let mut node = Node::launch(cluster.node_command("desk").unwrap()).unwrap();
    assert!(!node.wait_exit(SOON).await.unwrap().success(), "it came back by itself");
}

#[tokio::test]
async fn a_node_leaves_by_itself_and_is_a_stranger_then_whether_it_runs_or_not() {
    let cluster = Cluster::new().unwrap();
    let mut server = cluster.serve(MODEL, &SMALL).await.unwrap();
    let leave = |name: &str, args: &[&str]| {
        let mut command = std::process::Command::new(shoal_binary().unwrap());
        command.arg("--state").arg(cluster.node_state(name)).args(["node", "leave"]).args(args);
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let states = || {
        let nodes = cluster.json(&["node", "list"]).unwrap();
        let state = |node: &Value| (node["id"].to_string(), node["state"].as_str().unwrap().to_owned());
        nodes.as_array().unwrap().iter().map(state).collect::<Vec<_>>()
    };
    // While it runs: it ends.
    let mut desk = cluster.join("desk").await.unwrap();
    let (done, said) = leave("desk", &[]);
    assert!(done && said.contains("desk left the cluster"), "{said}");
    assert!(!desk.wait_exit(SOON).await.unwrap().success());
    assert_eq!(states()[0].1, "left");
    let (done, said) = leave("desk", &[]);
    assert!(!done && said.contains("is no member of a cluster"), "{said}");
    let events = cluster.admin(&server, "/admin/v1/events").await.unwrap();
    assert_eq!(event_kinds(&events).iter().filter(|kind| **kind == "node_left").count(), 1);

    // With a token it comes back, as another node.
    let mut desk = cluster.join("desk").await.unwrap();
    let after = states();
    assert!(after.len() == 2 && after[0].0 != after[1].0, "{after:?}");
    // While it does not run, and although it was removed already.
    assert!(desk.interrupt(SOON).await.unwrap().success());
    cluster.run(&["node", "remove", "desk"]).unwrap();
    let (done, said) = leave("desk", &[]);
    assert!(done && said.contains("had no place for this host any more"), "{said}");

    // Without the orchestrator only if it must be.
    let mut mac = cluster.join("mac").await.unwrap();
    assert!(mac.interrupt(SOON).await.unwrap().success());
    assert!(server.interrupt(SOON).await.unwrap().success());
    let (done, said) = leave("mac", &[]);
    assert!(!done && said.contains("cannot be reached") && said.contains("--forget"), "{said}");
    assert!(cluster.node_state("mac").join("node/member.json").exists());
    let (done, said) = leave("mac", &["--forget"]);
    assert!(done && said.contains("is not told"), "{said}");
    assert!(!cluster.node_state("mac").join("node/member.json").exists());
}

#[tokio::test]
async fn an_orchestrator_that_comes_back_finds_its_nodes_and_tokens() {
    let cluster = Cluster::new().unwrap();
    let mut server = cluster.serve(MODEL, &SMALL).await.unwrap();
    let token = cluster.token().unwrap();
    let mut node = cluster.join("desk").await.unwrap();
    signal(server.pid(), "KILL").unwrap();
    server.wait_exit(SOON).await.unwrap();
    node.event("away").await.unwrap();
    let server = cluster.serve(MODEL, &SMALL).await.unwrap();
    cluster.until(&server, "desk", |node| node["present"]["address"].is_string()).await.unwrap();
    let mut command = cluster.node_command("mac").unwrap();
    command.args(["--join", &token]);
    let mut mac = Node::launch(command).unwrap();
    mac.event("reached").await.unwrap();
    assert_eq!(cluster.json(&["node", "list"]).unwrap().as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_the_reason() {
    let cluster = Cluster::new().unwrap();
    let refusal = |args: &[&str]| {
        let output = cluster.command().unwrap().args(args).output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    for args in [&["node", "list"][..], &["token", "list"], &["node", "approve", "desk"]] {
        let (_, said) = refusal(args);
        assert!(said.contains("there is no cluster in"), "{said}");
    }
    assert!(!cluster.state().join("cluster").exists(), "looking founds no cluster");
    cluster.token().unwrap();
    for args in [&["node", "approve", "desk"][..], &["node", "remove", "desk"], &["token", "revoke", "00"]] {
        let (code, said) = refusal(args);
        assert!(code == 2 && said.contains("there is no"), "{said}");
    }
    let (code, said) = refusal(&["token", "create", "--ttl", "soon"]);
    assert!(code == 2 && said.contains("soon"), "{said}");
    // Nobody listens there.
    let said = refused(&cluster, "a", &cluster.token().unwrap()).await;
    assert!(said.contains("no orchestrator of the token's cluster was found"), "{said}");

    let server = cluster.serve(MODEL, &SMALL).await.unwrap();
    let node = cluster.join("a").await.unwrap();
    // The state folder is one process's.
    let said = refused(&cluster, "a", &cluster.token().unwrap()).await;
    assert!(said.contains("another shoal node uses"), "{said}");
    // A port that something else listens at is no orchestrator.
    let elsewhere = cluster.json(&["token", "create", "--address", &node.address()]).unwrap();
    let said = refused(&cluster, "b", elsewhere["token"].as_str().unwrap()).await;
    assert!(said.contains("is no orchestrator"), "{said}");
    assert!(TcpStream::connect(cluster.address()).is_ok());
    let mut second =
        Server::launch(MODEL, &cluster.serve_args().iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    assert!(!second.wait_exit(READY_DEADLINE).await.unwrap().success());
    assert!(second.log().contains("cannot listen on"), "{}", second.log());
    drop(server);
}
