//! Rates: what `tc` is told so that a host sends no faster than its links. HTB sits at the sender's own interface, so
//! the sender is held back rather than losing frames, as by a network card.
//!
//! It must not know delays, nor who is cut off.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use cluster::BytesPerSecond;

use super::delay::Mac;

/// What may be sent at once. Below 64 kB a late timer costs goodput; where a pair has a delay line, that one spaces
/// the frames of a burst again.
const BURST: &str = "64kb";

/// No limit, and a burst that makes it none.
const UNLIMITED: &str = "100gbit";
const UNLIMITED_BURST: &str = "1mb";

/// What a switch's port keeps when two hosts send to one; beyond it frames are lost.
const PORT_QUEUE: &str = "512kb";

/// The first class of a pair; 1 is the interface's own and 2 for pairs without a limit.
const FIRST_PAIR: usize = 0x10;

/// What an interface has been told to limit.
#[derive(Debug, Default)]
pub(super) struct Egress {
    begun: bool,
    peers: BTreeSet<usize>,
}

impl Egress {
    /// Commands that limit what goes to one peer.
    pub(super) fn limit_peer(&mut self, interface: &str, peer: (usize, Mac), rate: BytesPerSecond) -> String {
        let mut commands = self.begin(interface);
        let (number, mac) = peer;
        let class = FIRST_PAIR + number;
        // The assured rate is next to nothing, so that all pairs borrow from the interface's class and share it.
        let rate = bits(rate);
        let _ = writeln!(
            commands,
            "class replace dev {interface} parent 1:1 classid 1:{class:x} htb rate 8kbit burst 1600 \
             ceil {rate} cburst {BURST} quantum 16000"
        );
        if self.peers.insert(number) {
            let mac = mac_text(mac);
            let _ = writeln!(
                commands,
                "filter add dev {interface} parent 1: protocol all prio 1 u32 match ether dst {mac} flowid 1:{class:x}"
            );
        }
        commands
    }

    /// Commands that limit all that an interface sends.
    pub(super) fn limit_all(&mut self, interface: &str, rate: BytesPerSecond) -> String {
        let mut commands = self.begin(interface);
        let _ = writeln!(
            commands,
            "class replace dev {interface} parent 1: classid 1:1 htb rate {} burst {BURST} cburst {BURST} quantum 16000",
            bits(rate)
        );
        commands
    }

    fn begin(&mut self, interface: &str) -> String {
        if std::mem::replace(&mut self.begun, true) {
            return String::new();
        }
        format!(
            "qdisc add dev {interface} root handle 1: htb default 2\n\
             class add dev {interface} parent 1: classid 1:1 htb rate {UNLIMITED} burst {UNLIMITED_BURST} \
             cburst {UNLIMITED_BURST} quantum 16000\n\
             class add dev {interface} parent 1:1 classid 1:2 htb rate 8kbit burst 1600 ceil {UNLIMITED} \
             cburst {UNLIMITED_BURST} quantum 16000\n"
        )
    }
}

/// A command that limits what a switch's port hands to its host.
pub(super) fn limit_port(port: &str, rate: BytesPerSecond) -> String {
    format!("qdisc replace dev {port} root tbf rate {} burst {BURST} limit {PORT_QUEUE}\n", bits(rate))
}

/// An address as the tools write it.
pub(super) fn mac_text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn bits(rate: BytesPerSecond) -> String {
    format!("{}bit", (rate.0 * 8.0).round() as u64)
}
