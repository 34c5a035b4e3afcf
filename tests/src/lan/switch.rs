//! The switch: a namespace with a bridge and a delay line for each network, and the nftables rules that decide which
//! frames go through a delay line and which are lost.
//!
//! Frames of a delayed pair are taken at the sender's port (`fwd`, the netdev family's ingress hook), pass the delay
//! line's TAP device, and enter the bridge there. Frames between cut hosts are dropped on their way out of the bridge,
//! so what was under way when the cable was pulled is lost too.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context, Result};

use super::delay::{DelayLine, Mac, Route};
use super::host::{Host, Port};
use super::namespace::Namespace;
use super::tools;
use super::traffic::mac_text;

/// The switch of a Lan.
#[derive(Debug)]
pub(super) struct Switch {
    /// By number of the network. Before the namespace, so that the threads end first.
    lines: Vec<DelayLine>,
    namespace: Namespace,
}

impl Switch {
    /// Makes a bridge and a delay line for each network.
    pub(super) fn create(name: &str, networks: usize) -> Result<Self> {
        let namespace = Namespace::create(name)?;
        let lines = (0..networks).map(|network| DelayLine::start(&namespace, &line_device(network)));
        let lines = lines.collect::<Result<Vec<_>>>()?;
        let (mut links, mut ports) = (String::new(), String::new());
        for network in 0..networks {
            let (bridge, line) = (bridge_device(network), line_device(network));
            // Multicast goes everywhere, as through a plain switch.
            let _ = writeln!(links, "link add {bridge} type bridge mcast_snooping 0");
            let _ = writeln!(links, "link set {bridge} addrgenmode none up");
            let _ = writeln!(links, "link set {line} master {bridge} addrgenmode none up");
            // Addresses are known (see `attach`), and nobody sits behind the delay line.
            let _ =
                writeln!(ports, "link set dev {line} learning off flood off mcast_flood off bcast_flood off");
        }
        namespace.inside(|| {
            tools::ip(&links)?;
            tools::bridge(&ports)
        })??;
        Ok(Self { lines, namespace })
    }

    /// The namespace, for the hosts' cables.
    pub(super) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Connects the hosts' ports with their bridges; their cables are plugged in already.
    pub(super) fn attach(&self, hosts: &[Host]) -> Result<()> {
        let ports: Vec<&Port> = hosts.iter().flat_map(|host| &host.ports).collect();
        let (mut links, mut addresses) = (String::new(), String::new());
        for port in &ports {
            let (name, bridge) = (&port.switch_port, bridge_device(port.network));
            let _ = writeln!(links, "link set {name} master {bridge} addrgenmode none up");
            let _ = writeln!(addresses, "fdb replace {} dev {name} master static", mac_text(port.mac));
        }
        self.namespace.inside(|| {
            tools::ip(&links)?;
            tools::bridge(&addresses)?;
            tools::nft(&self.rules(&ports))
        })?
    }

    fn rules(&self, ports: &[&Port]) -> String {
        let mut chains = String::new();
        for network in 0..self.lines.len() {
            let names = ports.iter().filter(|port| port.network == network);
            let names: Vec<String> = names.map(|port| format!("{:?}", port.switch_port)).collect();
            let _ = write!(
                chains,
                "chain ingress{network} {{\n\
                 type filter hook ingress devices = {{ {} }} priority 0; policy accept\n\
                 ether saddr . ether daddr @delayed fwd to {:?}\n\
                 }}\n",
                names.join(", "),
                line_device(network)
            );
        }
        format!(
            "table netdev lan {{\n\
             set delayed {{\n type ether_addr . ether_addr\n }}\n\
             {chains}}}\n\
             table bridge lan {{\n\
             set cut {{\n type ether_addr . ifname\n }}\n\
             chain forward {{\n\
             type filter hook forward priority 0; policy accept\n\
             ether saddr . oifname @cut drop\n\
             }}\n\
             }}\n"
        )
    }

    /// Sends frames from one address to another through the delay line of their network.
    pub(super) fn delay(&self, routes: &[(usize, Mac, Mac, Route)]) -> Result<()> {
        for &(network, from, to, route) in routes {
            self.lines.get(network).context("a network without a delay line")?.set(from, to, route);
        }
        let pairs = routes.iter().map(|(_, from, to, _)| format!("{} . {}", mac_text(*from), mac_text(*to)));
        let pairs: Vec<String> = pairs.collect();
        let statement = format!("add element netdev lan delayed {{ {} }}\n", pairs.join(", "));
        self.namespace.inside(|| tools::nft(&statement))?
    }

    /// Limits what a port hands to its host.
    pub(super) fn limit(&self, commands: &str) -> Result<()> {
        self.namespace.inside(|| tools::tc(commands))?
    }

    /// Makes these, and only these, pairs of sender and receiving port lose their frames.
    pub(super) fn cut(&self, pairs: &BTreeSet<(Mac, &str)>) -> Result<()> {
        let mut statements = "flush set bridge lan cut\n".to_owned();
        for (sender, port) in pairs {
            let _ = writeln!(statements, "add element bridge lan cut {{ {} . {port:?} }}", mac_text(*sender));
        }
        self.namespace.inside(|| tools::nft(&statements))?
    }

    /// Frames that delay lines passed on, and frames they lost.
    pub(super) fn forwarded_and_dropped(&self) -> (u64, u64) {
        let counts = self.lines.iter().map(DelayLine::forwarded_and_dropped);
        counts.fold((0, 0), |(forwarded, dropped), (f, d)| (forwarded + f, dropped + d))
    }
}

fn bridge_device(network: usize) -> String {
    format!("bridge{network}")
}

fn line_device(network: usize) -> String {
    format!("delay{network}")
}
