//! The links by which a replica's stages are joined into a ring, and what they foretell for a decode step. No I/O.
//!
//! Hidden rows go from each stage to the next; from the last, the master, the drawn tokens go back to the first.

use cluster::{Bytes, Link, LinkQuality, Links, Millis, NodeId};
use protocol::rows::RowEncoding;
use thiserror::Error;

use super::survey::LinkOutcome;
use super::watcher::SurveyedLink;

/// Bytes of a token on its way back. What a frame has besides is in the latency: it was measured with frames.
const TOKEN_BYTES: f64 = 4.0;

/// What goes round.
#[derive(Debug, Clone, Copy)]
pub struct RingFrames {
    /// Elements of a hidden row.
    pub n_embd: u32,
    /// How they travel.
    pub encoding: RowEncoding,
    /// What the stages' profiles say that a step's hops cost beside the links, all together.
    pub overhead: Millis,
}

/// Nothing is known of a link that the replica needs.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("nothing is said of the link from {from} to {to}")]
#[allow(missing_docs, reason = "the message names the fields")]
pub struct UnknownLink {
    pub from: NodeId,
    pub to: NodeId,
}

/// The ring of a replica, and what is believed of its links.
#[derive(Debug, Clone)]
pub struct Ring {
    /// Of each stage.
    nodes: Vec<NodeId>,
    frames: RingFrames,
    believed: Links,
}

impl Ring {
    /// Of stages on these nodes, in order. None if they are all on one, since then there is no link.
    pub fn new(nodes: Vec<NodeId>, frames: RingFrames) -> Option<Self> {
        let ring = Self { nodes, frames, believed: Links::default() };
        (!ring.links().is_empty()).then_some(ring)
    }

    /// Believes what somebody has measured before.
    pub fn believe(&mut self, links: Links) -> Result<(), UnknownLink> {
        for (from, to) in self.links() {
            if links.between(&from, &to).is_none() {
                return Err(UnknownLink { from, to });
            }
        }
        self.believed = links;
        Ok(())
    }

    /// The links that it uses, each once.
    pub(super) fn links(&self) -> Vec<(NodeId, NodeId)> {
        let mut links = Vec::new();
        for (from, to) in self.hops() {
            let link = (from.clone(), to.clone());
            if from != to && !links.contains(&link) {
                links.push(link);
            }
        }
        links
    }

    /// Hops of a step.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn n_embd(&self) -> u32 {
        self.frames.n_embd
    }

    /// What a decode step of so many rows spends between the stages. None before every link is known.
    pub(super) fn foretell(&self, rows: f64) -> Option<Millis> {
        let RingFrames { n_embd, encoding, overhead } = self.frames;
        let hidden = rows * f64::from(n_embd) * encoding.element_bytes() as f64;
        let last = self.len().saturating_sub(1);
        let hop = |(stage, (from, to)): (usize, (&NodeId, &NodeId))| {
            let bytes = if stage == last { rows * TOKEN_BYTES } else { hidden };
            let over_link = |link: LinkQuality| link.transfer(Bytes(bytes.round() as u64)).0;
            if from == to { Some(0.0) } else { self.believed.between(from, to).map(over_link) }
        };
        Some(Millis(self.hops().enumerate().map(hop).sum::<Option<f64>>()? + overhead.0))
    }

    /// Believes a survey, as far as it succeeded, and says what it changed.
    pub(super) fn take(&mut self, outcomes: Vec<LinkOutcome>) -> Vec<SurveyedLink> {
        let surveyed = outcomes.into_iter().map(|LinkOutcome { from, to, outcome }| {
            let before = self.believed.between(&from, &to);
            let outcome = outcome.map(|settled| settled.quality);
            if let Ok(quality) = outcome {
                self.believed.measured.retain(|link| (&link.from, &link.to) != (&from, &to));
                self.believed.measured.push(Link { from: from.clone(), to: to.clone(), quality });
            }
            SurveyedLink { from, to, before, outcome }
        });
        surveyed.collect()
    }

    /// From each stage to the next.
    fn hops(&self) -> impl Iterator<Item = (&NodeId, &NodeId)> {
        self.nodes.iter().zip(self.nodes.iter().cycle().skip(1))
    }
}

