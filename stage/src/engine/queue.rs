//! The waiting room: first come, first served, bounded.
//!
//! It knows nothing of slots; whoever waits in it only learns how many are ahead.

use std::collections::VecDeque;

use super::events::{Event, EventSink};
use super::request::RequestKey;
use super::running::Ticket;

/// Requests that wait for a slot.
#[derive(Debug)]
pub(super) struct Queue<M, E> {
    waiting: VecDeque<Ticket<M, E>>,
    limit: usize,
}

impl<M, E: EventSink> Queue<M, E> {
    pub(super) fn new(limit: u32) -> Self {
        Self { waiting: VecDeque::new(), limit: limit as usize }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= self.limit
    }

    pub(super) fn holds(&self, key: RequestKey) -> bool {
        self.waiting.iter().any(|ticket| ticket.key == key)
    }

    /// Lets a request wait behind all others, and tells it so.
    pub(super) fn push(&mut self, ticket: Ticket<M, E>) {
        assert!(!self.is_full(), "at most {} requests wait", self.limit);
        self.waiting.push_back(ticket);
        self.announce(self.waiting.len() - 1);
    }

    /// Takes the request that has waited longest.
    pub(super) fn pop(&mut self) -> Option<Ticket<M, E>> {
        let first = self.waiting.pop_front();
        self.announce(0);
        first
    }

    /// Takes a request out of the middle, if it is here.
    pub(super) fn remove(&mut self, key: RequestKey) -> Option<Ticket<M, E>> {
        let position = self.waiting.iter().position(|ticket| ticket.key == key)?;
        let ticket = self.waiting.remove(position);
        self.announce(position);
        ticket
    }

    /// Takes everyone out, in order.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Ticket<M, E>> {
        self.waiting.drain(..)
    }

    /// Tells everyone from a position on where they are. Whoever no longer listens leaves, and those behind move up.
    fn announce(&mut self, from: usize) {
        let mut position = from;
        while let Some(ticket) = self.waiting.get_mut(position) {
            if ticket.events.send(Event::Queued { position: position as u32 }).is_ok() {
                position += 1;
            } else {
                self.waiting.remove(position);
            }
        }
    }
}
