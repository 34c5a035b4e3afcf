//! What is asked for, as clients' requests go by: a window over the last minutes, with the present time, behind a lock. What is
//! made of it is somebody else's business, who says so here, for people to see.

mod window;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cluster::{Demand, DemandRange};
use rustc_hash::FxHashMap;
use serde::Serialize;

pub use window::Enough;
use window::Window;

/// Unless somebody says otherwise: long enough for a few dozen requests of a small office.
const SPAN: Duration = Duration::from_secs(300);

/// Counts.
#[derive(Debug)]
pub(crate) struct Meter {
    started: Instant,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    window: Window,
    /// Tokens of the answers that have not ended; as many as there are open requests.
    running: FxHashMap<u64, Arc<AtomicU32>>,
    next: u64,
    adaptation: Option<Adaptation>,
    decisions: BTreeMap<&'static str, u64>,
}

/// An answer that has not ended. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct RunningAnswer {
    meter: Arc<Meter>,
    id: u64,
    tokens: Arc<AtomicU32>,
}

/// What is made of the demand.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Adaptation {
    /// What may be changed: nothing, roles, or the whole plan.
    pub mode: String,
    /// What the present roles and plan were made for, once that is known.
    pub planned: Option<DemandRange>,
    /// What of it is outside of the planned range, and since when in words.
    pub outside: Option<String>,
    /// The last decision and its reason.
    pub last: Option<String>,
}

impl Meter {
    pub(crate) fn new() -> Arc<Self> {
        let window = Window::new(SPAN, Duration::ZERO);
        let inner = Inner {
            window,
            running: FxHashMap::default(),
            next: 0,
            adaptation: None,
            decisions: BTreeMap::new(),
        };
        Arc::new(Self { started: Instant::now(), inner: Mutex::new(inner) })
    }

    /// Counts anew over windows of this length.
    pub(crate) fn set_span(&self, span: Duration) {
        self.lock().window = Window::new(span, self.started.elapsed());
    }

    /// A request was let in.
    pub(crate) fn arrived(self: &Arc<Self>, prompt: u32) -> RunningAnswer {
        let mut inner = self.lock();
        inner.window.arrived(prompt, self.started.elapsed());
        inner.next += 1;
        let (id, tokens) = (inner.next, Arc::default());
        inner.running.insert(id, Arc::clone(&tokens));
        RunningAnswer { meter: Arc::clone(self), id, tokens }
    }

    /// Over the whole window, and how long that is.
    pub(crate) fn demand(&self) -> (Duration, Demand) {
        let inner = self.lock();
        (inner.window.span(), inner.window.demand(&inner.running(), self.started.elapsed()))
    }

    /// Over the shortest time in which there is enough.
    pub(crate) fn recent(&self, enough: Enough) -> Option<Demand> {
        let inner = self.lock();
        inner.window.recent(enough, &inner.running(), self.started.elapsed())
    }

    /// Says what is made of it.
    pub(crate) fn tell_adaptation(&self, adaptation: Adaptation) {
        self.lock().adaptation = Some(adaptation);
    }

    /// Something was decided: what, in a word of which there are few.
    pub(crate) fn decided(&self, what: &'static str) {
        *self.lock().decisions.entry(what).or_default() += 1;
    }

    /// How often each was.
    pub(crate) fn decisions(&self) -> Vec<(&'static str, u64)> {
        self.lock().decisions.iter().map(|(what, times)| (*what, *times)).collect()
    }

    /// What was last said.
    pub(crate) fn adaptation(&self) -> Option<Adaptation> {
        self.lock().adaptation.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn running(&self) -> Vec<u32> {
        self.running.values().map(|tokens| tokens.load(Ordering::Relaxed)).collect()
    }
}

impl RunningAnswer {
    /// A token of it came.
    pub(crate) fn token(&self) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for RunningAnswer {
    fn drop(&mut self) {
        let tokens = self.tokens.load(Ordering::Relaxed);
        let mut inner = self.meter.lock();
        inner.running.remove(&self.id);
        // One that was given up before its first token says nothing of answers.
        if tokens > 0 {
            inner.window.answered(tokens, self.meter.started.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_counts_when_it_ends_and_before_that_if_it_is_long() {
        let meter = Meter::new();
        let answers: Vec<RunningAnswer> = (0..4).map(|_| meter.arrived(100)).collect();
        let mut answers = answers.into_iter();
        let (first, given_up, long) =
            (answers.next().unwrap(), answers.next().unwrap(), answers.next().unwrap());
        (0..10).for_each(|_| first.token());
        drop((first, given_up));
        let counted = || {
            let (_, demand) = meter.demand();
            (demand.prompt.count, demand.output.count, demand.output.mean)
        };
        assert_eq!(counted(), (4, 1, 10.0));
        (0..30).for_each(|_| long.token());
        assert_eq!(counted(), (4, 2, 20.0));
        drop(long);
        assert_eq!(counted(), (4, 2, 20.0));
        drop(answers);
        assert!(meter.lock().running.is_empty());
    }
}
