//! All links of a cluster: sends nodes to measure towards each other, in rounds, until every link is settled. It measures
//! nothing itself, and a node or link that fails costs no more than its own figures.

use std::collections::BTreeMap;

use cluster::NodeId;
use futures::future::join_all;
use protocol::node::{LinkMeasurement, LinkRequest};

use super::rounds::rounds;
use super::settle::{MOST, SettledLink, Verdict, settle};
use crate::client::NodeClient;

/// What became of one link.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkOutcome {
    /// The sending node.
    pub from: NodeId,
    /// The receiving node.
    pub to: NodeId,
    /// What is believed of it, or why nothing is.
    pub outcome: Result<SettledLink, String>,
}

/// How far a survey is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SurveyProgress {
    /// How often the links have been gone through before.
    pub pass: usize,
    /// Links measured in this pass.
    pub done: usize,
    /// Links to measure in this pass.
    pub total: usize,
}

/// A link by its nodes' places in the list.
pub(super) type Pair = (usize, usize);

/// Which links to measure.
#[derive(Debug, Clone, Copy)]
pub enum Scope<'a> {
    /// Every link between different nodes, both ways apart.
    All,
    /// These, by the sender's and the receiver's place in the list of nodes.
    Only(&'a [(usize, usize)]),
}

/// All attempts to measure each link.
type Attempts = BTreeMap<Pair, Vec<Result<LinkMeasurement, String>>>;

/// Measures links between different nodes, for hidden rows of `n_embd` elements.
pub async fn survey(
    nodes: &[NodeClient],
    scope: Scope<'_>,
    n_embd: u32,
    observer: &mut (dyn FnMut(SurveyProgress) + Send),
) -> Vec<LinkOutcome> {
    let is_wanted = |link: &Pair| match scope {
        Scope::All => true,
        Scope::Only(wanted) => wanted.contains(link),
    };
    let mut attempts: Attempts =
        links(nodes.len()).filter(is_wanted).map(|link| (link, Vec::new())).collect();
    for pass in 0..MOST {
        let open = |link: &Pair| attempts.get(link).is_some_and(|of| settle(of) == Verdict::Again);
        let plan: Vec<Vec<Vec<Pair>>> =
            rounds(nodes.len()).iter().map(|round| both_ways(round, &open)).collect();
        let total = plan.iter().flatten().flatten().count();
        let mut done = 0;
        for round in plan {
            observer(SurveyProgress { pass, done, total });
            let measured = join_all(round.iter().map(|pair| measure_in_turn(nodes, pair, n_embd))).await;
            for (link, attempt) in measured.into_iter().flatten() {
                done += 1;
                attempts.entry(link).or_default().push(attempt);
            }
        }
    }
    attempts.into_iter().map(|(link, of)| outcome(nodes, link, &of)).collect()
}

fn links(n: usize) -> impl Iterator<Item = Pair> {
    (0..n).flat_map(move |from| (0..n).map(move |to| (from, to))).filter(|(from, to)| from != to)
}

/// For each pair of a round, those of its two links that are still open.
fn both_ways(round: &[Pair], open: &impl Fn(&Pair) -> bool) -> Vec<Vec<Pair>> {
    round.iter().map(|&(a, b)| [(a, b), (b, a)].into_iter().filter(open).collect()).collect()
}

/// One after the other: frames one way would delay receipts of the other.
async fn measure_in_turn(
    nodes: &[NodeClient],
    links: &[Pair],
    n_embd: u32,
) -> Vec<(Pair, Result<LinkMeasurement, String>)> {
    let mut measured = Vec::new();
    for &(from, to) in links {
        let request = LinkRequest { peer: nodes[to].peer(), n_embd };
        let attempt = nodes[from].measure_link(request).await.map_err(|error| error.to_string());
        tracing::debug!(from = %nodes[from].name(), to = %nodes[to].name(), ?attempt, "a link was measured");
        measured.push(((from, to), attempt));
    }
    measured
}

fn outcome(
    nodes: &[NodeClient],
    (from, to): Pair,
    attempts: &[Result<LinkMeasurement, String>],
) -> LinkOutcome {
    let outcome = match settle(attempts) {
        Verdict::Settled(link) => Ok(*link),
        Verdict::Failed(reason) => Err(reason),
        Verdict::Again => Err("it was not measured often enough".to_owned()),
    };
    LinkOutcome { from: nodes[from].name().clone(), to: nodes[to].name().clone(), outcome }
}
