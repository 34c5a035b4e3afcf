//! A LAN of hosts on one machine, for tests of what happens between hosts.
//!
//! Each host is a network namespace, connected by a virtual cable to a bridge in a namespace of its own; the machine's
//! own network is left alone. Links can be shaped ([`Lan::shape`]), hosts and pairs cut off ([`Lan::cut`]), processes
//! stopped ([`Host::freeze`]) and limited ([`Host::limit_cpu`]). Everything is removed when the [`Lan`] is dropped; what
//! a killed test leaves is removed when the next Lan is made, since names tell who made them.
//!
//! Linux and root only. [`LanBuilder::build_or_skip`] says why a test is skipped elsewhere.
//!
//! How a shaped link is made: HTB at the sender's interface holds the sender to the rate, as a network card does; the
//! frames then pass a delay line of ours (`delay`), which spaces them exactly at that rate and delays them by half the
//! round trip. Each direction of each pair has a lane of its own there, so links of a host do not add up, and frames of
//! pairs that have no shape go through the kernel's bridge alone. The delay line's thread has a real-time priority where
//! that is allowed, so links keep their shape while the hosts' processes want all processors.

mod builder;
mod cgroup;
mod delay;
mod host;
mod names;
mod namespace;
mod shape;
mod switch;
mod tools;
mod traffic;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use cluster::BytesPerSecond;

pub use builder::{HostSpec, LanBuilder, NETWORK, skip, unavailable};
pub use cgroup::LimitsUnavailable;
pub use host::Host;
pub use shape::LinkShape;

use delay::{Mac, Route};
use host::Port;
use shape::line_rate;
use switch::Switch;

/// Hosts connected by a switch, taken apart when dropped.
#[derive(Debug)]
pub struct Lan {
    /// Before the switch, so that processes end before their network.
    hosts: Vec<Host>,
    switch: Switch,
    /// Ordered pairs of hosts, by number, whose frames are lost.
    cut: Mutex<BTreeSet<(usize, usize)>>,
}

impl Lan {
    /// To be made of hosts one by one.
    pub fn builder() -> LanBuilder {
        LanBuilder::default()
    }

    /// To be made of these hosts on one network, with links as fast as the machine.
    pub fn with_hosts(names: &[&str]) -> LanBuilder {
        names.iter().fold(Self::builder(), |lan, name| lan.host(HostSpec::new(name).network(NETWORK)))
    }

    /// To be made of hosts `h1` to `hN` on a LAN like that of E2LLM ([`LinkShape::E2LLM`]).
    pub fn e2llm(hosts: usize) -> LanBuilder {
        let names = (1..=hosts).map(|number| format!("h{number}"));
        let lan = names.fold(Self::builder(), |lan, name| lan.host(HostSpec::new(&name).network(NETWORK)));
        lan.everywhere(LinkShape::E2LLM)
    }

    fn new(hosts: Vec<Host>, switch: Switch) -> Self {
        Self { hosts, switch, cut: Mutex::default() }
    }

    /// A host by its name.
    ///
    /// # Panics
    ///
    /// If there is none: the test that asks has a spelling mistake.
    #[expect(clippy::panic, reason = "a spelling mistake in a test")]
    pub fn host(&self, name: &str) -> &Host {
        self.hosts
            .iter()
            .find(|host| host.name == name)
            .unwrap_or_else(|| panic!("this Lan has no host {name:?}"))
    }

    /// All hosts, in the order in which they were added.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Gives the link between two hosts a rate and a round trip, from now on, on every network that both are on.
    pub fn shape(&self, a: &str, b: &str, shape: LinkShape) -> Result<()> {
        let (a, b) = (self.number(a)?, self.number(b)?);
        self.shape_pairs(&[(a, b), (b, a)], shape)
    }

    /// The same for one direction: its rate, and half of the round trip.
    pub fn shape_one_way(&self, from: &str, to: &str, shape: LinkShape) -> Result<()> {
        self.shape_pairs(&[(self.number(from)?, self.number(to)?)], shape)
    }

