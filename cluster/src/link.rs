//! Links between hosts.

use serde::{Deserialize, Serialize};

use crate::{Bytes, Millis, NodeId};

/// A measured link, one way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkQuality {
    /// Bytes per second that one stream gets through.
    pub bandwidth: BytesPerSecond,
    /// From send to receipt of a small message.
    pub one_way_latency: Millis,
}

impl LinkQuality {
    /// The time until `amount` has arrived.
    pub fn transfer(self, amount: Bytes) -> Millis {
        Millis(amount.0 as f64 / self.bandwidth.0 * 1e3 + self.one_way_latency.0)
    }
}

/// A data rate.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct BytesPerSecond(pub f64);

impl BytesPerSecond {
    /// From the unit in which networks are sold.
    pub const fn from_mbit(megabits_per_second: f64) -> Self {
        Self(megabits_per_second * 1e6 / 8.0)
    }

    /// In the unit in which networks are sold.
    pub const fn mbit(self) -> f64 {
        self.0 * 8.0 / 1e6
    }
}

/// The link from one host to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The sending host.
    pub from: NodeId,
    /// The receiving host.
    pub to: NodeId,
    /// What it can do.
    pub quality: LinkQuality,
}

/// All links of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Links {
    /// Links that were measured, or that are known to be special.
    pub measured: Vec<Link>,
    /// Every pair that is not listed; none where such a pair cannot talk.
    pub otherwise: Option<LinkQuality>,
}

impl Links {
    /// Every pair of hosts has the same link.
    pub const fn uniform(quality: LinkQuality) -> Self {
        Self { measured: Vec::new(), otherwise: Some(quality) }
    }

    /// The link from one host to another, if they can talk.
    pub fn between(&self, from: &NodeId, to: &NodeId) -> Option<LinkQuality> {
        let listed = self.measured.iter().find(|link| link.from == *from && link.to == *to);
        listed.map(|link| link.quality).or(self.otherwise)
    }
}

/// How hidden rows travel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkEncoding {
    /// As computed: exact.
    #[default]
    F32,
    /// Rounded to half precision.
    F16,
    /// Blocks of 32 with an f16 scale.
    Q8_0,
}

impl LinkEncoding {
    /// All of them, the exact one first.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Q8_0];

    /// Bytes on the wire for each byte of f32.
    pub const fn share(self) -> f64 {
        match self {
            Self::F32 => 1.0,
            Self::F16 => 0.5,
            Self::Q8_0 => 34.0 / 128.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_link_wins_over_the_common_one() {
        let quality =
            |mbit| LinkQuality { bandwidth: BytesPerSecond::from_mbit(mbit), one_way_latency: Millis(0.15) };
        let (a, b) = (NodeId("a".into()), NodeId("b".into()));
        let mut links = Links::uniform(quality(920.0));
        links.measured.push(Link { from: a.clone(), to: b.clone(), quality: quality(100.0) });
        assert_eq!(links.between(&a, &b), Some(quality(100.0)));
        assert_eq!(links.between(&b, &a), Some(quality(920.0)));
        links.otherwise = None;
        assert_eq!(links.between(&b, &a), None);
    }

    #[test]
    fn a_transfer_takes_its_bytes_and_the_latency() {
        let link = LinkQuality { bandwidth: BytesPerSecond(1000.0), one_way_latency: Millis(2.0) };
        assert_eq!(link.transfer(Bytes(500)), Millis(502.0));
    }
}
