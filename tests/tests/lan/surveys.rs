//! `shoal links` between hosts of a Lan: that links are measured as they are, that a cut one is reported, and that a host's
//! reachable address is found. The first test looks at the clock, since time is what it is about.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tests::lan::{Host, HostSpec, Lan, LinkShape};
use tests::node::{NODE_PORT, cluster_on, links};
use tests::process::shoal_binary;

/// Links that are asked for: Mbit/s and microseconds of round trip.
const SHAPES: [(f64, u64); 3] = [(920.0, 300), (100.0, 2_000), (20.0, 10_000)];

fn shoal_on(host: &Host) -> Command {
    host.command(shoal_binary().unwrap())
}

fn link<'a>(report: &'a Value, from: &str, to: &str) -> &'a Value {
    let links = report["links"].as_array().unwrap();
    links.iter().find(|link| link["from"] == from && link["to"] == to).unwrap_or(&Value::Null)
}

/// Every measured link's departure from what was asked for, if it is too large. The hosts themselves take `own_ms` of a round
/// trip: what waking up costs differs between machines.
fn misfit(report: &Value, (mbit, round_trip_us): (f64, u64), own_ms: f64) -> Option<String> {
    let misfits = report["links"].as_array().unwrap().iter().filter_map(|link| {
        let (rate, time) =
            (link["mbit_per_s"].as_f64().unwrap(), link["round_trip_median_ms"].as_f64().unwrap());
        let asked_ms = round_trip_us as f64 / 1e3;
        eprintln!("asked {mbit} Mbit/s, {asked_ms} ms: measured {rate:.1} Mbit/s, {time:.3} ms");
        let (over, tolerance) = (time - asked_ms, 0.1 + 0.1 * asked_ms);
        let fits = (rate / mbit - 1.0).abs() <= 0.07 && over >= -tolerance && over <= own_ms + tolerance;
        (!fits).then(|| format!("asked {mbit} Mbit/s, {asked_ms} ms: measured {link}"))
    });
    misfits.reduce(|a, b| a + "\n" + &b)
}

#[tokio::test]
async fn links_are_measured_as_they_are() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    let (trust, _nodes, addresses) = cluster_on(&[lan.host("a"), lan.host("b")]).await.unwrap();
    let me = trust.issue("me").unwrap();
    let measure = async |shape: (f64, u64)| {
        lan.shape("a", "b", LinkShape::new(shape.0, Duration::from_micros(shape.1))).unwrap();
        let args = ["--node", &addresses, "--n-embd", "576"];
        let (ok, report, said) = links(shoal_on(lan.host("a")), &me, &args).await.unwrap();
        assert!(ok, "{said}");
        report
    };
    let at_once = measure((SHAPES[0].0, 0)).await;
    let round_trips = at_once["links"].as_array().unwrap().iter();
    let own_ms = round_trips.map(|link| link["round_trip_median_ms"].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(own_ms < 1.0, "a link that holds nothing up takes {own_ms} ms: {at_once}");
    for shape in SHAPES {
        let measure = async || misfit(&measure(shape).await, shape, own_ms);
        // The machine may be busy: a misfit is looked at again, as in `links`.
        if let Some(first) = measure().await
            && let Some(second) = measure().await
        {
            panic!("{second}\nand before: {first}");
        }
    }
}

#[tokio::test]
async fn a_link_that_drops_in_mid_measurement_is_reported_and_the_rest_is_measured() {
    let Some(lan) = Lan::with_hosts(&["a", "b", "c"]).build_or_skip().unwrap() else { return };
    let slow = LinkShape::new(100.0, Duration::from_millis(2));
    for (a, b) in [("a", "b"), ("a", "c"), ("b", "c")] {
        lan.shape(a, b, slow).unwrap();
    }
    let (trust, _nodes, addresses) =
        cluster_on(&[lan.host("a"), lan.host("b"), lan.host("c")]).await.unwrap();
    let me = trust.issue("me").unwrap();
    let args = ["--node", &addresses, "--n-embd", "576"];
    let survey = links(shoal_on(lan.host("a")), &me, &args);
    let cut = async {
        let (before, _) = lan.forwarded_and_dropped();
        // A stream of some megabytes is under way: nobody waits for a measurement's very end.
        tests::process::eventually("a measurement to begin", Duration::from_secs(30), async || {
            let (now, _) = lan.forwarded_and_dropped();
            (now - before > 2000).then_some(())
        })
        .await
        .unwrap();
        lan.cut_pair("b", "c").unwrap();
    };
    let (outcome, ()) = tokio::join!(survey, cut);
    let (ok, report, said) = outcome.unwrap();
    assert!(!ok, "{said}");
    let mut failed: Vec<String> = report["failed"]
        .as_array()
        .unwrap()
        .iter()
        .map(|link| format!("{}{}", link["from"].as_str().unwrap(), link["to"].as_str().unwrap()))
        .collect();
    failed.sort();
    assert_eq!(failed, ["bc", "cb"], "{report}");
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")] {
        assert!(link(&report, from, to)["mbit_per_s"].as_f64().unwrap() > 50.0, "{report}");
    }
}

// Field case 27.
#[tokio::test]
async fn case_27_of_several_addresses_the_reachable_one_is_found() {
    let docker = ("172.17.0.1".parse().unwrap(), 16);
    let vpn = ("10.99.0.7".parse().unwrap(), 24);
    let spec = Lan::builder()
        .host(HostSpec::new("a").network("lan").island("docker0", &[docker]))
        .host(
            HostSpec::new("b")
                .island("wg0", &[vpn])
                .network("fast")
                .network("lan")
                .island("docker0", &[docker]),
        )
        .host(HostSpec::new("c").network("fast"));
    let Some(lan) = spec.build_or_skip().unwrap() else { return };
    let (a, b, c) = (lan.host("a"), lan.host("b"), lan.host("c"));
    let (trust, nodes, _) = cluster_on(&[a, b, c]).await.unwrap();
    let offered = nodes[1].addresses();
    assert!(offered.iter().any(|address| address.starts_with("10.99.0.7")), "{offered:?}");
    let me = trust.issue("me").unwrap();
    // From b, which knows itself by an address that nobody else reaches.
    let node = |address: std::net::IpAddr| format!("{address}:{NODE_PORT}");
    let addresses = [node(a.address()), node(vpn.0), node(c.address())].join(",");
    let (ok, report, said) =
        links(shoal_on(b), &me, &["--node", &addresses, "--n-embd", "64"]).await.unwrap();
    assert!(!ok, "a and c share no network: {said}");
    let reached =
        |from: &str, to: &str| link(&report, from, to)["address"].as_str().unwrap_or_default().to_owned();
    assert_eq!(reached("a", "b"), node(b.address_on("lan").unwrap()), "{report}");
    assert_eq!(reached("c", "b"), node(b.address_on("fast").unwrap()), "{report}");
    assert_eq!(report["failed"].as_array().unwrap().len(), 2, "{report}");
}
