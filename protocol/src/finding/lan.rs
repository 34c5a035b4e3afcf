//! Finding an orchestrator on the LAN by mDNS (RFC 6762, 6763). What is announced is a hint that anybody could give: where an
//! orchestrator may be, and of which cluster. Whether to trust it is decided elsewhere.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use mdns_sd::{ResolvedService, ServiceDaemon, ServiceEvent, ServiceInfo};
use thiserror::Error;
use tokio::time::Instant;

use crate::fingerprint::Fingerprint;
use crate::node::Address;

/// The service's type. Other programs of the same name would differ in `ca`.
const SERVICE: &str = "_shoal._tcp.local.";

/// The property with the fingerprint of the cluster's CA.
const CA: &str = "ca";

/// The property with shoal's version.
const VERSION: &str = "version";

/// Orchestrators that are told of. Tens on one LAN are a flood.
const MOST: usize = 32;

/// After the first was found, others are waited for this long: who is asked must not depend on who is quicker.
const GATHER: Duration = Duration::from_millis(750);

/// Why mDNS does not work here.
#[derive(Debug, Error)]
#[error("mDNS does not work on this host: {0}")]
pub struct LanError(#[from] mdns_sd::Error);

/// An orchestrator that announces itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announced {
    /// Of its cluster's CA, as it says.
    pub ca: Fingerprint,
    /// Its version of shoal, as it says.
    pub version: String,
    /// Where it is, the likeliest first.
    pub addresses: Vec<Address>,
}

/// An announcement, which ends when it is dropped.
pub struct Announcement {
    daemon: ServiceDaemon,
}

/// Announces an orchestrator that listens at `port`, on all of the host's interfaces.
pub fn announce(ca: &Fingerprint, version: &str, port: u16) -> Result<Announcement, LanError> {
    let daemon = ServiceDaemon::new()?;
    // Unique on the LAN: two clusters may have an orchestrator on the same host.
    let short: String = ca.to_string().chars().take(12).collect();
    let (instance, host) = (format!("shoal-{short}-{port}"), format!("shoal-{short}-{port}.local."));
    let ca = ca.to_string();
    let properties = [(CA, ca.as_str()), (VERSION, version)];
    let service = ServiceInfo::new(SERVICE, &instance, &host, "", port, &properties[..])?.enable_addr_auto();
    daemon.register(service)?;
    Ok(Announcement { daemon })
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // It says goodbye on the way; whether anybody hears it does not matter.
        let _ = self.daemon.shutdown();
    }
}

/// The orchestrators that announce themselves within `patience`; returns soon after the first was found.
pub async fn find(patience: Duration) -> Result<Vec<Announced>, LanError> {
    let daemon = ServiceDaemon::new()?;
    let events = daemon.browse(SERVICE)?;
    let mut found: BTreeMap<String, Announced> = BTreeMap::new();
    let mut until = Instant::now() + patience;
    while let Ok(Ok(event)) = tokio::time::timeout_at(until, events.recv_async()).await {
        let ServiceEvent::ServiceResolved(service) = event else { continue };
        let Some(announced) = read(&service) else { continue };
        if found.is_empty() {
            until = until.min(Instant::now() + GATHER);
        }
        found.insert(service.get_fullname().to_owned(), announced);
        if found.len() >= MOST {
            break;
        }
    }
    let _ = daemon.shutdown();
    Ok(found.into_values().collect())
}

fn read(service: &ResolvedService) -> Option<Announced> {
    let ca = Fingerprint::parse(service.get_property_val_str(CA)?).ok()?;
    let version =
        service.get_property_val_str(VERSION)?.chars().filter(|c| !c.is_control()).take(40).collect();
    let mut addresses: Vec<SocketAddr> = service
        .get_addresses()
        .iter()
        .map(mdns_sd::ScopedIp::to_ip_addr)
        // A link-local IPv6 address is of no use without the interface, which an address of ours does not carry.
        .filter(|ip| !matches!(ip, std::net::IpAddr::V6(v6) if v6.is_unicast_link_local()))
        .map(|ip| SocketAddr::new(ip, service.get_port()))
        .filter(|address| address.port() > 0)
        .collect();
    addresses.sort();
    let addresses: Vec<Address> = addresses.into_iter().map(Into::into).collect();
    (!addresses.is_empty()).then_some(Announced { ca, version, addresses })
}
