//! What a simulation found out.

use super::SimCluster;

/// What became of one request. Times are seconds since the start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Served {
    /// When it came.
    pub arrival: f64,
    /// When its prefill began.
    pub prefill_start: f64,
    /// When its first token was out.
    pub first_token: f64,
    /// When it had a decode slot.
    pub slot: f64,
    /// When its cache was there and decoding began.
    pub decode_start: f64,
    /// When its last token was out.
    pub finish: f64,
    /// Tokens of its output.
    pub output: f64,
    /// The replica that prefilled it.
    pub prefilled_by: usize,
    /// The replica that decoded it.
    pub decoded_by: usize,
}

impl Served {
    /// A request that has not been served yet.
    pub(super) fn pending(arrival: f64, output: f64) -> Self {
        let never = f64::NAN;
        Self {
            arrival,
            prefill_start: never,
            first_token: never,
            slot: never,
            decode_start: never,
            finish: never,
            output,
            prefilled_by: usize::MAX,
            decoded_by: usize::MAX,
        }
    }

    /// Wait before prefill, for a slot, and for the cache to arrive.
    pub fn wait(&self) -> f64 {
        (self.prefill_start - self.arrival) + (self.decode_start - self.first_token)
    }

    /// Time to first token.
    pub fn ttft(&self) -> f64 {
        self.first_token - self.arrival
    }

    /// Time per output token while decoding; zero for a single token.
    pub fn tpot(&self) -> f64 {
        let tokens = self.output - 1.0;
        if tokens > 0.0 { (self.finish - self.decode_start) / tokens } else { 0.0 }
    }
}

/// How one replica was used.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaUse {
    /// Seconds with `n` requests decoding, by `n`.
    pub decoding: Vec<f64>,
    /// Seconds in which its slowest stage prefilled.
    pub prefilling: f64,
    /// Seconds in which it sent caches.
    pub sending: f64,
    /// The integral of requests in it, waiting or served, over time.
    pub request_seconds: f64,
}

/// Everything a simulation found out.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Every request, in the order of arrival.
    pub served: Vec<Served>,
    /// Every replica.
    pub replicas: Vec<ReplicaUse>,
    /// When the last token was out.
    pub end: f64,
    /// The integral of requests in the system over time, counted event by event.
    pub request_seconds: f64,
    /// Waiting for prefill and for a slot, at times `end · i / samples`.
    pub queues: Vec<(f64, u32, u32)>,
    /// Events handled.
    pub events: u64,
}

/// The numbers people look at, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Summary {
    /// Mean wait.
    pub wait: f64,
    /// Longest wait.
    pub max_wait: f64,
    /// Mean time to first token.
    pub ttft: f64,
    /// Mean time per output token.
    pub tpot: f64,
    /// Share of requests generated more slowly than asked for.
    pub below_min_rate: f64,
    /// Generated tokens per second.
    pub throughput: f64,
}

impl Report {
    /// The numbers people look at; `max_tpot` is the slowest generation asked for.
    pub fn summary(&self, max_tpot: f64) -> Summary {
        let n = self.served.len().max(1) as f64;
        let mean = |of: &dyn Fn(&Served) -> f64| self.served.iter().map(of).sum::<f64>() / n;
        let missed = |served: &Served| f64::from(u8::from(served.tpot() > max_tpot * (1.0 + 1e-9)));
        Summary {
            wait: mean(&Served::wait),
            max_wait: self.served.iter().map(Served::wait).fold(0.0, f64::max),
            ttft: mean(&Served::ttft),
            tpot: mean(&Served::tpot),
            below_min_rate: mean(&missed),
            throughput: if self.end > 0.0 {
                self.served.iter().map(|served| served.output).sum::<f64>() / self.end
            } else {
                0.0
            },
        }
    }

    /// Share of the time in which each replica prefilled, decoded at all, and sent.
    pub fn utilisation(&self, cluster: &SimCluster) -> Vec<(f64, f64, f64)> {
        debug_assert_eq!(cluster.replicas().len(), self.replicas.len());
        let share = |seconds: f64| if self.end > 0.0 { seconds / self.end } else { 0.0 };
        let of = |used: &ReplicaUse| {
            (share(used.prefilling), share(used.decoding.iter().skip(1).sum()), share(used.sending))
        };
        self.replicas.iter().map(of).collect()
    }
}

/// The state at `samples` points in time, from the states after every event.
pub(super) fn thinned(all: &[(f64, u32, u32)], end: f64, samples: usize) -> Vec<(f64, u32, u32)> {
    let at = |i: usize| {
        let time = end * i as f64 / samples as f64;
        let before = all.partition_point(|entry| entry.0 <= time);
        before.checked_sub(1).map_or((time, 0, 0), |b| (time, all[b].1, all[b].2))
    };
    (0..samples).map(at).collect()
}
