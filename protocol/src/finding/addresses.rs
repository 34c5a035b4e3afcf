//! Where a host may be reached: what the user says, or else the addresses of the host's interfaces, the likeliest first.
//!
//! A host cannot know which of its addresses others reach. It offers them all, and whoever wants to reach it tries them.

use std::net::{IpAddr, SocketAddr};

use crate::node::Address;

/// Of which interfaces the names begin with these, addresses are mostly of use within the host alone.
const VIRTUAL: [&str; 7] = ["docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "cni"];

/// The addresses that a process offers, when it listens at `bound`; what the user says overrides.
pub fn offered(bound: SocketAddr, advertised: &[Address]) -> Vec<Address> {
    if !advertised.is_empty() {
        return advertised.to_vec();
    }
    if !bound.ip().is_unspecified() {
        return vec![bound.into()];
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_else(|error| {
        tracing::warn!(%error, "the host's addresses cannot be listed: say with --advertise where it is reached");
        Vec::new()
    });
    let found = interfaces.into_iter().map(|interface| (interface.name.clone(), interface.ip()));
    let ips = likeliest_first(found.filter(|(_, ip)| bound.is_ipv6() || ip.is_ipv4()).collect());
    ips.into_iter().map(|ip| SocketAddr::new(ip, bound.port()).into()).collect()
}

/// Sorts interfaces' addresses, and drops those that lead nowhere from another host. Of a host without any other, the
/// loopback address remains, for peers on the same host.
fn likeliest_first(found: Vec<(String, IpAddr)>) -> Vec<IpAddr> {
    let mut ranked: Vec<(u8, IpAddr)> =
        found.iter().filter_map(|(name, ip)| Some((rank(name, *ip)?, *ip))).collect();
    if ranked.is_empty() {
        ranked = found.iter().filter(|(_, ip)| ip.is_loopback()).map(|(_, ip)| (0, *ip)).collect();
    }
    ranked.sort();
    ranked.dedup();
    ranked.into_iter().map(|(_, ip)| ip).collect()
}

/// The lower, the likelier; `None` for what no peer can reach.
fn rank(interface: &str, ip: IpAddr) -> Option<u8> {
    let is_virtual = VIRTUAL.iter().any(|prefix| interface.starts_with(prefix));
    match ip {
        _ if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() => None,
        // A link-local IPv6 address needs the name of the *peer's* interface to be reached.
        IpAddr::V6(v6) if v6.is_unicast_link_local() => None,
        _ if is_virtual => Some(3),
        IpAddr::V4(v4) if v4.is_link_local() => Some(2),
        IpAddr::V4(_) => Some(0),
        IpAddr::V6(_) => Some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(found: &[(&str, &str)]) -> Vec<String> {
        let found = found.iter().map(|(name, ip)| ((*name).to_owned(), ip.parse().unwrap())).collect();
        likeliest_first(found).iter().map(ToString::to_string).collect()
    }

    // Field case 27.
    #[test]
    fn addresses_of_virtual_and_link_local_networks_come_last() {
        let found = [
            ("docker0", "172.17.0.1"),
            ("eth1", "169.254.3.4"),
            ("lo", "127.0.0.1"),
            ("eth0", "fe80::1"),
            ("eth0", "fd00::7"),
            ("eth0", "192.168.1.7"),
        ];
        assert_eq!(sorted(&found), ["192.168.1.7", "fd00::7", "169.254.3.4", "172.17.0.1"]);
    }

    #[test]
    fn a_host_without_a_network_offers_its_loopback_address() {
        assert_eq!(sorted(&[("lo", "127.0.0.1"), ("lo", "::1")]), ["127.0.0.1", "::1"]);
    }

    #[test]
    fn what_the_user_says_overrides_and_a_single_bound_address_stands() {
        let bound: SocketAddr = "10.0.0.1:80".parse().unwrap();
        assert_eq!(offered(bound, &[]), [Address::from(bound)]);
        let said = Address::parse("desk.lan:81").unwrap();
        assert_eq!(offered("0.0.0.0:80".parse().unwrap(), std::slice::from_ref(&said)), [said]);
    }

    #[test]
    fn a_process_bound_to_all_addresses_offers_some() {
        let offered = offered("0.0.0.0:80".parse().unwrap(), &[]);
        assert!(!offered.is_empty() && offered.iter().all(|address| address.port() == 80), "{offered:?}");
    }
}
