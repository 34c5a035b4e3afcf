//! The nodes: whether they are there and reached, what they run, how their hosts are, and whether they reach each other, with
//! small packets and with large ones.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use cluster::Bytes;
use futures::future::join_all;
use node::{NodeClient, NodeError};
use protocol::checkup::Examination;
use protocol::node::Address;
use protocol::tls::TlsIdentity;
use registry::Registry;
use serde::Deserialize;
use serde_json::Value;

use super::checks::Findings;
use super::here::{Need, Space, look_at_disk};
use crate::cli::Globals;
use crate::commands::nodes::build;
use crate::commands::state;
use crate::commands::status::read;

/// Clocks that differ by more make logs hard to read.
const CLOCK_OFF: Duration = Duration::from_secs(10);

/// By more, a fresh certificate may not be good yet on the other host, or not any more: it is backdated by a day.
const CLOCK_WRONG: Duration = Duration::from_secs(12 * 3600);

/// Paths between nodes that are tried.
const MOST_PATHS: usize = 64;

/// Within which a port is connected to.
const TCP_DEADLINE: Duration = Duration::from_secs(3);

/// Of a node, what the admin API says.
#[derive(Debug, Deserialize)]
struct Member {
    name: String,
    state: String,
    version: String,
    llama_cpp: String,
    code: Option<String>,
    last_seen: Option<String>,
    present: Option<Present>,
}

#[derive(Debug, Deserialize)]
struct Present {
    address: Option<String>,
    unreachable: Option<String>,
    memory_available_bytes: u64,
    emulated: bool,
    running: Vec<Value>,
}

/// A node that was connected to.
struct Reached {
    name: String,
    client: NodeClient,
    runs: bool,
}

/// Looks at all of them.
pub(super) async fn look(
    members: &[Value],
    need: Option<Need>,
    globals: &Globals,
    findings: &mut Findings,
) -> Result<()> {
    let members: Vec<Member> = read(members).context("reading the nodes")?;
    let live = members.iter().filter(|member| member.state != "left");
    if live.clone().next().is_none() {
        findings.warn("the cluster", "nodes", ("it has none".to_owned(), "`shoal token create` invites one"));
    }
    let here: Vec<(&Member, &Present)> = live.filter_map(|member| is_here(member, need, findings)).collect();
    let folder = state::folder(globals)?.cluster();
    let identity = match Registry::open_existing(&folder) {
        Ok(registry) => registry.own_identity("doctor")?,
        Err(error) => {
            findings.warn(
                "the nodes",
                "asked",
                (error.to_string(), "run it on the orchestrator's host to ask each node how it is"),
            );
            return Ok(());
        }
    };
    let mut reached = Vec::new();
    for (member, present) in here {
        reached.extend(ask(member, present, &identity, need, findings).await);
    }
    paths(&reached, findings).await;
    Ok(())
}

fn subject(name: &str) -> String {
    format!("node {name}")
}

/// Whether it attends, by the orchestrator's word.
fn is_here<'a>(
    member: &'a Member,
    need: Option<Need>,
    findings: &mut Findings,
) -> Option<(&'a Member, &'a Present)> {
    let subject = subject(&member.name);
    if member.state == "pending" {
        let code = member.code.as_deref().unwrap_or_default();
        let found = format!("it waits to be let in, and shows the code {code}");
        findings.warn(
            &subject,
            "member",
            (found, "compare the code on its host, and `shoal node approve` it"),
        );
        return None;
    }
    let Some(present) = &member.present else {
        let found = match &member.last_seen {
            Some(seen) => format!("it is away; it was last seen at {seen}"),
            None => "it is away".to_owned(),
        };
        let remedy = "is `shoal node` running there, and does it reach the cluster port? its own words tell; `shoal node remove` \
                      forgets it";
        findings.fail(&subject, "attends", (found, remedy));
        return None;
    };
    findings.ok(&subject, "attends", "it reaches the orchestrator");
    builds(&subject, member, findings);
    let available = Bytes(present.memory_available_bytes);
    let found = format!("{available} are available");
    match need.filter(|_| present.running.is_empty() && !present.emulated) {
        Some(need) if available < need.memory => {
            let found = format!("{found}, and the largest stage needs {}", need.memory);
            findings.fail(
                &subject,
                "memory",
                (found, "end other programs there, use more stages, or less context (--ctx)"),
            );
        }
        _ => findings.ok(&subject, "memory", found),
    }
    Some((member, present))
}

