//! The [desk](crate::desk) as tasks use it: behind a lock, with the present time, and with a bell for each request.
//!
//! A [`Seat`] is a request's hold on its place, wherever that is. Dropping it leaves the desk, so a client that goes away frees
//! its slot or its place in line, and the next moves up at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cluster::{Epoch, Role};
use rustc_hash::FxHashMap;
use tokio::sync::{Notify, oneshot};

use crate::desk::{Desk, Errand, Full, Kv, Leaving, Load, Move, Order, Place, PredictedRates, Ticket};

/// The desk, shared.
pub(crate) struct Dispatch {
    inner: Mutex<Inner>,
    started: Instant,
}

struct Inner {
    desk: Desk,
    bells: FxHashMap<Ticket, Arc<Notify>>,
    /// Who waits until nobody has a slot of a replica.
    vacancies: Vec<(usize, oneshot::Sender<()>)>,
}

/// A request's place at the desk, until it is dropped.
pub(crate) struct Seat {
    dispatch: Arc<Dispatch>,
    ticket: Ticket,
    bell: Arc<Notify>,
    expected: Expected,
    leaving: Leaving,
}

/// What a request was told when it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Expected {
    /// Until it has a slot, and those before it their first tokens, as predicted.
    pub(crate) wait: Duration,
    /// Its place in line: 1 is the next to get a slot, 0 has one.
    pub(crate) position: usize,
}

/// What waits, and what may.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Queue {
    pub(crate) waiting: usize,
    pub(crate) limit: usize,
    /// With their first token, for a slot elsewhere.
    pub(crate) waiting_to_decode: usize,
    /// Of each replica.
    pub(crate) loads: Vec<Load>,
}

impl Dispatch {
    pub(crate) fn new(desk: Desk) -> Arc<Self> {
        let inner = Mutex::new(Inner { desk, bells: FxHashMap::default(), vacancies: Vec::new() });
        Arc::new(Self { inner, started: Instant::now() })
    }

    /// A replica serves in an epoch, or does not.
    pub(crate) fn serve(&self, replica: usize, serving: Option<Epoch>) {
        self.with_desk(|desk, now| desk.serve(replica, serving, now));
    }

    /// Adds a replica that does not serve yet, and gives its number.
    pub(crate) fn add(&self, slots: u32, predicted: PredictedRates) -> usize {
        self.with_desk(|desk, _| desk.add(slots, predicted))
    }

    /// A replica's role is another from now on.
    pub(crate) fn set_role(&self, replica: usize, role: Role) {
        self.with_desk(|desk, now| desk.set_role(replica, role, now));
    }

    /// Answers are expected to have so many tokens, until they are seen to have others.
    pub(crate) fn expect_output(&self, mean: f64) {
        self.with_desk(|desk, _| desk.expect_output(mean));
    }

    /// A sequence was moved, or was to be.
    pub(crate) fn saw_move(&self, seen: Move) {
        self.with_desk(|desk, now| desk.saw_move(seen, now));
    }

    /// Seconds that moves of so many tokens take.
    pub(crate) fn move_seconds(&self, tokens: f64) -> Option<f64> {
        self.lock().desk.move_seconds(tokens)
    }

    /// A replica gets no request from now on.
    pub(crate) fn drain(&self, replica: usize) {
        self.with_desk(|desk, now| desk.drain(replica, now));
    }

    /// It is to stay after all.
    pub(crate) fn resume(&self, replica: usize) {
        self.with_desk(|desk, _| desk.resume(replica));
    }

    /// A replica is no more.
    pub(crate) fn remove(&self, replica: usize) {
        self.with_desk(|desk, now| desk.remove(replica, now));
    }

    /// Waits until nobody has a slot of a replica.
    pub(crate) async fn vacant(&self, replica: usize) {
        let vacant = {
            let mut inner = self.lock();
            let (told, vacant) = oneshot::channel();
            inner.vacancies.push((replica, told));
            inner.tell_vacancies();
            vacant
        };
        // Whoever would tell is told of by `self`.
        let _ = vacant.await;
    }

    /// Takes a request in.
    pub(crate) fn arrive(self: &Arc<Self>, order: Order) -> Result<Seat, Full> {
        let mut inner = self.lock();
        let arrival = inner.desk.arrive(order, self.started.elapsed())?;
        let bell = Arc::new(Notify::new());
        inner.bells.insert(arrival.ticket, Arc::clone(&bell));
        Ok(Seat {
            dispatch: Arc::clone(self),
            ticket: arrival.ticket,
            bell,
            expected: Expected {
                // Finite and never negative.
                wait: Duration::try_from_secs_f64(arrival.wait).unwrap_or(Duration::MAX),
                position: arrival.position,
            },
            leaving: Leaving::Early,
        })
    }

    /// For people and metrics.
    pub(crate) fn queue(&self) -> Queue {
        let inner = self.lock();
        let (waiting, limit) = (inner.desk.waiting(), inner.desk.limit());
        let waiting_to_decode = inner.desk.waiting_to_decode();
        Queue { waiting, limit, waiting_to_decode, loads: inner.desk.loads().collect() }
    }