#[cfg(test)]
mod tests {
    use cluster::BytesPerSecond;
    use protocol::node::Address;

    use super::*;
    use crate::links::SettledLink;

    fn node(name: &str) -> NodeId {
        NodeId(name.to_owned())
    }

    fn ring(nodes: &[&str]) -> Option<Ring> {
        let frames = RingFrames { n_embd: 250, encoding: RowEncoding::F32, overhead: Millis(0.5) };
        Ring::new(nodes.iter().copied().map(node).collect(), frames)
    }

    /// A megabyte a second, and so much latency.
    fn link(from: &str, to: &str, ms: f64) -> Link {
        let quality = LinkQuality { bandwidth: BytesPerSecond(1e6), one_way_latency: Millis(ms) };
        Link { from: node(from), to: node(to), quality }
    }

    fn outcome(from: &str, to: &str, ms: Result<f64, &str>) -> LinkOutcome {
        let settled = |ms| SettledLink {
            address: Address::parse("x:1").unwrap(),
            quality: link(from, to, ms).quality,
            round_trip: Millis(ms * 2.0),
            round_trip_p99: Millis(ms * 2.0),
            bandwidth_spread: 0.0,
            frames: vec![],
            measurements: 2,
        };
        let outcome = ms.map(settled).map_err(str::to_owned);
        LinkOutcome { from: node(from), to: node(to), outcome }
    }

    #[test]
    fn stages_of_one_node_have_no_links() {
        assert!(ring(&[]).is_none() && ring(&["a"]).is_none() && ring(&["a", "a", "a"]).is_none());
    }

    #[test]
    fn only_the_links_between_neighbours_count_and_each_once() {
        let links = |nodes: &[&str]| {
            let links = ring(nodes).unwrap().links();
            links.into_iter().map(|(from, to)| from.0 + &to.0).collect::<Vec<_>>()
        };
        assert_eq!(links(&["a", "b"]), ["ab", "ba"]);
        assert_eq!(links(&["a", "b", "c"]), ["ab", "bc", "ca"]);
        assert_eq!(links(&["a", "a", "b", "a", "b"]), ["ab", "ba"]);
    }

    #[test]
    fn a_step_takes_the_transfers_of_its_rows_and_of_its_tokens_back() {
        let mut ring = ring(&["a", "b", "b", "c"]).unwrap();
        assert_eq!(ring.foretell(1.0), None, "nothing is known");
        let (ab, bc, ca) = (link("a", "b", 1.0), link("b", "c", 2.0), link("c", "a", 4.0));
        let missing = ring.believe(Links { measured: vec![ab.clone(), bc.clone()], otherwise: None });
        assert_eq!(missing, Err(UnknownLink { from: node("c"), to: node("a") }));
        assert_eq!(ring.foretell(1.0), None, "half of it is no use");
        ring.believe(Links { measured: vec![ab, bc, ca], otherwise: None }).unwrap();
        // 250 elements of 4 bytes are 1 ms over each of two links, and a token is 4 µs.
        let step = ring.foretell(3.0).unwrap().0;
        assert!((step - (1.0 + 3.0 + 2.0 + 3.0 + 4.0 + 0.012 + 0.5)).abs() < 1e-9, "{step}");
        ring.frames.encoding = RowEncoding::F16;
        let half = ring.foretell(3.0).unwrap().0;
        assert!((step - half - 3.0).abs() < 1e-9, "{half}");
    }

    #[test]
    fn a_survey_replaces_what_it_measured_and_leaves_the_rest() {
        let mut ring = ring(&["a", "b"]).unwrap();
        let first = ring.take(vec![outcome("a", "b", Ok(1.0)), outcome("b", "a", Ok(1.0))]);
        assert!(first.iter().all(|link| link.before.is_none() && link.outcome.is_ok()));
        let before = ring.foretell(0.0).unwrap().0;
        let second = ring.take(vec![outcome("a", "b", Ok(6.0)), outcome("b", "a", Err("cut off"))]);
        assert_eq!(second[0].before.unwrap().one_way_latency, Millis(1.0));
        assert_eq!(second[1].outcome, Err("cut off".to_owned()));
        assert!((ring.foretell(0.0).unwrap().0 - before - 5.0).abs() < 1e-9);
    }
}
