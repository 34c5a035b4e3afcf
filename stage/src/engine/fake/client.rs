//! Clients that remember what they were told and when, and complain of any event that must not come.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use super::super::{Closed, Event, EventSink, FailureKind, FinishReason, Token};

/// The virtual clock and the order of starts, shared by all clients of a test.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Log {
    pub(in super::super) now: Rc<Cell<u64>>,
    /// Keys in the order of their `Started`.
    pub(in super::super) started: Rc<RefCell<Vec<u64>>>,
}

/// One admission as its client sees it.
#[derive(Debug, Default)]
pub(in super::super) struct Client {
    pub(in super::super) events: Vec<(u64, Event)>,
    /// Go away at this many events.
    pub(in super::super) leaves_after: Option<usize>,
    pub(in super::super) left: bool,
}

/// A client's end of the stream.
#[derive(Debug)]
pub(in super::super) struct Sink {
    pub(in super::super) key: u64,
    pub(in super::super) log: Log,
    pub(in super::super) client: Rc<RefCell<Client>>,
}

impl EventSink for Sink {
    fn send(&mut self, event: Event) -> Result<(), Closed> {
        let mut client = self.client.borrow_mut();
        assert!(!client.left, "request {} is cancelled and told {event:?}", self.key);
        assert!(client.end().is_none(), "request {} is over and told {event:?}", self.key);
        if client.leaves_after == Some(client.events.len()) {
            client.left = true;
            return Err(Closed);
        }
        client.check_order(&event);
        if matches!(event, Event::Started { .. }) {
            self.log.started.borrow_mut().push(self.key);
        }
        client.events.push((self.log.now.get(), event));
        Ok(())
    }
}

impl Client {
    pub(in super::super) fn tokens(&self) -> Vec<Token> {
        self.token_events().map(|(_, id)| id).collect()
    }

    /// The longest time between two of its tokens.
    pub(in super::super) fn longest_gap(&self) -> Duration {
        let times: Vec<_> = self.token_events().map(|(at, _)| at).collect();
        let gap = times.windows(2).map(|pair| pair[1] - pair[0]).max();
        Duration::from_millis(gap.unwrap_or(0))
    }

    pub(in super::super) fn started(&self) -> Option<(u32, u32)> {
        self.events.iter().find_map(|(_, event)| match event {
            Event::Started { slot, cached } => Some((slot.0, *cached)),
            _ => None,
        })
    }

    pub(in super::super) fn positions(&self) -> Vec<u32> {
        let position = |(_, event): &(u64, Event)| match event {
            Event::Queued { position } => Some(*position),
            _ => None,
        };
        self.events.iter().filter_map(position).collect()
    }

    pub(in super::super) fn finish_reason(&self) -> Option<FinishReason> {
        match self.end() {
            Some(Event::Finished(finished)) => Some(finished.reason),
            _ => None,
        }
    }

    pub(in super::super) fn failure(&self) -> Option<(FailureKind, &str)> {
        match self.end() {
            Some(Event::Failed { kind, message }) => Some((*kind, message)),
            _ => None,
        }
    }

    /// The last event, if it is one that ends a request.
    pub(in super::super) fn end(&self) -> Option<&Event> {
        let (_, last) = self.events.last()?;
        matches!(last, Event::Finished(_) | Event::Failed { .. }).then_some(last)
    }

    fn token_events(&self) -> impl Iterator<Item = (u64, Token)> {
        self.events.iter().filter_map(|(at, event)| match event {
            Event::Token(token) => Some((*at, token.id)),
            _ => None,
        })
    }

    fn check_order(&self, event: &Event) {
        match event {
            Event::Queued { position } => {
                assert!(self.started().is_none(), "queued after its start");
                let before = self.positions().last().copied();
                assert!(before.is_none_or(|before| *position < before), "moved back in the queue");
            }
            Event::Started { .. } => {
                assert!(self.started().is_none(), "started twice");
                let last = self.positions().last().copied();
                assert!(last.is_none_or(|last| last == 0), "started from the middle of the queue");
            }
            Event::Token(_) => assert!(self.started().is_some(), "a token before the start"),
            Event::Finished(finished) => {
                assert_eq!(finished.generated_tokens as usize, self.token_events().count());
            }
            Event::Failed { .. } => {}
            Event::Held { .. } | Event::HandedOver(_) => panic!("nobody asked for a hand-off: {event:?}"),
        }
    }
}
