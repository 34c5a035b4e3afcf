//! Hosts that are parts of a cluster, all on this one: who is let in, what their links are measured as.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tests::models::{SMOLLM2, model_path};
use tests::node::{Node, Trust, links};
use tests::process::shoal_binary;
use tests::server::{READY_DEADLINE, Server};

fn shoal() -> Command {
    Command::new(shoal_binary().unwrap())
}

/// Numbers of a link's report that every link has.
fn assert_sound(link: &Value) {
    let number = |name: &str| link[name].as_f64().unwrap_or_else(|| panic!("no {name} in {link}"));
    assert!(number("mbit_per_s") > 10.0, "{link}");
    assert!(
        number("one_way_ms") > 0.0 && number("round_trip_median_ms") <= number("round_trip_p99_ms"),
        "{link}"
    );
    assert!(number("measurements") >= 2.0, "one measurement decided: {link}");
    let rows: Vec<u64> =
        link["frames"].as_array().unwrap().iter().map(|frame| frame["rows"].as_u64().unwrap()).collect();
    assert_eq!(rows, [1, 8, 32, 512], "{link}");
}

#[tokio::test]
async fn three_nodes_measure_all_links_and_a_stranger_is_reported_and_does_not_stop_them() {
    let trust = Trust::found().unwrap();
    let me = trust.issue("me").unwrap();
    let mut nodes = Vec::new();
    for name in ["a", "b", "c"] {
        nodes.push(Node::start(&trust.issue(name).unwrap(), &[]).await.unwrap());
    }
    let other = Trust::found().unwrap();
    let stranger = Node::start(&other.issue("z").unwrap(), &[]).await.unwrap();
    let file = trust.folder().join("cluster.json");
    let addresses = nodes.iter().chain([&stranger]).map(Node::address).collect::<Vec<_>>().join(",");
    let args = ["--node", &addresses, "--n-embd", "576", "-o", file.to_str().unwrap()];
    let (ok, report, said) = links(shoal(), &me, &args).await.unwrap();

    assert!(!ok && said.contains("1 nodes not reached"), "{said}");
    assert_eq!(report["unreachable"][0]["address"], stranger.address());
    let measured = report["links"].as_array().unwrap();
    measured.iter().for_each(assert_sound);
    let mut pairs: Vec<String> = measured
        .iter()
        .map(|link| format!("{}{}", link["from"].as_str().unwrap(), link["to"].as_str().unwrap()))
        .collect();
    pairs.sort();
    assert_eq!(pairs, ["ab", "ac", "ba", "bc", "ca", "cb"], "{report}");
    let cluster: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(cluster["nodes"].as_array().unwrap().len(), 3);
    assert_eq!(cluster["nodes"][0]["devices"][0]["name"], "a/cpu");
    assert_eq!(cluster["links"]["measured"].as_array().unwrap().len(), 6);
}