    /// Limits what a host sends to all others together, and what it receives, as a network card does.
    pub fn limit_rate(&self, host: &str, goodput: BytesPerSecond) -> Result<()> {
        let host = self.hosts.get(self.number(host)?).context("no such host")?;
        let rate = line_rate(goodput);
        let (mut sent, mut received) = (String::new(), String::new());
        for port in &host.ports {
            let mut egress = port.egress.lock().unwrap_or_else(PoisonError::into_inner);
            sent += &egress.limit_all(&port.interface, rate);
            received += &traffic::limit_port(&port.switch_port, rate);
        }
        host.inside(|| tools::tc(&sent))??;
        self.switch.limit(&received)
    }

    /// Cuts a host off from all others: nothing it sends arrives, and nothing reaches it. Its interfaces stay up, so
    /// nobody is told.
    pub fn cut(&self, host: &str) -> Result<()> {
        let host = self.number(host)?;
        self.cut_pairs(
            (0..self.hosts.len())
                .filter(|&other| other != host)
                .flat_map(|other| [(host, other), (other, host)]),
        )
    }

    /// Cuts two hosts off from each other; both still reach all others.
    pub fn cut_pair(&self, a: &str, b: &str) -> Result<()> {
        let (a, b) = (self.number(a)?, self.number(b)?);
        self.cut_pairs([(a, b), (b, a)])
    }

    /// Loses what one host sends to another; the way back stays open.
    pub fn cut_one_way(&self, from: &str, to: &str) -> Result<()> {
        self.cut_pairs([(self.number(from)?, self.number(to)?)])
    }

    /// Joins again all that was cut.
    pub fn heal(&self) -> Result<()> {
        let mut cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        cut.clear();
        self.switch.cut(&BTreeSet::new())
    }

    /// Frames of shaped links that arrived, and those that a full queue lost, so far.
    pub fn forwarded_and_dropped(&self) -> (u64, u64) {
        self.switch.forwarded_and_dropped()
    }

    fn shape_everywhere(&self, shape: LinkShape) -> Result<()> {
        let numbers = 0..self.hosts.len();
        let pairs =
            numbers.clone().flat_map(|a| numbers.clone().filter(move |&b| b != a).map(move |b| (a, b)));
        self.shape_pairs(&pairs.collect::<Vec<_>>(), shape)?;
        self.hosts.iter().try_for_each(|host| self.limit_rate(&host.name, shape.goodput))
    }

    fn shape_pairs(&self, pairs: &[(usize, usize)], shape: LinkShape) -> Result<()> {
        let route = Route { delay: shape.round_trip / 2, line_rate: line_rate(shape.goodput) };
        let mut routes = Vec::new();
        for (number, host) in self.hosts.iter().enumerate() {
            let mut commands = String::new();
            for &(_, to) in pairs.iter().filter(|(from, _)| *from == number) {
                let shared = self.shared_ports(number, to);
                ensure!(!shared.is_empty(), "{} and {} share no network", host.name, self.hosts[to].name);
                for (ours, theirs) in shared {
                    let mut egress = ours.egress.lock().unwrap_or_else(PoisonError::into_inner);
                    commands += &egress.limit_peer(&ours.interface, (to, theirs.mac), route.line_rate);
                    routes.push((ours.network, ours.mac, theirs.mac, route));
                }
            }
            host.inside(|| tools::tc(&commands))??;
        }
        self.switch.delay(&routes)
    }

    fn cut_pairs(&self, pairs: impl IntoIterator<Item = (usize, usize)>) -> Result<()> {
        let mut cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        cut.extend(pairs);
        let lost: BTreeSet<(Mac, &str)> = cut
            .iter()
            .flat_map(|&(from, to)| self.shared_ports(from, to))
            .map(|(from, to)| (from.mac, to.switch_port.as_str()))
            .collect();
        self.switch.cut(&lost)
    }

    /// The ports with which two hosts are on the same network.
    fn shared_ports(&self, from: usize, to: usize) -> Vec<(&Port, &Port)> {
        let (from, to) = (&self.hosts[from].ports, &self.hosts[to].ports);
        let pairs = from.iter().flat_map(|ours| to.iter().map(move |theirs| (ours, theirs)));
        pairs.filter(|(ours, theirs)| ours.network == theirs.network).collect()
    }

    fn number(&self, name: &str) -> Result<usize> {
        let found = self.hosts.iter().position(|host| host.name == name);
        found.with_context(|| format!("this Lan has no host {name:?}"))
    }
}