    /// Does something at the desk, and rings for those whom it moved.
    fn with_desk<T>(&self, act: impl FnOnce(&mut Desk, Duration) -> T) -> T {
        let mut inner = self.lock();
        let done = act(&mut inner.desk, self.started.elapsed());
        let moved = inner.desk.take_moved();
        moved.iter().filter_map(|ticket| inner.bells.get(ticket)).for_each(|bell| bell.notify_one());
        inner.tell_vacancies();
        done
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Tells those who wait for a replica where nobody has a slot now.
    fn tell_vacancies(&mut self) {
        if self.vacancies.is_empty() {
            return;
        }
        let held: Vec<usize> = self.desk.loads().map(|load| load.held).collect();
        let is_held = |replica: usize| held.get(replica).is_some_and(|&held| held > 0);
        for (replica, told) in std::mem::take(&mut self.vacancies) {
            if is_held(replica) && !told.is_closed() {
                self.vacancies.push((replica, told));
            } else {
                // Who does not wait any more need not be told.
                let _ = told.send(());
            }
        }
    }
}

impl Seat {
    /// What it was told when it came.
    pub(crate) fn expected(&self) -> Expected {
        self.expected
    }

    /// Where it is now.
    pub(crate) fn place(&self) -> Place {
        // It is there until it is dropped.
        self.dispatch.lock().desk.place(self.ticket).unwrap_or(Place::Parked)
    }

    /// Waits until its place may be another. What happened since the last call is not missed.
    pub(crate) async fn moved(&self) {
        self.bell.notified().await;
    }

    /// Its replica began with it.
    pub(crate) fn started(&self, cached: u32) {
        self.dispatch.with_desk(|desk, _| desk.started(self.ticket, cached));
    }

    /// It has got a token.
    pub(crate) fn token(&self) {
        self.dispatch.with_desk(|desk, now| desk.token(self.ticket, now));
    }

    /// Its replica was lost, and it wants another.
    pub(crate) fn lost(&self, order: Order) {
        self.dispatch.with_desk(|desk, now| desk.lost(self.ticket, order, now));
    }

    /// Whether the incarnation of the replica is gone in whose slot it is.
    pub(crate) fn has_lost_its_slot(&self) -> bool {
        self.dispatch.lock().desk.has_lost_its_slot(self.ticket)
    }

    /// What it has its slot for.
    pub(crate) fn errand(&self) -> Errand {
        self.dispatch.lock().desk.errand(self.ticket)
    }

    /// It does all in its slot, whatever that was meant for.
    pub(crate) fn do_whole(&self) {
        self.dispatch.with_desk(|desk, _| desk.do_whole(self.ticket));
    }

    /// Whether its KV had better be moved than computed once more.
    pub(crate) fn is_worth_moving(&self, from: usize, to: usize) -> bool {
        self.dispatch.with_desk(|desk, _| desk.is_worth_moving(self.ticket, (from, to)))
    }

    /// It goes on in the slot that was reserved for it. False if that is not reserved any more.
    pub(crate) fn handed_over(&self, to: usize, kv: Kv) -> bool {
        self.dispatch.with_desk(|desk, now| desk.handed_over(self.ticket, to, kv, now))
    }

    /// It has all its tokens.
    pub(crate) fn done(mut self) {
        self.leaving = Leaving::Done;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.dispatch.with_desk(|desk, now| desk.leave(self.ticket, self.leaving, now));
        self.dispatch.lock().bells.remove(&self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desk::{Company, PredictedRates, PromptPrefix};
    use crate::router::PolicyName;

    fn order() -> Order {
        Order { prompt: 10, most_output: 10, prefix: PromptPrefix::default(), company: Company::Any }
    }

    fn dispatch() -> Arc<Dispatch> {
        let mut desk = Desk::new(PolicyName::Jsq.policy(0), 4);
        desk.add(1, PredictedRates::default());
        let dispatch = Dispatch::new(desk);
        dispatch.serve(0, Some(Epoch(1)));
        dispatch
    }

    #[tokio::test]
    async fn case_19_who_leaves_makes_room_for_the_next_wherever_it_was() {
        let dispatch = dispatch();
        let [first, second, third] = std::array::from_fn(|_| dispatch.arrive(order()).unwrap());
        assert_eq!(first.place(), Place::Seated { replica: 0 });
        assert_eq!(third.place(), Place::Waiting { replica: 0, ahead: 1 });
        drop(second);
        assert_eq!(third.place(), Place::Waiting { replica: 0, ahead: 0 });
        first.done();
        // Rung once, before anyone listened.
        third.moved().await;
        assert_eq!(third.place(), Place::Seated { replica: 0 });
        drop(third);
        let queue = dispatch.queue();
        assert_eq!((queue.waiting, queue.loads[0].held, queue.loads[0].waiting), (0, 0, 0));
        assert!(dispatch.lock().bells.is_empty());
    }

    #[tokio::test]
    async fn a_drained_replica_is_vacant_when_its_last_request_has_left() {
        let dispatch = dispatch();
        let seat = dispatch.arrive(order()).unwrap();
        dispatch.drain(0);
        let mut vacant = std::pin::pin!(dispatch.vacant(0));
        assert!(futures::poll!(&mut vacant).is_pending());
        let waits = dispatch.arrive(order()).unwrap();
        assert_eq!(waits.place(), Place::Parked);
        seat.done();
        vacant.await;
        dispatch.vacant(0).await;
        dispatch.vacant(7).await;
        assert!(dispatch.lock().vacancies.is_empty());
    }
}
