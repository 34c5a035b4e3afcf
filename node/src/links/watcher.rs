//! Keeps what is believed of a replica's links true while it serves: looks at what its decode steps spend between the stages,
//! and has the links measured again when that departs from what they foretell. Serving never waits for it, and a link or a node
//! that cannot be measured costs no more than its own figures.

use std::time::Duration;

use cluster::{ForetoldHops, LinkQuality, NodeId, StageObservation, hops_since};
use futures::future::join_all;
use protocol::node::MAX_N_EMBD;
use protocol::tls::TlsIdentity;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::ring::Ring;
use super::survey::{LinkOutcome, Pair, Scope, survey};
use super::watch::{HopWatch, Look, PAUSE};
use crate::client::NodeClient;

/// Between two looks: several heartbeats of the stages, whose counts are not of the same moment.
const LOOK: Duration = Duration::from_secs(1);

/// For a whole survey: three passes of ten seconds for each link of a replica of six nodes. A link that takes longer is as
/// good as gone.
const SURVEY_DEADLINE: Duration = Duration::from_secs(180);

/// Why links were measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SurveyCause {
    /// Nothing was known of them.
    Start,
    /// Decode steps departed from what they foretold.
    Hops(ForetoldHops),
}

/// A link that was measured, or should have been.
#[derive(Debug, Clone, PartialEq)]
pub struct SurveyedLink {
    /// The sending node.
    pub from: NodeId,
    /// The receiving node.
    pub to: NodeId,
    /// What was believed of it.
    pub before: Option<LinkQuality>,
    /// What is believed now, or why nothing new is.
    pub outcome: Result<LinkQuality, String>,
}

/// A replica's links were measured.
#[derive(Debug, Clone, PartialEq)]
pub struct RingNews {
    /// Why.
    pub cause: SurveyCause,
    /// What was found.
    pub links: Vec<SurveyedLink>,
}

/// The nodes that links are between.
pub struct RingNodes {
    /// Each at least once.
    pub clients: Vec<NodeClient>,
    /// Who directs them.
    pub identity: TlsIdentity,
}

/// Where a watcher tells of the links.
pub struct RingOutlook {
    /// What decode steps spend between stages, beside what the links foretell.
    pub hops: watch::Sender<Option<ForetoldHops>>,
    /// Surveys. While nobody takes them, the watcher waits.
    pub news: mpsc::Sender<RingNews>,
}

/// Watches the links of one replica.
pub struct RingWatcher {
    nodes: RingNodes,
    ring: Ring,
    observations: watch::Receiver<Vec<StageObservation>>,
    outlook: RingOutlook,
    watch: HopWatch,
    began: Instant,
}

impl RingWatcher {
    /// For a ring over some of these nodes.
    pub fn new(
        nodes: RingNodes,
        ring: Ring,
        observations: watch::Receiver<Vec<StageObservation>>,
        outlook: RingOutlook,
    ) -> Self {
        let watch = HopWatch::new(ring.len());
        Self { nodes, ring, observations, outlook, watch, began: Instant::now() }
    }

    /// Never ends. When it is dropped, the measurements that it asked for end as well.
    pub async fn run(mut self) {
        while self.ring.foretell(1.0).is_none() {
            self.survey(SurveyCause::Start).await;
            if self.ring.foretell(1.0).is_none() {
                tokio::time::sleep(PAUSE).await;
            }
        }
        loop {
            let tripped = self.until_off().await;
            let hops = ForetoldHops { observed: tripped.hops.time, predicted: tripped.predicted };
            tracing::info!(
                observed_ms = hops.observed.0,
                predicted_ms = hops.predicted.0,
                "the links between the stages are measured again: decode steps depart from what they foretell"
            );
            let failed = self.survey(SurveyCause::Hops(hops)).await;
            // A link that may be to blame must not be taken for the hosts' share.
            if failed == 0
                && let Some(predicted) = self.ring.foretell(tripped.hops.rows)
            {
                self.watch.measured(&tripped, predicted);
            }
        }
    }

