//! Where a request is, and how many go before it.

use super::central::Decode;
use super::{Desk, Spot, Ticket};

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// No replica can take it.
    Parked,
    /// In the line of a replica.
    Waiting {
        /// The replica's number.
        replica: usize,
        /// Requests before it in this line.
        ahead: usize,
    },
    /// It has a slot.
    Seated {
        /// The replica's number.
        replica: usize,
    },
    /// It has one, and its first token, and waits in the central line for another replica to decode it.
    Prefilled {
        /// The replica that has its KV.
        replica: usize,
        /// Requests before it in the central line.
        ahead: usize,
    },
    /// It has a slot there too: its KV is to be handed over.
    Moving {
        /// The replica that has its KV.
        from: usize,
        /// The one with the reserved slot.
        to: usize,
    },
}

impl Desk {
    /// Where a request is; none that has left is anywhere.
    pub fn place(&self, ticket: Ticket) -> Option<Place> {
        let entry = self.entries.get(&ticket)?;
        Some(match entry.spot {
            Spot::Parked => Place::Parked,
            Spot::Slot(replica, _) => match entry.decode {
                Decode::Here => Place::Seated { replica },
                Decode::Wanted => {
                    let ahead = self.central.iter().take_while(|waits| **waits != ticket).count();
                    Place::Prefilled { replica, ahead }
                }
                Decode::Reserved(to, _) => Place::Moving { from: replica, to },
            },
            Spot::Line(replica) => {
                Place::Waiting { replica, ahead: self.members[replica].line.range(..ticket).count() }
            }
        })
    }

    /// Its place in the line where it waits, counted from 1; 0 once it has a slot.
    pub(super) fn position(&self, ticket: Ticket) -> usize {
        let ahead = match self.entries.get(&ticket).map(|entry| entry.spot) {
            Some(Spot::Parked) => self.parked.range(..ticket).count(),
            Some(Spot::Line(replica)) => self.members[replica].line.range(..ticket).count(),
            Some(Spot::Slot(..)) | None => return 0,
        };
        ahead + 1
    }
}
