//! The links between a replica's stages: what is believed of them at the start, and what is said when they were measured.

use std::path::Path;

use anyhow::{Context, Result};
use cluster::{DeviceProfile, ForetoldHops, LinkQuality, Millis, NodeId};
use node::links::{Ring, RingFrames, RingNews, SurveyCause, SurveyedLink};
use node::{NodeClient, ReplicaPlan};
use protocol::plan_files::{ClusterFile, LinkQualityEntry};
use serde::Serialize;

use super::ServeArgs;
use crate::commands::planning::read_file;

/// The ring that stages on these nodes make. None if there is no link in it.
pub(super) fn ring(
    args: &ServeArgs,
    nodes: &[NodeClient],
    plan: &ReplicaPlan,
    profiles: &[DeviceProfile],
) -> Result<Option<Ring>> {
    let names: Vec<NodeId> = nodes.iter().map(|node| node.name().clone()).collect();
    let frames = RingFrames {
        n_embd: plan.model().shape().n_embd,
        encoding: args.encoding.into(),
        overhead: overhead(&names, profiles),
    };
    let Some(mut ring) = Ring::new(names, frames) else { return Ok(None) };
    if let Some(path) = &args.links {
        believe(&mut ring, path)?;
    }
    Ok(Some(ring))
}

fn believe(ring: &mut Ring, path: &Path) -> Result<()> {
    let links = read_file::<ClusterFile>(path)?.links();
    ring.believe(links).with_context(|| {
        format!("{0} does not fit: measure with `shoal links -o {0}`, or leave --links out", path.display())
    })
}

/// What a step's hops cost beside the links, by the profiles of the stages' nodes as far as there are any.
fn overhead(stages: &[NodeId], profiles: &[DeviceProfile]) -> Millis {
    let of_stage = |node: &NodeId| {
        let prefix = format!("{node}/");
        profiles.iter().find(|profile| profile.device.0.starts_with(&prefix))
    };
    Millis(stages.iter().filter_map(of_stage).map(|profile| profile.hop_overhead.0).sum())
}

/// A survey, for programs.
#[derive(Serialize)]
pub(super) struct Survey {
    /// `start`, or `hops` that departed from what the links foretold.
    cause: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    observed_hops_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_hops_ms: Option<f64>,
    links: Vec<LinkEntry>,
}

#[derive(Serialize)]
struct LinkEntry {
    from: String,
    to: String,
    #[serde(flatten)]
    now: Option<LinkQualityEntry>,
    /// What was believed of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<LinkQualityEntry>,
    /// Why it could not be measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

impl From<&RingNews> for Survey {
    fn from(news: &RingNews) -> Self {
        let (cause, hops) = match news.cause {
            SurveyCause::Start => ("start", None),
            SurveyCause::Hops(hops) => ("hops", Some(hops)),
        };
        let entry = |link: &SurveyedLink| LinkEntry {
            from: link.from.0.clone(),
            to: link.to.0.clone(),
            now: link.outcome.as_ref().ok().map(|quality| (*quality).into()),
            before: link.before.map(LinkQualityEntry::from),
            failure: link.outcome.as_ref().err().cloned(),
        };
        Self {
            cause,
            observed_hops_ms: hops.map(|hops| hops.observed.0),
            predicted_hops_ms: hops.map(|hops| hops.predicted.0),
            links: news.links.iter().map(entry).collect(),
        }
    }
}

/// A survey, for people. One that went well at the start is no news.
pub(super) fn in_words(news: &RingNews) -> Option<String> {
    let SurveyCause::Hops(ForetoldHops { observed, predicted }) = news.cause else { return None };
    let quality = |quality: &LinkQuality| {
        format!("{:.0} Mbit/s, {} one way", quality.bandwidth.mbit(), quality.one_way_latency)
    };
    let links = news.links.iter().map(|SurveyedLink { from, to, before, outcome }| {
        let before = before.as_ref().map_or_else(String::new, |before| format!(" (was {})", quality(before)));
        match outcome {
            Ok(now) => format!("\n  {from} → {to}: {}{before}", quality(now)),
            Err(reason) => format!("\n  {from} → {to}: not measured: {reason}"),
        }
    });
    Some(format!(
        "steps spent {observed} between the stages where the links foretold {predicted}; measured again:{}",
        links.collect::<String>()
    ))
}

#[cfg(test)]
mod tests {
    use cluster::BytesPerSecond;

    use super::*;

    fn quality(mbit: f64, ms: f64) -> LinkQuality {
        LinkQuality { bandwidth: BytesPerSecond::from_mbit(mbit), one_way_latency: Millis(ms) }
    }

    fn news(cause: SurveyCause) -> RingNews {
        let link = |from: &str, to: &str, outcome| SurveyedLink {
            from: NodeId(from.to_owned()),
            to: NodeId(to.to_owned()),
            before: Some(quality(920.0, 0.25)),
            outcome,
        };
        let links = vec![link("a", "b", Ok(quality(20.0, 5.0))), link("b", "a", Err("cut off".to_owned()))];
        RingNews { cause, links }
    }

    const HOPS: ForetoldHops = ForetoldHops { observed: Millis(12.0), predicted: Millis(0.5) };

    #[test]
    fn programs_are_told_what_was_and_what_is() {
        let told = serde_json::to_value(Survey::from(&news(SurveyCause::Hops(HOPS)))).unwrap();
        let before = serde_json::json!({ "mbit_per_s": 920.0, "one_way_ms": 0.25 });
        let links = serde_json::json!([
            { "from": "a", "to": "b", "mbit_per_s": 20.0, "one_way_ms": 5.0, "before": before },
            { "from": "b", "to": "a", "before": before, "failure": "cut off" },
        ]);
        assert_eq!((&told["cause"], &told["links"]), (&"hops".into(), &links));
        assert_eq!((&told["observed_hops_ms"], &told["predicted_hops_ms"]), (&12.0.into(), &0.5.into()));
    }

    #[test]
    fn people_are_told_of_links_that_changed_while_they_were_used() {
        let words = in_words(&news(SurveyCause::Hops(HOPS))).unwrap();
        for part in [
            "12.00 ms",
            "0.50 ms",
            "a → b: 20 Mbit/s, 5.00 ms one way (was 920",
            "b → a: not measured: cut off",
        ] {
            assert!(words.contains(part), "{part} is missing in\n{words}");
        }
        assert_eq!(in_words(&news(SurveyCause::Start)), None);
    }
}
