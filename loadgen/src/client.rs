//! What the load generator itself costs, and how punctual it is: figures that are worse than these are the server's.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::clock::Clock;
use crate::summary::Distribution;
use crate::tally::Histogram;

/// Enough for any load of one client.
const MOST_FILES: u64 = 1 << 20;

/// How often it is looked whether the client is late.
pub(crate) const BEAT: Duration = Duration::from_millis(10);

/// Of the load generator, not of the server.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Client {
    /// Processor time over wall time: 1 is a whole core, all that one thread can have.
    pub cpu_share: f64,
    /// How late it did what it had to do at a given time, every 10 ms and at each due request.
    pub late_ms: Distribution,
}

impl Client {
    /// Whether the load generator had so much to do that the figures may be its own.
    pub fn was_overloaded(&self) -> bool {
        // Above nine tenths of a core there is no room for bursts; 5 ms would show in any server's time per token.
        self.cpu_share > 0.9 || self.late_ms.p99 > 5.0
    }
}

/// Watches the client during a run.
#[derive(Debug, Clone)]
pub(crate) struct Watch {
    late: Histogram,
    processor: Duration,
    wall: Duration,
}

impl Watch {
    pub(crate) fn new() -> Self {
        Self { late: Histogram::new(), processor: Duration::ZERO, wall: Duration::ZERO }
    }

    /// Something that was due at `due` is done now.
    pub(crate) fn done(&mut self, due: Duration, now: Duration) {
        self.late.record(now.saturating_sub(due));
    }

    /// A run ended: since `clock` began, when `processor` was the process's time.
    pub(crate) fn end(&mut self, clock: Clock, processor: Duration) {
        self.processor += processor_time().saturating_sub(processor);
        self.wall += clock.now();
    }

    pub(crate) fn append(&mut self, other: &Self) {
        self.late.append(&other.late);
        self.processor += other.processor;
        self.wall += other.wall;
    }

    pub(crate) fn summary(&self) -> Client {
        let wall = self.wall.as_secs_f64().max(f64::MIN_POSITIVE);
        Client {
            cpu_share: self.processor.as_secs_f64() / wall,
            late_ms: self.late.distribution().unwrap_or_default(),
        }
    }
}

/// What all of this process's threads have used.
pub(crate) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Raises the process's limit on open files as far as it may, since each stream is one.
pub fn allow_many_connections() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let wanted = maximum.unwrap_or(MOST_FILES).min(MOST_FILES);
    // If it stays as it is, requests beyond it fail, and are counted.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
}