// Field case 8.
#[tokio::test]
async fn case_8_garbage_and_strangers_at_a_nodes_port_change_nothing() {
    let trust = Trust::found().unwrap();
    let me = trust.issue("me").unwrap();
    let mut a = Node::start(&trust.issue("a").unwrap(), &[]).await.unwrap();
    let b = Node::start(&trust.issue("b").unwrap(), &[]).await.unwrap();
    for garbage in
        [&b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[0x5A; 1 << 20]]
    {
        let mut stream = TcpStream::connect(a.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // The node may close before it has read everything.
        let _ = stream.write_all(garbage);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let other = Trust::found().unwrap();
    let stranger = other.issue("me").unwrap();
    let args = ["--node", &a.address(), "--node", &b.address(), "--n-embd", "64"];
    let (ok, _, said) = links(shoal(), &stranger, &args).await.unwrap();
    assert!(!ok && said.contains("0 could be connected to"), "{said}");

    let (ok, report, said) = links(shoal(), &me, &args).await.unwrap();
    assert!(ok, "{said}");
    assert_eq!(report["links"].as_array().unwrap().len(), 2);
    let refused = a.log().lines().filter(|line| line.contains("refused a connection")).count();
    assert!((1..=10).contains(&refused), "{}", a.log());
    assert!(a.interrupt(Duration::from_secs(10)).await.unwrap().success());
}

#[tokio::test]
async fn a_node_profiles_a_model_under_its_own_name_and_others_stand_for_it() {
    let trust = Trust::found().unwrap();
    let (me, cache) = (trust.issue("me").unwrap(), trust.folder().join("cache"));
    let models = model_path(SMOLLM2).unwrap();
    let folders =
        ["--cache-dir", cache.to_str().unwrap(), "--models-dir", models.parent().unwrap().to_str().unwrap()];
    let node = Node::start(&trust.issue("a").unwrap(), &folders).await.unwrap();
    let profile = |model: &str| {
        let mut command = shoal();
        command.args(["profile", "--json", "--seconds", "1", "--node", &node.address(), "-m", model]);
        command.arg("--identity").arg(&me).output().unwrap()
    };
    let measured = profile("glassllm");
    let said = String::from_utf8_lossy(&measured.stderr);
    assert!(measured.status.success(), "{said}");
    let profiles: Value = serde_json::from_slice(&measured.stdout).unwrap();
    assert_eq!(profiles["profiles"][0]["device"], "a/cpu");
    assert!(said.contains("a: "), "no progress: {said}");
    let refused = profile("no-such-model");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("no-such-model"), "{said}");

    let device = trust.folder().join("device.json");
    std::fs::write(&device, &measured.stdout).unwrap();
    let emulate = ["--emulate", device.to_str().unwrap(), "--time-scale", "0.5"];
    let b = Node::start(&trust.issue("b").unwrap(), &emulate).await.unwrap();
    let c = Node::start(&trust.issue("c").unwrap(), &emulate).await.unwrap();
    let nodes = format!("{},{}", b.address(), c.address());
    let args = ["--slots", "1", "--ctx", "128", "--identity", me.to_str().unwrap(), "--node", &nodes];
    let server = Server::start("glassllm", &args).await.unwrap();
    let body = serde_json::json!({ "prompt": "hello", "max_tokens": 8, "ignore_eos": true });
    let (status, answer) = server.post("/v1/completions", &body).await.unwrap();
    assert!(status.is_success() && answer["usage"]["completion_tokens"] == 8, "{answer}");
    let other = ["--slots", "1", "--identity", me.to_str().unwrap(), "--node", &nodes];
    let mut refused = Server::launch("SmolLM2", &other).unwrap();
    assert!(!refused.wait_exit(READY_DEADLINE).await.unwrap().success());
    assert!(refused.log().contains("it emulates a device with model"), "{}", refused.log());
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_the_reason() {
    let trust = Trust::found().unwrap();
    let (me, a) = (trust.issue("me").unwrap(), trust.issue("a").unwrap());
    let refusal = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (_, said) = refusal(shoal().args(["identity", "init"]).arg(trust.ca()));
    assert!(said.contains("exists"), "{said}");
    let (_, said) = refusal(shoal().args(["node", "--identity"]).arg(trust.ca().join("ca-key.pem")));
    assert!(said.contains("not an identity file"), "{said}");
    let node = Node::start(&a, &[]).await.unwrap();
    let (_, said) = refusal(shoal().args(["node", "--bind", &node.address(), "--identity"]).arg(&a));
    assert!(said.contains("cannot listen on 127.0.0.1"), "{said}");
    let (code, said) = refusal(shoal().args(["links", "--node", "a b", "--identity"]).arg(&me));
    assert!(code == 2 && said.contains("a b"), "{said}");
    let twice = format!("{0},{0}", node.address());
    let (_, said) = refusal(shoal().args(["links", "--node", &twice, "--identity"]).arg(&me));
    assert!(said.contains("both called a"), "{said}");
    let broken = trust.folder().join("cluster.json");
    std::fs::write(&broken, "{").unwrap();
    let (_, said) =
        refusal(shoal().args(["links", "--node", &twice, "-o"]).arg(&broken).arg("--identity").arg(&me));
    assert!(said.contains("cluster.json"), "{said}");
}
