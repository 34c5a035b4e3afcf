//! Hosts of a Lan that join without being told where: by mDNS over the bridge, and by what their several interfaces say.

use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tests::lan::{Host, HostSpec, Lan};
use tests::node::Node;
use tests::process::{eventually, shoal_binary};
use tests::server::Server;

const SOON: Duration = Duration::from_secs(40);

/// An orchestrator on a host, and what its commands need.
pub(crate) struct Orchestrator<'a> {
    host: &'a Host,
    pub(crate) server: Server,
    state: TempDir,
}

impl<'a> Orchestrator<'a> {
    pub(crate) fn start(host: &'a Host, args: &[&str]) -> Self {
        let state = TempDir::new().unwrap();
        let folder = state.path().to_str().unwrap();
        let common = [
            "--state",
            folder,
            "--cluster-listen",
            "[::]:8471",
            "--slots",
            "1",
            "--ctx",
            "128",
            "--threads",
            "1",
        ];
        let server =
            Server::run(host.command(shoal_binary().unwrap()), "glassllm", &[&common[..], args].concat())
                .unwrap();
        Self { host, server, state }
    }

    /// A command of its, whatever comes of it.
    pub(crate) fn try_run(&self, args: &[&str]) -> Output {
        let mut command = self.host.command(shoal_binary().unwrap());
        command.arg("--state").arg(self.state.path()).args(args).output().unwrap()
    }

    fn run(&self, args: &[&str]) -> Vec<u8> {
        let output = self.try_run(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    pub(crate) async fn until(&self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let what = format!("node {name} to be as wanted");
        let node = eventually(&what, SOON, async || {
            let mut command = self.host.command(shoal_binary().unwrap());
            let list = command
                .arg("--state")
                .arg(self.state.path())
                .args(["node", "list", "--json"])
                .output()
                .ok()?;
            let nodes: Value = serde_json::from_slice(&list.stdout).ok()?;
            nodes.as_array()?.iter().find(|node| node["name"] == name && wanted(node)).cloned()
        });
        node.await.unwrap_or_else(|error| panic!("{error}\n{}", self.server.log()))
    }
}

pub(crate) fn node_on(host: &Host, state: &TempDir, args: &[&str]) -> Node {
    let mut command: Command = host.command(shoal_binary().unwrap());
    command.arg("--state").arg(state.path()).args(["node", "--name", host.name()]).args(args);
    Node::launch(command).unwrap()
}

#[tokio::test]
async fn a_host_without_a_token_asks_and_is_let_in_once_the_code_that_it_shows_was_approved() {
    let Some(lan) = Lan::with_hosts(&["boss", "desk", "mac"]).build_or_skip().unwrap() else { return };
    let orchestrator = Orchestrator::start(lan.host("boss"), &[]);
    let (desk_state, mac_state) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut desk = node_on(lan.host("desk"), &desk_state, &[]);
    let pending = desk.event("pending").await.unwrap();
    let waits = orchestrator.until("desk", |node| node["state"] == "pending").await;
    assert_eq!((&waits["code"], &waits["id"]), (&pending["code"], &pending["id"]));
    // A restart changes neither its id nor its code.
    assert!(desk.interrupt(SOON).await.unwrap().success());
    let mut desk = node_on(lan.host("desk"), &desk_state, &[]);
    assert_eq!(desk.event("pending").await.unwrap()["code"], pending["code"]);
    assert!(desk.events("listening").is_empty(), "it serves before it is let in");

    let mut mac = node_on(lan.host("mac"), &mac_state, &[]);
    mac.event("pending").await.unwrap();
    orchestrator.run(&["node", "approve", waits["id"].as_str().unwrap()]);
    desk.event("reached").await.unwrap();
    orchestrator.until("desk", |node| node["state"] == "approved" && node["reached"].is_string()).await;
    assert!(mac.events("joined").is_empty(), "one was approved, and the other let in");
    orchestrator.run(&["node", "remove", "mac"]);
    assert!(!mac.wait_exit(SOON).await.unwrap().success());
    assert!(mac.log().contains("removed"), "{}", mac.log());
}

#[tokio::test]
async fn where_every_host_is_let_in_one_without_a_token_is_a_member_at_once_and_one_elsewhere_hears_nothing()
{
    let spec = Lan::builder()
        .host(HostSpec::new("boss").network("lan"))
        .host(HostSpec::new("desk").network("lan"))
        .host(HostSpec::new("far").network("elsewhere"));
    let Some(lan) = spec.build_or_skip().unwrap() else { return };
    let orchestrator = Orchestrator::start(lan.host("boss"), &["--auto-approve"]);
    let (desk_state, far_state) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut desk = node_on(lan.host("desk"), &desk_state, &[]);
    let mut far = node_on(lan.host("far"), &far_state, &[]);
    desk.event("reached").await.unwrap();
    orchestrator.until("desk", |node| node["state"] == "approved").await;
    far.event("no_orchestrator").await.unwrap();
    assert!(far.events("asking").is_empty());
}

// Field case 27.
#[tokio::test]
async fn case_27_of_a_nodes_addresses_the_orchestrator_keeps_the_one_that_it_reaches_and_a_token_leads_to_a_boss_with_many()
 {
    let docker = ("172.17.0.1".parse().unwrap(), 16);
    let vpn = ("10.99.0.7".parse().unwrap(), 24);
    let spec = Lan::builder()
        .host(HostSpec::new("boss").island("wg0", &[vpn]).network("lan").island("docker0", &[docker]))
        .host(HostSpec::new("desk").network("other").network("lan").island("docker0", &[docker]));
    let Some(lan) = spec.build_or_skip().unwrap() else { return };
    let (boss, desk_host) = (lan.host("boss"), lan.host("desk"));
    let mut orchestrator = Orchestrator::start(boss, &["--no-announce"]);
    eventually("the cluster port", SOON, async || {
        let ready = std::fs::read_dir(orchestrator.state.path().join("cluster")).ok()?;
        ready.flatten().any(|file| file.file_name() == "cluster.db").then_some(())
    })
    .await
    .unwrap();
    // The port's own addresses are in the token as soon as it listens.
    let token = eventually("a token with all addresses", SOON, async || {
        let created: Value =
            serde_json::from_slice(&orchestrator.run(&["token", "create", "--json"])).ok()?;
        let addresses = created["addresses"].to_string();
        (addresses.contains("10.99.0.7") && addresses.contains(&boss.address().to_string()))
            .then_some(created)
    });
    let token = token.await.unwrap()["token"].as_str().unwrap().to_owned();
    let state = TempDir::new().unwrap();
    let mut desk = node_on(desk_host, &state, &["--bind", "[::]:8470", "--join", &token]);
    let reached = desk.event("reached").await.unwrap();
    let on_lan = desk_host.address_on("lan").unwrap().to_string();
    assert_eq!(reached["address"], format!("{on_lan}:8470"), "{reached}");
    let kept = orchestrator.until("desk", |node| node["reached"].is_string()).await;
    assert_eq!(kept["reached"], reached["address"]);
    assert!(kept["addresses"].as_array().unwrap().len() >= 4, "{kept}");

    // When the boss reaches it nowhere, both say so.
    assert!(desk.interrupt(SOON).await.unwrap().success());
    let mut desk = node_on(desk_host, &state, &["--bind", "[::]:8470", "--advertise", "10.123.0.1:8470"]);
    let unreachable = desk.event("unreachable").await.unwrap();
    assert!(unreachable["reason"].as_str().unwrap().contains("10.123.0.1"), "{unreachable}");
    assert!(orchestrator.server.interrupt(SOON).await.unwrap().success());
}
