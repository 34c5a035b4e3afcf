//! A run: sends requests as the load says, until they are sent or the time is over, and reads every answer.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::arrivals::Arrivals;
use crate::client::{BEAT, processor_time};
use crate::clock::{Clock, Pacer};
use crate::exchange::{Exchange, exchange};
use crate::prompts::Requests;
use crate::summary::Limits;
use crate::tally::Tally;
use crate::target::Target;

/// How requests are sent.
#[derive(Debug, Clone)]
pub enum Load {
    /// So many at once: the next when one has ended. A slow server is asked less.
    Closed {
        /// How many.
        concurrency: usize,
    },
    /// When they come, however many are under way.
    Open(Arrivals),
}

/// When no more is sent. Answers under way are read to their end.
#[derive(Debug, Clone, Copy)]
pub struct Ending {
    /// After so many requests.
    pub requests: u64,
    /// After this time.
    pub after: Option<Duration>,
}

/// What is run.
pub struct Run<'a> {
    /// Whom.
    pub target: &'a Arc<Target>,
    /// What.
    pub requests: &'a Requests,
    /// How.
    pub load: &'a Load,
    /// How long.
    pub ending: Ending,
    /// Index of its first request.
    pub first: u64,
    /// What is good.
    pub limits: Limits,
}

impl Run<'_> {
    /// Runs. `progress` is told how many requests have ended. Once `stop` is cancelled, what is under way is given up and what
    /// was measured is returned.
    pub async fn run(self, stop: &CancellationToken, progress: &mut dyn FnMut(u64)) -> Tally {
        let clock = Clock::start();
        let processor = processor_time();
        let mut beats = Pacer::start(clock, (0..).map(|i| BEAT * i));
        let mut under_way = UnderWay { run: &self, clock, sent: 0, exchanges: JoinSet::new() };
        let mut due = match self.load {
            Load::Open(arrivals) => {
                let end = self.ending.after.unwrap_or(Duration::MAX);
                let times = arrivals.times().take_while(move |at| *at < end);
                Some(Pacer::start(
                    clock,
                    times.take(usize::try_from(self.ending.requests).unwrap_or(usize::MAX)),
                ))
            }
            Load::Closed { concurrency } => {
                (0..*concurrency).for_each(|_| under_way.send_next());
                None
            }
        };
        let mut tally = Tally::new(self.limits);
        let is_closed = due.is_none();
        while due.is_some() || !under_way.exchanges.is_empty() {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                at = next(&mut due) => match at {
                    Some(at) => {
                        tally.watch.done(at, clock.now());
                        under_way.send(at);
                    }
                    None => due = None,
                },
                Some(at) = beats.next() => tally.watch.done(at, clock.now()),
                Some(ended) = under_way.exchanges.join_next() => {
                    if is_closed {
                        under_way.send_next();
                    }
                    // A task that did not end well is missing at the end, and counted there.
                    if let Ok(exchange) = ended {
                        tally.add(&exchange);
                        progress(tally.ended());
                    }
                }
            }
        }
        tally.give_up(under_way.sent - tally.ended());
        tally.watch.end(clock, processor);
        tally
    }
}

/// The next due time, or forever nothing.
async fn next(due: &mut Option<Pacer>) -> Option<Duration> {
    match due {
        Some(pacer) => pacer.next().await,
        None => std::future::pending().await,
    }
}

struct UnderWay<'a> {
    run: &'a Run<'a>,
    clock: Clock,
    sent: u64,
    exchanges: JoinSet<Exchange>,
}

impl UnderWay<'_> {
    /// Sends a request if one is to be sent still.
    fn send_next(&mut self) {
        let now = self.clock.now();
        let Ending { requests, after } = self.run.ending;
        if self.sent < requests && after.is_none_or(|after| now < after) {
            self.send(now);
        }
    }

    fn send(&mut self, due: Duration) {
        let prompt = self.run.requests.prompt(self.run.first.wrapping_add(self.sent));
        let (target, clock) = (Arc::clone(self.run.target), self.clock);
        self.sent += 1;
        self.exchanges.spawn(async move { exchange(&target, &prompt, clock, due).await });
    }
}

/// Sends `requests` requests of their own, as many at once as a closed loop would, and forgets the times: caches are filled
/// and connections made. Gives what became of them.
pub async fn warm_up(
    target: &Arc<Target>,
    requests: &Requests,
    (count, concurrency): (u64, usize),
    stop: &CancellationToken,
) -> Tally {
    let run = Run {
        target,
        requests,
        load: &Load::Closed { concurrency },
        ending: Ending { requests: count, after: None },
        // The last indices of all, which no run reaches.
        first: u64::MAX - count,
        limits: Limits::default(),
    };
    run.run(stop, &mut |_| {}).await
}
