//! Hosts: addresses, commands, congestion control.

use std::net::IpAddr;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use tests::lan::{HostSpec, Lan};

use crate::traffic::{connect, silent, talk};

/// A process joins its host within milliseconds; on a busy machine, seconds.
const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn two_hosts_talk_over_ipv4_and_ipv6() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    let (a, b) = (lan.host("a"), lan.host("b"));
    for (from, to) in [(a, b), (b, a)] {
        assert!(talk(from, to, to.address()));
        assert!(talk(from, to, to.address6()));
    }
}

#[test]
fn streams_are_controlled_by_cubic_at_both_ends() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    let (a, b) = (lan.host("a"), lan.host("b"));
    for address in [b.address(), b.address6()] {
        let (near, far) = connect(a, b, address);
        for end in [&near, &far] {
            assert_eq!(rustix::net::sockopt::tcp_congestion(end).unwrap(), "cubic", "{address}");
        }
    }
}

#[test]
fn a_host_with_several_addresses_is_reached_at_those_of_shared_networks_only() {
    let docker: (IpAddr, u8) = ("172.17.0.1".parse().unwrap(), 16);
    let vpn: (IpAddr, u8) = ("fd99::1".parse().unwrap(), 64);
    let spec = Lan::builder()
        .host(HostSpec::new("a").network("lan").island("docker0", &[docker]))
        .host(
            HostSpec::new("b")
                .network("lan")
                .network("fast")
                .island("docker0", &[docker])
                .island("wg0", &[vpn]),
        )
        .host(HostSpec::new("c").network("fast"));
    let Some(lan) = spec.build_or_skip().unwrap() else { return };
    let (a, b, c) = (lan.host("a"), lan.host("b"), lan.host("c"));
    let [on_lan, on_fast] = ["lan", "fast"].map(|network| b.address_on(network).unwrap());
    assert!(b.addresses().contains(&docker.0) && b.addresses().contains(&on_fast));

    assert!(talk(a, b, on_lan) && talk(c, b, on_fast));
    assert!(silent(a, b, on_fast), "a is on no network with that address");
    assert!(silent(c, b, on_lan), "c is on no network with that address");
    assert!(silent(a, b, docker.0), "a has a docker0 of its own with the same address");
    assert!(silent(a, b, vpn.0), "nobody is behind wg0");
    assert!(talk(b, b, docker.0), "an island's address is the host's own");
    assert!(a.address_on("fast").is_err());
}

#[test]
fn a_command_runs_in_its_host_as_one_process() {
    let Some(lan) = Lan::with_hosts(&["a"]).build_or_skip().unwrap() else { return };
    let a = lan.host("a");
    let output = a.command("sh").args(["-c", "ip -brief addr; exit 7"]).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert!(shown.contains(&a.address().to_string()) && shown.contains(&a.address6().to_string()), "{shown}");

    let mut child = a.command("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
    // Under one id a shell joins the host, becomes nsenter, and that becomes the command.
    let started = Instant::now();
    while a.processes().unwrap().is_empty() && started.elapsed() < DEADLINE {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(a.processes().unwrap(), [child.id()]);
    drop(lan);
    let status = child.wait().unwrap();
    assert!(!status.success(), "a Lan that is dropped ends what runs in it");
}

#[test]
fn names_that_cannot_be_are_refused() {
    for spec in [
        Lan::builder(),
        Lan::with_hosts(&["a", "a"]),
        Lan::with_hosts(&["A b"]),
        Lan::builder().host(HostSpec::new("a").network("x").network("x")),
    ] {
        assert!(spec.clone().build().is_err(), "{spec:?}");
    }
}
