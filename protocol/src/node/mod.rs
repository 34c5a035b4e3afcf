//! What a node says of itself and of its links, checked. Members of a cluster are trusted not to lie, but not to be of the
//! same version, free of defects, or alone in choosing their names: everything is bounded, and no number is taken that
//! would not make sense further on.

mod description;
mod measurement;
mod order;
mod worker_news;

use std::fmt;

use cluster::NodeId;
use thiserror::Error;

pub use description::{Build, DeviceFacts, DeviceKind, NodeFacts, VersionMismatch};
pub use measurement::{
    FrameTime, LinkMeasurement, LinkRequest, MAX_N_EMBD, PREFILL_ROWS, Receipt, probe_sizes,
};
pub use order::{StageOrder, Supply};
pub use worker_news::WorkerNews;

use crate::v1;

/// Longest name of a node: that of a DNS label.
const LONGEST_NAME: usize = 63;

/// Addresses that a node may offer. Hosts with dozens of virtual networks have as many; more is a defect.
const MOST_ADDRESSES: usize = 64;

/// Longest address: a DNS name and a port.
const LONGEST_ADDRESS: usize = 255 + 6;

/// Longest text of any other kind: a product's name, a version.
const LONGEST_TEXT: usize = 256;

/// Longest of a process's words: they may be a line of llama.cpp's log.
const LONGEST_WORDS: usize = 2000;

/// A name that no node can have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0:?} cannot be a node's name: it takes 1 to 63 letters, digits, '-', '_' and '.', and begins with a letter or digit"
)]
pub struct BadName(pub String);

/// A received message that cannot be used.
#[derive(Debug, Clone, PartialEq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum BadMessage {
    #[error(transparent)]
    Name(#[from] BadName),
    #[error("{0:?} is not an address of the form host:port")]
    Address(String),
    #[error("{what} lacks {field}")]
    Missing { what: &'static str, field: &'static str },
    #[error("{what} has {got} {field}, and may have {limit}")]
    TooMany { what: &'static str, field: &'static str, got: usize, limit: usize },
    #[error("{what}: {field} is {got}, but must be {wanted}")]
    Number { what: &'static str, field: &'static str, got: f64, wanted: &'static str },
    #[error("{what}: {reason}")]
    Other { what: &'static str, reason: String },
}

/// A node to be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: NodeId,
    /// Which of its processes.
    pub instance: String,
    /// Where it may be reached, the likeliest first.
    pub addresses: Vec<Address>,
}

/// `host:port`, the host a name or an IP address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    text: String,
    /// Where the port begins.
    colon: usize,
    port: u16,
}

impl Address {
    /// Reads `host:port`; an IPv6 address stands in brackets.
    pub fn parse(text: &str) -> Result<Self, BadMessage> {
        let bad = || BadMessage::Address(text.chars().take(LONGEST_ADDRESS).collect());
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let port = port.parse().ok().filter(|&port| port > 0).ok_or_else(bad)?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let good = match bracketed {
            Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
            None => {
                let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
                !host.is_empty() && host.chars().all(plain)
            }
        };
        if !good || text.len() > LONGEST_ADDRESS {
            return Err(bad());
        }
        Ok(Self { colon: host.len(), port, text: text.to_owned() })
    }

    /// The host, an IPv6 address in brackets.
    pub fn host(&self) -> &str {
        &self.text[..self.colon]
    }

