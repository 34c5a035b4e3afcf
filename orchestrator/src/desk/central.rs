//! Roles, and the central line: requests whose prompts were computed where nothing is decoded wait here for a decode slot.
//!
//! One line for all replicas that decode, because a slot is a slot wherever it becomes free first: lines of their own would leave
//! slots idle beside requests that wait, the more so since nobody knows how long an answer will be. Who has waited longest
//! goes first, as in the planner's simulator: on a replica that does both, the head of its own line if that is older. Among several
//! replicas with a free slot the [policy](crate::router::Policy::decode) chooses.
//!
//! A slot is reserved before the KV is sent; the slot where it was computed is held until it has arrived, so no more requests
//! wait here than replicas that only prefill have slots. If the reserved slot is lost meanwhile, the request goes back to the head of
//! the line. Where one role has no replica that serves, those of the other do both: a prompt goes to a decode replica, and a
//! request goes on where its prompt was computed.

use std::time::Duration;

use cluster::{Epoch, Role};

use super::{Desk, Entry, Spot, Ticket, seat_of};
use crate::router::DecodeView;

/// What a request does in its slot, as it was when it got it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Errand {
    /// Its prompt is computed, and then it is held for another replica.
    Prompt,
    /// It stays.
    Whole,
}

/// What became of a request's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kv {
    /// It is in the reserved slot.
    Arrived,
    /// The prompt is computed there again.
    Missing,
}

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

    /// Whether the incarnation of a replica is gone in whose slot a request is.
    pub fn has_lost_its_slot(&self, ticket: Ticket) -> bool {
        let spot = self.entries.get(&ticket).map(|entry| entry.spot);
        matches!(spot, Some(Spot::Slot(replica, epoch)) if self.members[replica].epoch != epoch)
    }

    /// What a request has its slot for.
    pub fn errand(&self, ticket: Ticket) -> Errand {
        self.entries.get(&ticket).map_or(Errand::Whole, |entry| entry.errand)
    }

    /// A request that has a slot for its prompt alone does all in it.
    pub fn do_whole(&mut self, ticket: Ticket) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.errand = Errand::Whole;
        }
    }

    /// A request goes on in the slot that was reserved for it at `to`. False if it is not reserved any more.
    pub fn handed_over(&mut self, ticket: Ticket, to: usize, kv: Kv, now: Duration) -> bool {
        let Some(entry) = self.entries.get_mut(&ticket) else { return false };
        let Decode::Reserved(reserved, epoch) = entry.decode else { return false };
        if reserved != to {
            return false;
        }
        if let Some(from) = seat_of(&mut self.members, entry.spot) {
            from.resume(now);
            from.unseat(entry.share(), now);
        }
        (entry.spot, entry.decode, entry.errand) = (Spot::Slot(to, epoch), Decode::Here, Errand::Whole);
        if let Some(member) = seat_of(&mut self.members, entry.spot) {
            member.resume(now);
        }
        match kv {
            Kv::Arrived => self.moved.push(ticket),
            Kv::Missing => self.compute_again(ticket, now),
        }
        self.settle(now);
        true
    }

    /// A request has its first token: it goes on where it is, or wants a slot elsewhere.
    pub(super) fn prefilled(&mut self, ticket: Ticket, now: Duration) {
        let Some(entry) = self.entries.get_mut(&ticket).filter(|entry| entry.errand == Errand::Prompt) else {
            return;
        };
        let Some(member) = seat_of(&mut self.members, entry.spot) else { return };
        if member.generates {
            // Who would have taken it has gone meanwhile.
            self.compute_again(ticket, now);
            return;
        }
        entry.decode = Decode::Wanted;
        member.pause(now);
        self.central.push_back(ticket);
        self.moved.push(ticket);
        self.settle(now);
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
        let ended = std::mem::replace(&mut entry.decode, Decode::Here);
        if ended == Decode::Here {
            return;
        }
        if let Some(from) = seat_of(&mut self.members, entry.spot) {
            from.resume(now);
        }
        if let Decode::Reserved(to, epoch) = ended {
            if let Some(member) = seat_of(&mut self.members, Spot::Slot(to, epoch)) {
                member.resume(now);
                member.unseat(entry.share(), now);
            }
        } else {
            self.central.retain(|waits| *waits != ticket);
        }
    }

    /// Who serves or does what has changed: slots that were reserved may be gone, or all who decode.
    pub(super) fn review_decoders(&mut self, now: Duration) {
        let any_decodes = self.serving().any(|member| member.role != Role::Prefill);
        for member in &mut self.members {
            member.generates = member.role != Role::Prefill || !any_decodes;
        }
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
            self.want_again(ticket, now);
        }
        for ticket in self.central.clone() {
            if self.may_stay(ticket) {
                self.end_handover(ticket, now);
                self.compute_again(ticket, now);
            }
        }
        self.settle(now);
    }

    /// Seconds that a request which waits for a slot of this replica waits for those who hold its slots to be taken over.
    pub(super) fn decode_wait(&self, replica: usize) -> f64 {
        let member = &self.members[replica];
        if member.generates || member.paused == 0 {
            return 0.0;
        }
        let ahead = (member.line.len() + 1).saturating_sub(member.slots.saturating_sub(member.held));
        let decoders = self.serving().filter(|member| member.role != Role::Prefill);
        let answers_per_second: f64 =
            decoders.map(|member| member.tokens_per_second() / self.mean_output.max(1.0)).sum();
        ahead as f64 / answers_per_second.max(f64::MIN_POSITIVE)
    }

    /// Whether a request in the central line need not go elsewhere any more: nobody decodes, or its own replica does by now.
    fn may_stay(&self, ticket: Ticket) -> bool {
        let spot = self.entries.get(&ticket).map(|entry| entry.spot);
        matches!(spot, Some(Spot::Slot(replica, _)) if self.members[replica].generates)
    }

    fn want_again(&mut self, ticket: Ticket, now: Duration) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        entry.decode = Decode::Wanted;
        if let Some(from) = seat_of(&mut self.members, entry.spot) {
            from.pause(now);
        }
        self.central.push_front(ticket);
        self.moved.push(ticket);
    }

    /// A request is sent once more to the replica in whose slot it is, with the tokens it has as its prompt's end.
    fn compute_again(&mut self, ticket: Ticket, now: Duration) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        entry.errand = Errand::Whole;
        if let Some(member) = seat_of(&mut self.members, entry.spot) {
            let prompt = entry.share().prompt;
            entry.prefill = Some(prompt);
            member.computes(prompt, now);
        }
        self.moved.push(ticket);
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
