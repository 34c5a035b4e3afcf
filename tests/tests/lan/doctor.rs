//! `shoal doctor` where the network is at fault: large packets that are lost on the way, and a path that is cut.

use std::process::Stdio;

use serde_json::Value;
use tempfile::TempDir;
use tests::lan::{Host, Lan};

use crate::joining::{Orchestrator, node_on};

/// Lets a host lose what it sends in large packets, and tell nobody: as behind a tunnel that drops ICMP.
fn lose_large_packets(host: &Host) {
    use std::io::Write;
    let mut nft = host.command("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    let rules = "table inet mtu {\n chain out {\n type filter hook output priority 0; policy accept;\n \
                 oifname \"eth0\" meta length > 1300 drop\n }\n}\n";
    nft.stdin.take().unwrap().write_all(rules.as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success());
}

fn doctor(orchestrator: &Orchestrator<'_>) -> Vec<Value> {
    let url = format!("http://127.0.0.1:{}", orchestrator.server.port());
    let output = orchestrator.try_run(&["doctor", "--json", "--server", &url]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["checks"].as_array().unwrap().clone()
}

fn failed<'a>(checks: &'a [Value], subject: &str) -> Vec<&'a str> {
    let ours = checks.iter().filter(|line| line["subject"] == subject && line["verdict"] == "fail");
    ours.map(|line| line["check"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_path_that_loses_large_packets_is_told_from_one_that_is_cut() {
    let Some(lan) = Lan::with_hosts(&["boss", "a", "b"]).build_or_skip().unwrap() else { return };
    let orchestrator = Orchestrator::start(lan.host("boss"), &["--auto-approve"]);
    let states = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let mut nodes = [node_on(lan.host("a"), &states[0], &[]), node_on(lan.host("b"), &states[1], &[])];
    for node in &mut nodes {
        node.event("reached").await.unwrap();
    }
    let checks = doctor(&orchestrator);
    for subject in ["node a", "node b", "path a → b", "path b → a"] {
        assert_eq!(failed(&checks, subject), [""; 0], "{checks:#?}");
    }
    lan.cut_pair("a", "b").unwrap();
    let checks = doctor(&orchestrator);
    assert_eq!(
        (failed(&checks, "path a → b"), failed(&checks, "path b → a")),
        (vec!["reached"], vec!["reached"])
    );
    assert_eq!(failed(&checks, "node a"), [""; 0], "{checks:#?}");
    lan.heal().unwrap();
    lose_large_packets(lan.host("b"));
    let checks = doctor(&orchestrator);
    assert_eq!(failed(&checks, "node b"), ["large packets"], "{checks:#?}");
    assert_eq!(failed(&checks, "node a"), [""; 0], "{checks:#?}");
}
