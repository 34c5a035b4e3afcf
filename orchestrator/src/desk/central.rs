//! Roles, and the central line: requests whose prompts were computed where nothing is decoded wait here for a decode slot.
//!
//! One line for all replicas that decode, because a slot is a slot wherever it becomes free first: lines of their own would leave
//! slots idle beside requests that wait, the more so since nobody knows how long an answer will be. Who has waited longest
//! goes first, as in the planner's simulator: on a replica that does both, the head of its own line if that is older. Among several
//! replicas with a free slot the [policy](crate::router::Policy::decode) chooses.
//!
//! A slot is reserved before the KV is sent; the slot where it was computed is held until it has arrived. If the reserved
//! one is lost meanwhile, the request goes back to the head of the line. Where one role has no replica that serves, those of the
//! other do both: a prompt goes to a decode replica, and a request stays where its prompt was computed.

use std::time::Duration;

use cluster::{Epoch, Role};

use super::{Desk, Entry, Spot, Ticket, seat_of};
use crate::router::DecodeView;

/// Where the second phase of a request that has a slot takes place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decode {
    /// Where the first does.
    Here,
    /// In the central line.
    Wanted,
    /// In a slot of this replica, to which its KV is on its way.
    Reserved(usize, Epoch),
}

impl Desk {
    /// A replica's role is another from now on. Who decodes there goes on doing so.
    pub fn set_role(&mut self, replica: usize, role: Role, now: Duration) {
        let Some(member) = self.members.get_mut(replica).filter(|member| member.role != role) else { return };
        member.role = role;
        self.review_decoders(now);
        self.bind_all_anew(now);
    }

    /// A request's KV is in the slot that was reserved for it.
    pub fn handed_over(&mut self, ticket: Ticket, now: Duration) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        let Decode::Reserved(to, epoch) = entry.decode else { return };
        if let Some(from) = seat_of(&mut self.members, entry.spot) {
            from.unseat(entry.share(), now);
        }
        (entry.spot, entry.decode) = (Spot::Slot(to, epoch), Decode::Here);
        self.moved.push(ticket);
        self.settle(now);
    }

    /// A request has its first token: it decodes where it is, or wants a slot elsewhere.
    pub(super) fn prefilled(&mut self, ticket: Ticket, now: Duration) {
        if !self.has_decoder() {
            return;
        }
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        let role = seat_of(&mut self.members, entry.spot).map(|member| member.role);
        if role == Some(Role::Prefill) {
            entry.decode = Decode::Wanted;
            self.central.push_back(ticket);
            self.moved.push(ticket);
            self.settle(now);
        }
    }

    /// Gives free slots to whoever has waited longest.
    pub(super) fn settle(&mut self, now: Duration) {
        let head = self.central.front().copied();
        for replica in 0..self.members.len() {
            self.fill(replica, head, now);
        }
        if head.is_some() {
            self.reserve_slots(now);
            for replica in 0..self.members.len() {
                self.fill(replica, None, now);
            }
        }
    }

    /// Takes a request out of what it has of the second phase.
    pub(super) fn end_handover(&mut self, ticket: Ticket, now: Duration) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        match std::mem::replace(&mut entry.decode, Decode::Here) {
            Decode::Here => {}
            Decode::Wanted => self.central.retain(|waits| *waits != ticket),
            Decode::Reserved(to, epoch) => {
                if let Some(member) = seat_of(&mut self.members, Spot::Slot(to, epoch)) {
                    member.unseat(entry.share(), now);
                }
            }
        }
    }

    /// Who serves or does what has changed: slots that were reserved may be gone, or all who decode.
    pub(super) fn review_decoders(&mut self, now: Duration) {
        let members = &self.members;
        let is_gone = |entry: &Entry| match entry.decode {
            Decode::Reserved(to, epoch) => members[to].serving != Some(epoch),
            Decode::Here | Decode::Wanted => false,
        };
        let gone = self.entries.iter().filter(|(_, entry)| is_gone(entry)).map(|(ticket, _)| *ticket);
        let mut gone: Vec<Ticket> = gone.collect();
        // Oldest first at the head.
        gone.sort_unstable_by(|a, b| b.cmp(a));
        for ticket in gone {
            self.end_handover(ticket, now);
            self.want_again(ticket);
        }
        for ticket in std::mem::take(&mut self.central) {
            if self.may_stay(ticket) {
                self.stay(ticket);
            } else {
                self.central.push_back(ticket);
            }
        }
        self.settle(now);
    }

    /// Whether a request in the central line need not go elsewhere any more: nobody decodes, or its own replica does by now.
    fn may_stay(&self, ticket: Ticket) -> bool {
        let spot = self.entries.get(&ticket).map(|entry| entry.spot);
        let is_where_one_decodes =
            matches!(spot, Some(Spot::Slot(replica, _)) if self.members[replica].role != Role::Prefill);
        is_where_one_decodes || !self.has_decoder()
    }

    fn want_again(&mut self, ticket: Ticket) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.decode = Decode::Wanted;
            self.central.push_front(ticket);
            self.moved.push(ticket);
        }
    }

    fn stay(&mut self, ticket: Ticket) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.decode = Decode::Here;
            self.moved.push(ticket);
        }
    }

    fn has_decoder(&self) -> bool {
        self.serving().any(|member| member.role != Role::Prefill)
    }

    /// Reserves slots for the central line as far as there are any.
    fn reserve_slots(&mut self, now: Duration) {
        while let Some(&ticket) = self.central.front() {
            let members = self.members.iter().enumerate();
            let free = members.filter(|(_, member)| member.role != Role::Prefill && member.has_free_slot());
            let views: Vec<DecodeView> = free.map(|(replica, member)| member.decode_view(replica)).collect();
            let Some(last) = views.len().checked_sub(1) else { return };
            let to = views[self.policy.decode(&views).min(last)].replica;
            self.central.pop_front();
            let Some(entry) = self.entries.get_mut(&ticket) else { continue };
            let member = &mut self.members[to];
            member.reserve(entry.share(), now);
            entry.decode = Decode::Reserved(to, member.epoch);
            self.moved.push(ticket);
        }
    }
}
