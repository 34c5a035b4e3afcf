//! Who gets a request: the decisions that the live router makes too, behind a trait, so that its own code can be run in
//! the simulator.

use cluster::Role;

/// A replica that could prefill a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillView {
    /// Its number in the cluster.
    pub replica: usize,
    /// Its role.
    pub role: Role,
    /// Requests waiting there.
    pub waiting: usize,
    /// Seconds of work before a new request would start.
    pub backlog: f64,
    /// Seconds from start to first token of this request.
    pub service: f64,
    /// Seconds from its first token to its last beside those that run there; nothing where others decode.
    pub decode: f64,
    /// Share of its slots that are taken.
    pub taken: f64,
}

/// A replica that could decode a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeView {
    /// Its number in the cluster.
    pub replica: usize,
    /// Free slots, at least one.
    pub free: usize,
    /// Requests that hold a slot.
    pub running: usize,
    /// Tokens per second the request would see.
    pub speed: f64,
}

/// Chooses replicas. Views come in the replicas' order and are never empty; an index out of range counts as the last.
pub trait Policy {
    /// Which of the views prefills a request that has just come.
    fn prefill(&mut self, views: &[PrefillView]) -> usize;

    /// Which of the views, each with a free slot, decodes the request at the head of the line.
    fn decode(&mut self, views: &[DecodeView]) -> usize {
        best(views, |view| -view.speed)
    }
}

/// The index of the view with the smallest value, the first among equals.
fn best<T>(views: &[T], value: impl Fn(&T) -> f64) -> usize {
    (1..views.len()).fold(0, |a, b| if value(&views[b]) < value(&views[a]) { b } else { a })
}

/// Joins the queue with the least work in seconds, this request's own included; so ties go to the faster replica, and then to
/// the one with more of its slots free.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShortestWork;

impl Policy for ShortestWork {
    fn prefill(&mut self, views: &[PrefillView]) -> usize {
        (1..views.len()).fold(0, |a, b| {
            let key = |i: usize| (views[i].backlog + views[i].service + views[i].decode, views[i].taken);
            if key(b) < key(a) { b } else { a }
        })
    }
}

/// Joins the queue with the fewest requests, ties to the faster replica: the paper's.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShortestCount;

impl Policy for ShortestCount {
    fn prefill(&mut self, views: &[PrefillView]) -> usize {
        (1..views.len()).fold(0, |a, b| {
            let key = |i: usize| (views[i].waiting, views[i].service);
            if key(b) < key(a) { b } else { a }
        })
    }
}

/// One after the other.
#[derive(Debug, Clone, Copy, Default)]
pub struct RoundRobin {
    next: usize,
}

impl Policy for RoundRobin {
    fn prefill(&mut self, views: &[PrefillView]) -> usize {
        self.next += 1;
        (self.next - 1) % views.len()
    }
}
