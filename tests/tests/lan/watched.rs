//! `shoal serve` over hosts of a Lan: that its links are measured again when they change while it serves. It waits for as long
//! as the policy does (`node/src/links/watch.rs`), and measures a slow link under load: some 40 s.

use std::time::Duration;

use serde_json::Value;
use tests::chat::{EventStream, greedy};
use tests::lan::{Host, Lan, LinkShape};
use tests::node::cluster_on;
use tests::process::eventually;
use tests::server::{Server, sample};

/// Half a minute more than it takes on an idle machine.
const SURVEYED: Duration = Duration::from_secs(60);

/// The surveys of links that the server told of, in order.
fn surveys(server: &Server) -> Vec<Value> {
    let log = server.log();
    let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == "links").collect()
}

async fn survey(server: &Server, nth: usize) -> Value {
    let outcome = eventually("a survey of the links", SURVEYED, async || surveys(server).get(nth).cloned());
    outcome.await.unwrap_or_else(|error| panic!("{error}\n{}", server.log()))
}

/// Rate and latency of both links.
fn links(survey: &Value) -> Vec<(f64, f64)> {
    let links = survey["links"].as_array().unwrap().iter();
    links.map(|link| (link["mbit_per_s"].as_f64().unwrap(), link["one_way_ms"].as_f64().unwrap())).collect()
}

async fn gauge(server: &Server, name: &str) -> Option<f64> {
    sample(&server.metrics().await.ok()?, name)
}

/// Runs a test's work on a host, where its server is.
fn on<T: Send>(host: &Host, work: impl AsyncFnOnce() -> T + Send) -> T {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    host.inside(|| runtime().block_on(work())).unwrap()
}

#[test]
fn a_link_that_became_slow_under_a_replica_is_measured_again_and_answers_go_on() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    lan.shape("a", "b", LinkShape::E2LLM).unwrap();
    on(lan.host("a"), async || {
        let (trust, _nodes, addresses) = cluster_on(&[lan.host("a"), lan.host("b")]).await.unwrap();
        let me = trust.issue("me").unwrap();
        let args = ["--slots", "2", "--ctx", "4096", "--threads", "1", "--json", "--node", &addresses];
        let args = [&args[..], &["--identity", me.to_str().unwrap()]].concat();
        let server = Server::start("SmolLM2", &args).await.unwrap();
        let before = survey(&server, 0).await;
        assert_eq!((&before["cause"], links(&before).len()), (&"start".into(), 2), "{before}");

        let slow = LinkShape::new(20.0, Duration::from_millis(10));
        lan.shape("a", "b", slow).unwrap();
        let mut story = greedy("Tell a long story.", 3000);
        story["ignore_eos"] = true.into();
        let mut story = EventStream::open(&server, "/v1/chat/completions", story).await.unwrap();
        let mut tokens = 0;
        let after = async {
            let after = survey(&server, 1).await;
            // Steps are looked at against the new figures.
            let foretold = eventually("a prediction by the new figures", SURVEYED, async || {
                gauge(&server, "shoal_step_hops_predicted_seconds").await.filter(|&seconds| seconds > 0.008)
            });
            foretold.await.unwrap();
            after
        };
        tokio::pin!(after);
        let after = loop {
            tokio::select! {
                after = &mut after => break after,
                event = story.next_json() => match event.unwrap() {
                    Some(event) => {
                        assert!(event["error"].is_null(), "{event}");
                        tokens += 1;
                    }
                    None => panic!("the story ended after {tokens} tokens: {}", server.log()),
                },
            }
        };
        eprintln!("{before}\n{after}\n{tokens} tokens meanwhile");
        assert!(tokens > 100, "{tokens} tokens");
        assert_eq!(after["cause"], "hops");
        let (observed, predicted) = (&after["observed_hops_ms"], &after["predicted_hops_ms"]);
        assert!(observed.as_f64().unwrap() > 10.0 && predicted.as_f64().unwrap() < 10.0, "{after}");
        for (mbit, one_way) in links(&after) {
            assert!((15.0..=22.0).contains(&mbit) && (4.5..=8.0).contains(&one_way), "{after}");
        }
        let recent = gauge(&server, "shoal_step_hops_recent_seconds").await.unwrap();
        assert!(recent > 0.01, "{recent}");
    });
}
