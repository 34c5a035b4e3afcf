//! What a Lan is to consist of, and how it is put together.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use anyhow::{Context, Result, ensure};
use cluster::BytesPerSecond;

use super::cgroup::{self, Cgroup};
use super::delay::DelayLine;
use super::host::{Host, Port};
use super::names::{is_left_over, unique_prefix};
use super::namespace::{self, Namespace};
use super::switch::Switch;
use super::traffic::mac_text;
use super::{Lan, LinkShape, tools};

/// The network that hosts are on unless said otherwise.
pub const NETWORK: &str = "lan";

/// Host and network numbers are bytes of addresses.
const MOST: usize = 250;

/// Large segments stay whole up to this size: small enough that a decode step's rows do not wait long behind one, and
/// large enough that two cores carry a gigabit.
const SEGMENT_BYTES: u32 = 16384;

/// A host to be made.
#[derive(Debug, Clone)]
pub struct HostSpec {
    name: String,
    networks: Vec<String>,
    islands: Vec<(String, Vec<(IpAddr, u8)>)>,
}

impl HostSpec {
    /// A host on no network yet.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), networks: Vec::new(), islands: Vec::new() }
    }

    /// Adds an interface on a network: `eth0` is the first. Hosts on the same network reach each other there.
    #[must_use]
    pub fn network(mut self, name: &str) -> Self {
        self.networks.push(name.to_owned());
        self
    }

    /// Adds an interface behind which there is nobody, such as `docker0` or a VPN's: it is up, and what is sent there
    /// is never answered. Several hosts may have the same.
    #[must_use]
    pub fn island(mut self, interface: &str, addresses: &[(IpAddr, u8)]) -> Self {
        self.islands.push((interface.to_owned(), addresses.to_vec()));
        self
    }
}

/// A Lan to be made.
#[derive(Debug, Clone, Default)]
pub struct LanBuilder {
    hosts: Vec<HostSpec>,
    everywhere: Option<LinkShape>,
}

impl LanBuilder {
    /// Adds a host.
    #[must_use]
    pub fn host(mut self, host: HostSpec) -> Self {
        self.hosts.push(host);
        self
    }

    /// Gives every pair this link, and every host one network card with its rate, which its links share.
    #[must_use]
    pub fn everywhere(mut self, shape: LinkShape) -> Self {
        self.everywhere = Some(shape);
        self
    }

    /// Makes the Lan, or says on standard error why it cannot be made here and gives nothing: the test is skipped.
    pub fn build_or_skip(self) -> Result<Option<Lan>> {
        match unavailable() {
            None => self.build().map(Some),
            Some(reason) => {
                skip(reason);
                Ok(None)
            }
        }
    }

    /// Makes the Lan.
    pub fn build(self) -> Result<Lan> {
        self.check()?;
        remove_leftovers()?;
        let prefix = unique_prefix()?;
        let networks = self.networks();
        let switch = Switch::create(&format!("{prefix}.switch"), networks.len())?;
        let hosts = self.hosts.iter().enumerate();
        let hosts = hosts.map(|(number, spec)| make_host(spec, number, &prefix, &networks));
        let hosts = hosts.collect::<Result<Vec<Host>>>()?;
        for (number, (spec, host)) in self.hosts.iter().zip(&hosts).enumerate() {
            plug_in(spec, number, host, &switch).with_context(|| format!("connecting host {}", spec.name))?;
        }
        switch.attach(&hosts)?;
        let lan = Lan::new(hosts, switch);
        if let Some(shape) = self.everywhere {
            lan.shape_everywhere(shape)?;
        }
        Ok(lan)
    }

    fn check(&self) -> Result<()> {
        ensure!((1..=MOST).contains(&self.hosts.len()), "{} hosts, not 1 to {MOST}", self.hosts.len());
        for (number, host) in self.hosts.iter().enumerate() {
            let name = &host.name;
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            ensure!(!name.is_empty() && name.chars().all(plain), "host {name:?}: use a-z, 0-9 and -");
            ensure!(!self.hosts[..number].iter().any(|other| other.name == *name), "two hosts {name}");
            for (nth, network) in host.networks.iter().enumerate() {
                ensure!(!host.networks[..nth].contains(network), "host {name} is twice on network {network}");
            }
        }
        ensure!(self.networks().len() <= MOST, "more than {MOST} networks");
        Ok(())
    }

    /// All networks in the order in which hosts name them.
    fn networks(&self) -> Vec<String> {
        let mut networks: Vec<String> = Vec::new();
        for network in self.hosts.iter().flat_map(|host| &host.networks) {
            if !networks.contains(network) {
                networks.push(network.clone());
            }
        }
        networks
    }
}

/// Why no Lan can be made here, if none can; found out once.
pub fn unavailable() -> Option<&'static str> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    REASON.get_or_init(|| probe().err().map(|error| format!("{error:#}"))).as_deref()
}

/// Says on standard error that a test is skipped, and why. Not through `eprintln!`: what a passing test prints that way
/// is swallowed by `cargo test`, and nobody would know that it did not run.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "SKIPPED: {}: {reason}", thread.name().unwrap_or("a test"));
}