    /// Looks at the stages until their links should be measured again, and gives the look that decided.
    async fn until_off(&mut self) -> Look {
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut seen, mut at) = (self.observations.borrow().clone(), Instant::now());
        loop {
            ticks.tick().await;
            let now = self.observations.borrow().clone();
            if seen.len() != now.len() {
                seen = now;
                continue;
            }
            // Where no step has come all the way round, the look goes on.
            let Some(hops) = hops_since(&now, &seen) else { continue };
            let lasted = at.elapsed();
            (seen, at) = (now, Instant::now());
            if hops.prefilled {
                continue;
            }
            let Some(predicted) = self.ring.foretell(hops.rows) else { continue };
            self.outlook.hops.send_replace(Some(ForetoldHops { observed: hops.time, predicted }));
            let look = Look { lasted, hops, predicted };
            if let Some(tripped) = self.watch.observe(self.began.elapsed(), look) {
                return tripped;
            }
        }
    }

    /// Measures the ring's links, and gives how many could not be measured.
    async fn survey(&mut self, cause: SurveyCause) -> usize {
        let links = self.ring.links();
        let n_embd = self.ring.n_embd().min(MAX_N_EMBD);
        let surveyed = self.nodes.survey(&links, n_embd);
        let outcomes = tokio::time::timeout(SURVEY_DEADLINE, surveyed).await.unwrap_or_else(|_| late(links));
        let links = self.ring.take(outcomes);
        links.iter().for_each(log);
        let failed = links.iter().filter(|link| link.outcome.is_err()).count();
        // Nobody may be left who wants to know; the links are watched all the same.
        let _ = self.outlook.news.send(RingNews { cause, links }).await;
        failed
    }
}

impl RingNodes {
    async fn survey(&mut self, links: &[(NodeId, NodeId)], n_embd: u32) -> Vec<LinkOutcome> {
        self.refresh().await;
        let place = |name: &NodeId| self.clients.iter().position(|node| node.name() == name);
        let pairs: Vec<Pair> =
            links.iter().filter_map(|(from, to)| Some((place(from)?, place(to)?))).collect();
        survey(&self.clients, Scope::Only(&pairs), n_embd, &mut |_| {}).await
    }

    /// Connects anew: a node may be another process by now. One that cannot be reached will say so when it is to measure.
    async fn refresh(&mut self) {
        let identity = &self.identity;
        let fresh = self.clients.iter_mut().map(async |node| {
            match NodeClient::connect(node.address(), identity, &node.facts().build).await {
                Ok(fresh) if fresh.name() == node.name() => *node = fresh,
                Ok(other) => {
                    tracing::warn!(node = %node.name(), other = %other.name(), "another node answers")
                }
                Err(error) => tracing::warn!(node = %node.name(), %error, "a node does not answer"),
            }
        });
        join_all(fresh).await;
    }
}

fn late(links: Vec<(NodeId, NodeId)>) -> Vec<LinkOutcome> {
    let outcome = || Err(format!("all links were not measured within {} s", SURVEY_DEADLINE.as_secs()));
    links.into_iter().map(|(from, to)| LinkOutcome { from, to, outcome: outcome() }).collect()
}