/// Field case 16: a node of another build is refused when it joins, but may be updated later.
fn builds(subject: &str, member: &Member, findings: &mut Findings) {
    let (ours, theirs) = (build(), format!("shoal {} with llama.cpp {}", member.version, member.llama_cpp));
    if (ours.version.as_str(), ours.llama_cpp.as_str()) == (&*member.version, &*member.llama_cpp) {
        findings.ok(subject, "build", theirs);
    } else {
        let found =
            format!("it runs {theirs}, and this is shoal {} with llama.cpp {}", ours.version, ours.llama_cpp);
        findings.fail(subject, "build", (found, "install the same build on all hosts"));
    }
}

/// Asks the node itself.
async fn ask(
    member: &Member,
    present: &Present,
    identity: &TlsIdentity,
    need: Option<Need>,
    findings: &mut Findings,
) -> Option<Reached> {
    let subject = subject(&member.name);
    let Some(address) = present.address.as_deref().and_then(|address| Address::parse(address).ok()) else {
        let found =
            present.unreachable.clone().unwrap_or_else(|| "the orchestrator is still trying".to_owned());
        let remedy = "is its port (8470) open for this host? `shoal node --advertise` tells another address";
        findings.fail(&subject, "reached", (found, remedy));
        return None;
    };
    let client = match NodeClient::connect(&address, identity, &build()).await {
        Ok(client) => client,
        Err(error) => {
            not_connected(&subject, &address, &error, findings).await;
            return None;
        }
    };
    let (before, examined) = (SystemTime::now(), client.examine().await);
    match examined {
        Ok(examined) => {
            findings.ok(&subject, "reached", format!("at {address}"));
            clock(&subject, &examined, (before, SystemTime::now()), findings);
            let space = examined.disk.map(|(free, total)| Space { free, total });
            look_at_disk(&subject, space, need.filter(|_| present.running.is_empty()), findings);
        }
        Err(error) => findings.fail(&subject, "reached", (error.to_string(), "its log may tell more")),
    }
    match client.echo().await {
        Ok(time) => findings.ok(
            &subject,
            "large packets",
            format!("{} there and back in {:.1} ms", ECHO_TEXT, time.0),
        ),
        Err(error) => findings.fail(&subject, "large packets", (large_packets_lost(&error), MTU)),
    }
    Some(Reached { name: member.name.clone(), client, runs: !present.running.is_empty() })
}

/// Of [`protocol::checkup::ECHO_BYTES`].
const ECHO_TEXT: &str = "32 KiB go";

const MTU: &str = "the path carries smaller packets than the interfaces believe: set a lower MTU on them (such as ip link set dev \
                   eth0 mtu 1400), or let ICMP's \"fragmentation needed\" through";

fn large_packets_lost(error: &str) -> String {
    format!("small messages pass, and larger ones do not: {error}")
}

/// A port that can be connected to and does not shake hands loses large packets, or is another program's.
async fn not_connected(subject: &str, address: &Address, error: &NodeError, findings: &mut Findings) {
    if matches!(error, NodeError::Version { .. }) {
        return findings.fail(subject, "build", (error.to_string(), "install the same build on all hosts"));
    }
    let connecting = tokio::net::TcpStream::connect(address.to_string());
    match tokio::time::timeout(TCP_DEADLINE, connecting).await {
        Ok(Ok(_)) => {
            let found = format!("its port can be connected to, but TLS fails: {error}");
            findings.fail(subject, "large packets", (found, MTU));
        }
        _ => {
            let remedy = "is the host on, and its port open for this one? `shoal node --advertise` tells another address";
            findings.fail(subject, "reached", (error.to_string(), remedy));
        }
    }
}

fn clock(
    subject: &str,
    examined: &Examination,
    (before, after): (SystemTime, SystemTime),
    findings: &mut Findings,
) {
    const CHECK: &str = "clock";
    const REMEDY: &str = "let both hosts take the time from the network (NTP)";
    // Whatever the answer took, the clock was read in between.
    let (off, word) = if examined.clock < before {
        (before.duration_since(examined.clock), "behind")
    } else {
        (examined.clock.duration_since(after), "ahead")
    };
    let off = off.unwrap_or_default();
    let found =
        if off.is_zero() { "as here".to_owned() } else { format!("{:.1} s {word}", off.as_secs_f64()) };
    if off > CLOCK_WRONG {
        findings.fail(subject, CHECK, (format!("{found}: certificates may not be good there"), REMEDY));
    } else if off > CLOCK_OFF {
        findings.warn(subject, CHECK, (found, REMEDY));
    } else {
        findings.ok(subject, CHECK, found);
    }
}

