//! The orchestrator: what it says of itself, and whether its replicas' steps take as long as their links explain.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use reqwest::Client;

use super::checks::Findings;
use crate::commands::status::Status;

const SUBJECT: &str = "the orchestrator";

/// Within which metrics are had; nothing is done for them that takes time.
const DEADLINE: Duration = Duration::from_secs(5);

/// A step's hops that take so many times of what the links foretell …
const FACTOR: f64 = 1.5;

/// … and so many seconds more, as the links are measured again at.
const MORE: f64 = 0.0005;

/// Looks at one that answers.
pub(super) async fn look(status: &Status, findings: &mut Findings) {
    let word = |name: &str| status.ready[name].as_str().unwrap_or_default();
    match word("status") {
        "ready" => findings.ok(SUBJECT, "serving", format!("{} serves {}", status.server, word("model"))),
        other => {
            let found = format!("{} is {other}: {}", status.server, word("reason"));
            findings.fail(
                SUBJECT,
                "serving",
                (found, "the lines that fail below may say why; so does its log (-v)"),
            );
        }
    }
    for (number, replica) in status.ready["replicas"].as_array().into_iter().flatten().enumerate() {
        if replica["status"] == "down" && word("status") == "ready" {
            let reason = replica["reason"].as_str().unwrap_or_default();
            findings.warn(
                SUBJECT,
                "replica",
                (format!("replica {number} is down: {reason}"), "the others serve meanwhile"),
            );
        }
    }
    let asked = Client::new().get(format!("{}/metrics", status.server)).timeout(DEADLINE).send().await;
    let text = match asked {
        Ok(reply) => reply.text().await.unwrap_or_default(),
        Err(_) => String::new(),
    };
    for hops in hops(&text) {
        hops.judge(findings);
    }
}

/// Looks for the reason why it does not answer.
pub(super) async fn is_away(server: &str, error: &anyhow::Error, findings: &mut Findings) {
    let found = format!("{error:#}");
    let remedy = match address(server).await {
        Some(address) if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok() => {
            "something else listens at that port: `shoal serve --listen` takes another"
        }
        Some(address) if std::net::TcpListener::bind(address).is_ok() => {
            "the port is free: start it with `shoal serve`, or say with --server where it is"
        }
        _ => "start `shoal serve`, or say with --server where it is",
    };
    findings.fail(SUBJECT, "serving", (found, remedy));
}

/// Where an URL leads.
async fn address(server: &str) -> Option<SocketAddr> {
    let host = server.split("://").nth(1)?.split('/').next()?.to_owned();
    let host = if host.rsplit(']').next()?.contains(':') { host } else { format!("{host}:80") };
    tokio::net::lookup_host(host).await.ok()?.next()
}

/// What a replica's steps spend between its stages, in seconds.
#[derive(Debug, PartialEq)]
struct Hops {
    labels: String,
    foretold: f64,
    seen: f64,
}

impl Hops {
    fn judge(&self, findings: &mut Findings) {
        let Self { labels, foretold, seen } = self;
        let found = format!(
            "a step spends {:.2} ms between the stages{labels}, and its links explain {:.2} ms",
            seen * 1e3,
            foretold * 1e3
        );
        if *seen > foretold * FACTOR && seen - foretold > MORE {
            findings.warn(
                SUBJECT,
                "links",
                (found, "`shoal links` measures them; other traffic, Wi-Fi, or a busy host slow them down"),
            );
        } else {
            findings.ok(SUBJECT, "links", found);
        }
    }
}

/// Of each replica whose links are known.
fn hops(metrics: &str) -> Vec<Hops> {
    let samples = |name: &'static str| {
        metrics.lines().filter_map(move |line| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = rest.rsplit_once(' ')?;
            Some((labels, value.parse::<f64>().ok()?))
        })
    };
    let pair = |(labels, foretold): (&str, f64)| {
        let (_, seen) = samples("shoal_step_hops_recent_seconds").find(|(other, _)| *other == labels)?;
        let text = if labels.is_empty() { String::new() } else { format!(" of {labels}") };
        Some(Hops { labels: text, foretold, seen })
    };
    samples("shoal_step_hops_predicted_seconds").filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::super::checks::Verdict;
    use super::*;

    const METRICS: &str = "\
# TYPE shoal_step_hops_predicted_seconds gauge
shoal_step_hops_predicted_seconds{replica=\"0\"} 0.002
shoal_step_hops_recent_seconds{replica=\"0\"} 0.0022
shoal_step_hops_predicted_seconds{replica=\"1\"} 0.002
shoal_step_hops_recent_seconds{replica=\"1\"} 0.01
shoal_step_hops_predicted_seconds{replica=\"2\"} 0.0001
shoal_step_hops_recent_seconds{replica=\"2\"} 0.0004
shoal_step_hops_predicted_seconds{replica=\"3\"} 0.002
";

    #[test]
    fn steps_are_set_against_what_their_links_explain() {
        let mut findings = Findings::default();
        hops(METRICS).iter().for_each(|hops| hops.judge(&mut findings));
        let verdicts: Vec<Verdict> = findings.checks().iter().map(|check| check.verdict).collect();
        // One as foretold, one slow, one whose difference is too short to matter, and one that did not run.
        assert_eq!(verdicts, [Verdict::Ok, Verdict::Warn, Verdict::Ok]);
        assert!(findings.checks()[1].found.contains("10.00 ms between the stages of {replica=\"1\"}"));
    }

    #[tokio::test]
    async fn an_address_is_found_in_an_url() {
        assert_eq!(address("http://127.0.0.1:81/x").await.unwrap().to_string(), "127.0.0.1:81");
        assert_eq!(address("http://[::1]:81").await.unwrap().to_string(), "[::1]:81");
        assert_eq!(address("http://127.0.0.1").await.unwrap().to_string(), "127.0.0.1:80");
        assert!(address("127.0.0.1:81").await.is_none());
    }
}