fn log(link: &SurveyedLink) {
    let SurveyedLink { from, to, before, outcome } = link;
    let mbit = |quality: &LinkQuality| quality.bandwidth.mbit();
    match outcome {
        Ok(now) => tracing::info!(
            %from,
            %to,
            mbit_per_s = mbit(now),
            one_way_ms = now.one_way_latency.0,
            mbit_per_s_before = before.as_ref().map(mbit),
            one_way_ms_before = before.map(|before| before.one_way_latency.0),
            "a link between stages was measured"
        ),
        Err(reason) => tracing::warn!(%from, %to, %reason, "a link between stages could not be measured"),
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Millis, StageIndex, Tally};
    use protocol::node::{Address, Build};
    use protocol::rows::RowEncoding;
    use protocol::tls::ClusterCa;
    use tokio::runtime::{Builder, Runtime};
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::AbortOnDropHandle;

    use super::*;
    use crate::agent::WorkerCommand;
    use crate::links::RingFrames;
    use crate::{Folders, NodeConfig, RunningNode};

    /// Generous: test machines are busy. Nothing is asserted about how long things took.
    const DEADLINE: Duration = Duration::from_secs(120);

    /// A node in a runtime of its own, as in a process of its own: its connections end with it.
    struct Served {
        client: NodeClient,
        runtime: Option<Runtime>,
    }

    impl Served {
        /// Ends it, and gives the handle that others still have of it.
        async fn end(mut self) -> NodeClient {
            let runtime = self.runtime.take();
            tokio::task::spawn_blocking(move || drop(runtime)).await.unwrap();
            self.client.clone()
        }
    }

    impl Drop for Served {
        fn drop(&mut self) {
            self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
        }
    }

    async fn node(name: &str, ca: &ClusterCa) -> Served {
        node_at(0, name, ca).await
    }

    async fn node_at(port: u16, name: &str, ca: &ClusterCa) -> Served {
        let build = Build { version: "1".into(), llama_cpp: "b1".into(), features: vec![] };
        let tls = ca.issue(name).unwrap();
        let command = || WorkerCommand { program: "no such program".into(), args: vec![], env: vec![] };
        let config = NodeConfig {
            name: NodeId(name.to_owned()),
            identity: tls.clone().into(),
            bind: ([127, 0, 0, 1], port).into(),
            advertise: vec![],
            build: build.clone(),
            devices: vec![],
            workers: command(),
            profile: command(),
            folders: Folders::new(Some("no/such".into()), Some("no/such".into())).unwrap(),
            limits: Default::default(),
            emulation: None,
        };
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let running = runtime.spawn(RunningNode::bind(config)).await.unwrap().unwrap();
        let address = Address::parse(&format!("127.0.0.1:{}", running.port())).unwrap();
        runtime.spawn(running.serve(CancellationToken::new()));
        let client = NodeClient::connect(&address, &tls, &build).await.unwrap();
        Served { client, runtime: Some(runtime) }
    }

    /// What a watcher does with a replica of two stages that has not served yet.
    struct Watched {
        news: mpsc::Receiver<RingNews>,
        hops: watch::Receiver<Option<ForetoldHops>>,
        stages: watch::Sender<Vec<StageObservation>>,
        running: AbortOnDropHandle<()>,
    }

    fn watch_links(clients: [&NodeClient; 2], ca: &ClusterCa) -> Watched {
        let nodes =
            RingNodes { clients: clients.map(Clone::clone).to_vec(), identity: ca.issue("me").unwrap() };
        let names = clients.iter().map(|node| node.name().clone()).collect();
        let frames = RingFrames { n_embd: 64, encoding: RowEncoding::F32, overhead: Millis(0.0) };
        let ring = Ring::new(names, frames).unwrap();
        let (stages, observations) = watch::channel(look_of(0));
        let (hops, foretold) = watch::channel(None);
        let (news, told) = mpsc::channel(1);
        let watcher = RingWatcher::new(nodes, ring, observations, RingOutlook { hops, news });
        let running = AbortOnDropHandle::new(tokio::spawn(watcher.run()));
        Watched { news: told, hops: foretold, stages, running }
    }

    /// Two stages after so many decode steps, each of 10 ms in a stage and 12 ms between stages.
    fn look_of(steps: u64) -> Vec<StageObservation> {
        let tally = |ms| Tally { count: steps, rows: steps, time: Millis(ms * steps as f64) };
        let stage = |index, round_trips| StageObservation {
            visits: tally(10.0),
            round_trips,
            ..StageObservation::none(StageIndex(index))
        };
        vec![stage(0, Tally::default()), stage(1, tally(32.0))]
    }

    #[tokio::test]
    async fn the_links_of_a_ring_are_measured_at_the_start_and_foretell_its_hops() {
        let ca = ClusterCa::new().unwrap();
        let (a, b) = (node("a", &ca).await, node("b", &ca).await);
        let mut watched = watch_links([&a.client, &b.client], &ca);
        let news = tokio::time::timeout(DEADLINE, watched.news.recv()).await.unwrap().unwrap();
        assert_eq!(news.cause, SurveyCause::Start);
        let links: Vec<_> = news.links.iter().map(|link| format!("{}{}", link.from, link.to)).collect();
        assert_eq!(links, ["ab", "ba"]);
        assert!(news.links.iter().all(|link| link.before.is_none() && link.outcome.is_ok()), "{news:?}");
        let looks = async {
            for look in 1.. {
                watched.stages.send_replace(look_of(look));
                if tokio::time::timeout(LOOK, watched.hops.changed()).await.is_ok() {
                    return;
                }
            }
        };
        tokio::time::timeout(DEADLINE, looks).await.unwrap();
        let hops = watched.hops.borrow().unwrap();
        assert!((hops.observed.0 - 12.0).abs() < 1e-6 && hops.predicted.0 > 0.0, "{hops:?}");
    }

    #[tokio::test]
    async fn a_node_that_does_not_answer_is_told_and_the_watcher_goes_on() {
        let ca = ClusterCa::new().unwrap();
        let a = node("a", &ca).await;
        let b = node("b", &ca).await.end().await;
        let mut watched = watch_links([&a.client, &b], &ca);
        let news = tokio::time::timeout(DEADLINE, watched.news.recv()).await.unwrap().unwrap();
        assert!(news.links.len() == 2 && news.links.iter().all(|link| link.outcome.is_err()), "{news:?}");
        assert!(!watched.running.is_finished());
        assert_eq!(*watched.hops.borrow(), None);
    }

    #[tokio::test]
    async fn a_node_that_was_started_again_is_measured_as_the_process_that_it_is_now() {
        let ca = ClusterCa::new().unwrap();
        let a = node("a", &ca).await;
        let before = node("b", &ca).await.end().await;
        let again = node_at(before.address().port(), "b", &ca).await;
        assert!(before != again.client);
        let mut watched = watch_links([&a.client, &before], &ca);
        let news = tokio::time::timeout(DEADLINE, watched.news.recv()).await.unwrap().unwrap();
        assert!(news.links.len() == 2 && news.links.iter().all(|link| link.outcome.is_ok()), "{news:?}");
    }
}
