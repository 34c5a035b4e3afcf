//! How the processes of a cluster find each other on a network: which addresses a host offers, which of a peer's leads to
//! the peer, and who announces itself on the LAN. What they then say to each other is not decided here.

pub mod addresses;
pub mod lan;
pub mod reach;