/// Tries everything that a Lan needs of the system, so that what is missing is told from what is broken.
fn probe() -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "network namespaces can be made by root only");
    for (tool, package) in [
        ("ip", "iproute2"),
        ("bridge", "iproute2"),
        ("tc", "iproute2"),
        ("nft", "nftables"),
        ("nsenter", "util-linux"),
    ] {
        ensure!(tools::is_installed(tool), "{tool} is missing (Debian's package {package})");
    }
    ensure!(Path::new("/dev/net/tun").exists(), "this kernel has no /dev/net/tun");
    remove_leftovers()?;
    let namespace = Namespace::create(&format!("{}.probe", unique_prefix()?))?;
    let line = DelayLine::start(&namespace, "delay0").context("no TAP device can be made")?;
    namespace.inside(|| {
        tools::ip(
            "link add bridge0 type bridge mcast_snooping 0\n\
             link add port0 type veth peer name eth0\n\
             link set port0 up\n\
             link set eth0 up\n\
             addr add 10.77.0.1/24 dev eth0 noprefixroute\n\
             addr add fd77::1/64 dev eth0 noprefixroute nodad\n\
             route add 10.77.0.0/24 dev eth0 congctl cubic\n\
             link set delay0 master bridge0\n",
        )?;
        let rate = BytesPerSecond(1e6);
        let mut egress = super::traffic::Egress::default();
        tools::tc(&egress.limit_peer("eth0", (1, [2, 0, 0, 0, 0, 1]), rate))?;
        tools::tc(&super::traffic::limit_port("port0", rate))?;
        tools::nft(
            "table netdev lan {\nchain ingress {\ntype filter hook ingress devices = { \"port0\" } priority 0\n\
             ether daddr 02:00:00:00:00:01 fwd to \"delay0\"\n}\n}\n\
             table bridge lan {\nchain forward {\ntype filter hook forward priority 0\n\
             ether daddr 02:00:00:00:00:01 drop\n}\n}\n",
        )
    })??;
    drop(line);
    Ok(())
}

fn remove_leftovers() -> Result<()> {
    namespace::remove_leftovers(is_left_over)?;
    cgroup::remove_leftovers(is_left_over);
    Ok(())
}

fn make_host(spec: &HostSpec, number: usize, prefix: &str, networks: &[String]) -> Result<Host> {
    let name = format!("{prefix}-{}", spec.name);
    let host_byte = u8::try_from(number + 1)?;
    let port = |(nth, network): (usize, &String)| {
        let network = networks.iter().position(|known| known == network).context("an unknown network")?;
        let network_byte = u8::try_from(network)?;
        Ok(Port {
            interface: format!("eth{nth}"),
            switch_port: format!("h{number}e{nth}"),
            network,
            mac: [2, 0, 0, 0, network_byte, host_byte],
            v4: Ipv4Addr::new(10, 77, network_byte, host_byte),
            v6: Ipv6Addr::new(0xfd77, 0, 0, network_byte.into(), 0, 0, 0, host_byte.into()),
            egress: Mutex::default(),
        })
    };
    Ok(Host {
        name: spec.name.clone(),
        namespace: Namespace::create(&name)?,
        cgroup: Mutex::new(Cgroup::new(name)),
        ports: spec.networks.iter().enumerate().map(port).collect::<Result<_>>()?,
        networks: networks.to_vec(),
        islands: spec
            .islands
            .iter()
            .flat_map(|(_, addresses)| addresses)
            .map(|(address, _)| *address)
            .collect(),
    })
}

/// Lays the cables of a host and gives it its addresses.
fn plug_in(spec: &HostSpec, number: usize, host: &Host, switch: &Switch) -> Result<()> {
    let namespace = host.namespace.name();
    let (mut cables, mut setup) = (String::new(), String::new());
    for port in &host.ports {
        let Port { interface, switch_port, v4, v6, .. } = port;
        let mac = mac_text(port.mac);
        let _ = writeln!(
            cables,
            "link add {switch_port} type veth peer name {interface} address {mac} netns {namespace}"
        );
        let (net4, net6) = (prefix_of(*v4), v6.segments()[3]);
        // Routes of our own, to name the congestion control: the machine's default may be BBR, which has no
        // counterpart on an office's hosts, and only the first namespace can change it for all.
        let _ = write!(
            setup,
            "link set {interface} gso_max_size {SEGMENT_BYTES} up\n\
             addr add {v4}/24 dev {interface} noprefixroute\n\
             addr add {v6}/64 dev {interface} noprefixroute nodad\n\
             route add {net4}/24 dev {interface} scope link src {v4} congctl cubic\n\
             route add fd77:0:0:{net6:x}::/64 dev {interface} congctl cubic\n"
        );
    }
    for (nth, (interface, addresses)) in spec.islands.iter().enumerate() {
        let _ = writeln!(
            cables,
            "link add h{number}i{nth} type veth peer name {interface} netns {namespace}\n\
             link set h{number}i{nth} addrgenmode none up"
        );
        let _ = writeln!(setup, "link set {interface} up");
        for (address, length) in addresses {
            let nodad = if address.is_ipv6() { "nodad" } else { "" };
            let _ = writeln!(setup, "addr add {address}/{length} dev {interface} {nodad}");
        }
    }
    host.inside(|| std::fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0"))?
        .context("switching duplicate address detection off")?;
    switch.namespace().inside(|| tools::ip(&cables))??;
    host.inside(|| tools::ip(&setup))?
}

fn prefix_of(address: Ipv4Addr) -> Ipv4Addr {
    let [a, b, c, _] = address.octets();
    Ipv4Addr::new(a, b, c, 0)
}
