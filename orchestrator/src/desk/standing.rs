//! Replicas that are to go: no request is bound to them any more, and when nobody has a slot there, nothing is lost with them.
//!
//! A number is never given again. What is left of a replica that was removed is an empty place, so that every number stands for
//! one replica in logs, metrics and plans; it costs some hundred bytes.

use std::time::Duration;

use super::Desk;
use super::member::Member;
use super::rates::PredictedRates;

/// Whether a replica is to stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It gets requests while it serves.
    Open,
    /// It gets none; those that have a slot keep it.
    Draining,
    /// It is no more.
    Gone,
}

impl Desk {
    /// A replica gets no request from now on. Who has a slot keeps it, who waits is bound anew.
    pub fn drain(&mut self, replica: usize, now: Duration) {
        if let Some(member) = self.open_or(replica, Standing::Draining) {
            member.standing = Standing::Draining;
            self.serve(replica, None, now);
        }
    }

    /// A replica that was drained is to stay after all; it gets requests when it is said to serve.
    pub fn resume(&mut self, replica: usize) {
        if let Some(member) = self.open_or(replica, Standing::Draining) {
            member.standing = Standing::Open;
        }
    }

    /// A replica is no more. Whoever still has a slot there has lost it, and says so as of any lost replica.
    pub fn remove(&mut self, replica: usize, now: Duration) {
        self.drain(replica, now);
        if let Some(member) = self.members.get_mut(replica) {
            *member = Member::new(1, PredictedRates::default());
            member.standing = Standing::Gone;
        }
    }

    fn open_or(&mut self, replica: usize, standing: Standing) -> Option<&mut Member> {
        let member = self.members.get_mut(replica)?;
        (member.standing == Standing::Open || member.standing == standing).then_some(member)
    }
}
