//! A cache's way from the replica that computed a prompt to the one that goes on, as hand-offs do it (docs/adr/0009): who has it gives it
//! away between two batches, one after the other; who takes it puts it in its place between two batches.

use super::engine::{Engine, Kind};

/// Batches of a decoding stage that pass before a cache which comes to it is used, on average: half of one until its master looks at
/// the request, most of one until the last of its stages has put the cache in its place, half of one until the master hears of that, and
/// half of one until a step takes the request along.
const BATCHES_TO_TAKE_OVER: f64 = 2.5;

impl Engine<'_> {
    /// Takes a slot and sends the cache there, after those that the sender has promised already.
    pub(super) fn reserve(&mut self, request: usize, to: usize) {
        self.decoders[to].taken += 1;
        self.in_replica[to] += 1;
        let served = &mut self.served[request];
        served.slot = self.now;
        served.decoded_by = to;
        let from = served.prefilled_by;
        let seconds = self.cluster.handover_seconds(from, to, self.requests[request].prompt);
        let start = self.sender_free[from].max(self.now + self.batch_left(from));
        self.sender_free[from] = start + seconds;
        self.sending[from] += seconds;
        self.schedule(start + seconds, Kind::CacheArrived(request as u32));
    }

    /// Seconds until a replica that prefills looks up from the chunk at hand, which it does between two batches.
    fn batch_left(&self, index: usize) -> f64 {
        let prefiller = &self.prefillers[index];
        let left = (prefiller.free_at - self.now).max(0.0);
        if left > 0.0 && self.cluster.between_batches {
            left - ((left / prefiller.chunk).ceil() - 1.0).max(0.0) * prefiller.chunk
        } else {
            0.0
        }
    }

    /// A cache has arrived. Who sent it confirms that, and who takes it puts it in its place, each between two batches.
    pub(super) fn cache_arrived(&mut self, request: usize) {
        let (from, to) = (self.served[request].prefilled_by, self.served[request].decoded_by);
        let replica = &self.cluster.replicas()[to];
        let batch = match self.decoders[to].n_running() {
            n if n > 0 && self.cluster.between_batches => replica.tpot(n) / replica.stages as f64,
            _ => 0.0,
        };
        let left = self.batch_left(from) + BATCHES_TO_TAKE_OVER * batch;
        self.schedule(self.now + left, Kind::TakenOver(request as u32));
    }

    /// A request is decoded elsewhere: the replica that it comes from has a place for another prompt.
    pub(super) fn taken_over(&mut self, request: usize) {
        self.begin_decode(request);
        self.let_go(self.served[request].prefilled_by);
    }

    /// A request has left a replica that only prefills.
    pub(super) fn let_go(&mut self, index: usize) {
        self.prefillers[index].taken -= 1;
        self.begin_prefill(index);
    }
}