/// Whether nodes reach each other: those that run stages, or if none does, all.
async fn paths(reached: &[Reached], findings: &mut Findings) {
    let any_runs = reached.iter().any(|node| node.runs);
    let nodes: Vec<&Reached> = reached.iter().filter(|node| node.runs || !any_runs).collect();
    let pairs = nodes.iter().flat_map(|from| nodes.iter().map(move |to| (*from, *to)));
    let pairs: Vec<_> = pairs.filter(|(from, to)| from.name != to.name).take(MOST_PATHS).collect();
    let tried = join_all(pairs.iter().map(|(from, to)| from.client.try_path(to.client.peer()))).await;
    for ((from, to), outcome) in pairs.into_iter().zip(tried) {
        let subject = format!("path {} → {}", from.name, to.name);
        match outcome {
            Ok(path) => match path.echo {
                Ok(time) => findings.ok(
                    &subject,
                    "reached",
                    format!("at {}; {ECHO_TEXT} there and back in {:.1} ms", path.address, time.0),
                ),
                Err(reason) => {
                    let found = format!(
                        "reached at {}: small messages pass, and larger ones do not: {reason}",
                        path.address
                    );
                    findings.fail(&subject, "large packets", (found, MTU));
                }
            },
            Err(error) => {
                let remedy = "stages on these two cannot be neighbours: open the ports of the one for the other, or put both on one \
                              network";
                findings.fail(&subject, "reached", (error.to_string(), remedy));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::Verdict;
    use super::*;

    fn clock_verdict(off: i64) -> (Verdict, String) {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let off_by = Duration::from_secs(off.unsigned_abs());
        let clock = if off < 0 { now - off_by } else { now + off_by };
        let mut findings = Findings::default();
        super::clock("x", &Examination { clock, disk: None }, (now, now), &mut findings);
        (findings.checks()[0].verdict, findings.checks()[0].found.clone())
    }

    #[test]
    fn a_clock_is_judged_by_how_far_it_is_off() {
        assert_eq!(clock_verdict(0), (Verdict::Ok, "as here".into()));
        assert_eq!(clock_verdict(-3), (Verdict::Ok, "3.0 s behind".into()));
        assert_eq!(clock_verdict(60), (Verdict::Warn, "60.0 s ahead".into()));
        assert_eq!(clock_verdict(-100_000).0, Verdict::Fail);
    }

    #[test]
    fn who_is_away_waits_or_runs_another_build_is_told_of() {
        let member = |json: Value| serde_json::from_value::<Member>(json).unwrap();
        let present = serde_json::json!({
            "address": "10.0.0.1:8470", "memory_available_bytes": 1 << 30, "emulated": false, "running": [],
        });
        let node = |state: &str, version: &str, present: Value| {
            member(serde_json::json!({
                "name": "desk", "state": state, "version": version, "llama_cpp": build().llama_cpp, "code": "ab12",
                "present": present,
            }))
        };
        let verdicts = |member: &Member, need: Option<Need>| {
            let mut findings = Findings::default();
            let here = is_here(member, need, &mut findings).is_some();
            let failed = findings.checks().iter().filter(|check| check.verdict != Verdict::Ok);
            (here, failed.map(|check| (check.check, check.verdict)).collect::<Vec<_>>())
        };
        let ours = build().version;
        assert_eq!(
            verdicts(&node("pending", &ours, Value::Null), None),
            (false, vec![("member", Verdict::Warn)])
        );
        assert_eq!(
            verdicts(&node("approved", &ours, Value::Null), None),
            (false, vec![("attends", Verdict::Fail)])
        );
        assert_eq!(verdicts(&node("approved", &ours, present.clone()), None), (true, vec![]));
        assert_eq!(
            verdicts(&node("approved", "9.9.9", present.clone()), None),
            (true, vec![("build", Verdict::Fail)])
        );
        let need = Need { memory: Bytes(2 << 30), disk: Bytes::ZERO };
        assert_eq!(
            verdicts(&node("approved", &ours, present), Some(need)),
            (true, vec![("memory", Verdict::Fail)])
        );
    }
}