    /// The port.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The same host at another port.
    pub fn with_port(&self, port: u16) -> Self {
        Self { text: format!("{}:{port}", self.host()), colon: self.colon, port }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<std::net::SocketAddr> for Address {
    fn from(address: std::net::SocketAddr) -> Self {
        let text = address.to_string();
        let colon = text.rfind(':').unwrap_or(text.len());
        Self { text, colon, port: address.port() }
    }
}

impl Peer {
    /// Checks a received peer.
    pub fn check(peer: Option<v1::Peer>) -> Result<Self, BadMessage> {
        let v1::Peer { name, instance, addresses } =
            peer.ok_or(BadMessage::Missing { what: "a request", field: "its peer" })?;
        let addresses = check_addresses("a peer", &addresses)?;
        if addresses.is_empty() {
            return Err(BadMessage::Missing { what: "a peer", field: "addresses" });
        }
        Ok(Self { name: check_name(&name)?, instance: check_text("a peer", instance)?, addresses })
    }
}

impl From<Peer> for v1::Peer {
    fn from(Peer { name, instance, addresses }: Peer) -> Self {
        Self { name: name.0, instance, addresses: addresses.iter().map(ToString::to_string).collect() }
    }
}

/// Whether a node may have this name.
pub fn check_name(name: &str) -> Result<NodeId, BadName> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let good = name.len() <= LONGEST_NAME
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(plain);
    if good { Ok(NodeId(name.to_owned())) } else { Err(BadName(name.chars().take(LONGEST_NAME).collect())) }
}

/// Whether a profile can be asked for in these words: they become arguments of a command, and the model is one of the
/// node's own.
pub fn check_profile_request(request: &v1::ProfileRequest) -> Result<(), BadMessage> {
    let what = "a profile's request";
    if request.model.is_empty() {
        return Err(BadMessage::Missing { what, field: "its model" });
    }
    for text in [&request.model, &request.device] {
        check_text(what, text.clone())?;
        if text.starts_with('-') || text.contains(['/', '\\']) {
            return Err(BadMessage::Other { what, reason: format!("{text:?} is no name") });
        }
    }
    Ok(())
}

pub(crate) fn check_addresses(what: &'static str, addresses: &[String]) -> Result<Vec<Address>, BadMessage> {
    let got = addresses.len();
    if got > MOST_ADDRESSES {
        return Err(BadMessage::TooMany { what, field: "addresses", got, limit: MOST_ADDRESSES });
    }
    addresses.iter().map(|address| Address::parse(address)).collect()
}

/// Text that is shown to people: not endless, and nothing that moves a terminal's cursor.
pub(crate) fn check_text(what: &'static str, text: String) -> Result<String, BadMessage> {
    let got = text.len();
    if got > LONGEST_TEXT {
        return Err(BadMessage::TooMany { what, field: "bytes of text", got, limit: LONGEST_TEXT });
    }
    if text.chars().any(char::is_control) {
        return Err(BadMessage::Other { what, reason: format!("its text {text:?} has control characters") });
    }
    Ok(text)
}

pub(crate) fn limit(
    what: &'static str,
    field: &'static str,
    got: usize,
    limit: usize,
) -> Result<(), BadMessage> {
    if got > limit { Err(BadMessage::TooMany { what, field, got, limit }) } else { Ok(()) }
}

/// What a process said, for people: not endless, and without anything that moves a terminal's cursor.
pub fn clean_text(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST_WORDS).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // Field case 29.
    #[test]
    fn names_and_literals_of_both_kinds_are_addresses() {
        for (text, host, port) in [
            ("desk:8470", "desk", 8470),
            ("10.0.0.1:1", "10.0.0.1", 1),
            ("[::1]:65535", "[::1]", 65535),
            ("a-b.local:80", "a-b.local", 80),
        ] {
            let address = Address::parse(text).unwrap();
            assert_eq!((address.host(), address.port(), address.to_string().as_str()), (host, port, text));
            assert_eq!(address.with_port(9).to_string(), format!("{host}:9"));
        }
        let socket: std::net::SocketAddr = "[fd00::1]:80".parse().unwrap();
        assert_eq!(Address::from(socket), Address::parse("[fd00::1]:80").unwrap());
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in
            ["", "desk", "desk:", ":80", "desk:0", "desk:65536", "::1:80", "[desk]:80", "a b:80", "a/b:1"]
        {
            assert!(Address::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_name_is_short_and_plain() {
        assert!(check_name("desk-2.lan_x").is_ok());
        for name in ["", "-x", "a b", "a/b", "ä", &"x".repeat(64)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_profile_is_asked_for_by_names_alone() {
        let check = |model: &str, device: &str| {
            let (model, device) = (model.into(), device.into());
            check_profile_request(&v1::ProfileRequest { model, device, seconds: 1 })
        };
        assert!(check("SmolLM2", "").is_ok() && check("m", "CPU").is_ok());
        for (model, device) in [("", ""), ("-o", ""), ("m", "--output=x"), ("a\nb", ""), ("../a", "")] {
            assert!(check(model, device).is_err(), "{model:?} {device:?}");
        }
    }

    #[test]
    fn a_peer_needs_an_address() {
        let peer = |addresses: Vec<String>| v1::Peer { name: "a".into(), instance: "i".into(), addresses };
        assert!(Peer::check(Some(peer(vec!["desk:1".into()]))).is_ok());
        assert!(Peer::check(Some(peer(vec![]))).is_err());
        assert!(Peer::check(Some(peer(vec!["desk:1".into(); 65]))).unwrap_err().to_string().contains("65"));
        assert!(Peer::check(None).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_an_address_or_refused(text in "\\PC{0,40}", port in any::<u16>()) {
            for text in [text.clone(), format!("{text}:{port}"), format!("[{text}]:{port}")] {
                if let Ok(address) = Address::parse(&text) {
                    prop_assert_eq!(address.to_string(), text);
                }
            }
        }
    }
}
