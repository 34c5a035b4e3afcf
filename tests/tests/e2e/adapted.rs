//! What runs follows what is asked for: roles flip by themselves when prompts become short and answers long.

use std::time::Duration;

use tests::emulated::{DeviceSpeed, EmulatedCluster};
use tests::process::eventually;
use tests::shifted::{Half, send};

const SOON: Duration = Duration::from_secs(20);

/// Ten times as fast as a laptop.
const SPEED: DeviceSpeed = DeviceSpeed { prefill: 4000.0, tpot_ms: [4.0, 5.0] };

#[tokio::test]
async fn when_answers_become_long_a_prefill_replica_decodes_and_the_reason_is_told() {
    let soon = ["--adapt-after", "1s", "--adapt-rest", "1s", "--adapt-window", "20s"];
    let bed = EmulatedCluster::start(&["prefill", "prefill", "decode"], SPEED, &soon).await.unwrap();
    let workers = || -> Vec<Vec<u32>> { bed.nodes.iter().map(tests::node::Node::workers).collect() };
    let before = workers();
    let halves = [
        Half { requests: 30, rate: 8.0, prompt: 600, answer: 8 },
        Half { requests: 44, rate: 8.0, prompt: 40, answer: 160 },
    ];
    // All answers are whole, whoever's role flips under them.
    send(&bed.server, &halves).await.unwrap();
    let adapted = async || bed.events(&["adapted"]).await.ok()?.into_iter().next();
    let adapted = eventually("an adaptation", SOON, adapted)
        .await
        .unwrap_or_else(|e| panic!("{e}: {}", bed.server.log()));
    let flips = adapted["facts"]["flips"].as_array().unwrap();
    assert!(flips.iter().any(|flip| flip["from"] == "prefill"), "{adapted}");
    let [now, then] = ["now", "then"].map(|when| adapted["facts"][when]["max_wait_s"].as_f64().unwrap());
    assert!(now > then, "{adapted}");
    let left = bed.events(&["workload_left"]).await.unwrap();
    assert!(left[0]["text"].as_str().unwrap().contains("were planned for"), "{left:?}");
    // A plan of its own, which loads nothing.
    let deployment = bed.deployment().await.unwrap();
    assert!(deployment["plan"].as_u64().unwrap() > 1 && deployment["reached"] == true, "{deployment}");
    // By now there may have been another decision.
    let mut history = deployment["history"].as_array().unwrap().iter();
    let decision = history.find(|decision| decision["reason"] == adapted["text"]);
    let decision = decision.unwrap_or_else(|| panic!("{adapted} is not in {deployment}"));
    assert!(decision["reason"].as_str().unwrap().contains("from prefill to"), "{deployment}");
    assert_eq!(workers(), before, "stages were loaded again");
    let plans = bed.cluster.admin(&bed.server, "/admin/v1/plans").await.unwrap();
    assert_eq!(plans["data"][0]["origin"], "adapted");
    let workload = bed.cluster.admin(&bed.server, "/admin/v1/workload").await.unwrap();
    assert_eq!(workload["adaptation"]["mode"], "roles", "{workload}");
    let metrics = bed.server.metrics().await.unwrap();
    let decided = tests::server::sample(&metrics, "shoal_adaptations_total{decision=\"roles\"}");
    assert!(decided.is_some_and(|decided| decided >= 1.0), "{metrics}");
    let server = bed.server.url("");
    let status = bed.cluster.run(&["status", "--server", server.trim_end_matches('/')]).unwrap();
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(shown.contains("requests/s") && shown.contains("(--adapt roles)"), "{shown}");
}
