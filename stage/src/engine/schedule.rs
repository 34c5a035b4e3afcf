//! Which rows go into the next frame.
//!
//! # The policy
//!
//! **What it is for.** A pipeline of k stages is fast when every stage has something to do, and pleasant when a
//! running generation gets its tokens at a steady pace. Work comes in two kinds. A *decode* row is one token of a
//! running generation; its successor exists only after it has passed all stages. A *prefill* chunk is a piece of a
//! prompt; its successor is known at once, and it costs as much as many decode steps.
//!
//! **Micro-batches.** At most `micro_batches` decode frames are in flight. With n running generations each frame takes
//! at most ⌈n / micro_batches⌉ rows, longest waiting first. So the generations spread over the frames, and the stages
//! work on different frames at once. When a frame returns its rows are ready again and leave in the next. Nothing ties
//! a row to a frame: uneven frames (after some generations ended) even out within one round. A frame is never held
//! back to fill up; stages that find several waiting run them as one batch anyway.
//!
//! **Prefill is a wave.** A prompt goes out in chunks of at most `prefill_chunk` rows, without waiting for the chunk
//! before it, up to `prefill_frames` in flight: while stage 1 runs the first chunk, stage 0 runs the second. More in
//! flight than there are stages would only queue in front of stage 0, ahead of a prompt that comes later.
//!
//! **Prompts take turns.** They stand in a ring. The front one fills the frame; if it leaves room because its prompt
//! ends, the next one goes into the same frame, so short prompts share one. A prompt that is not through goes to the
//! back, where newcomers go too. So with r prompts in prefill, each gets a turn at least every r frames: no long one
//! bars a short one, and no stream of short ones bars a long one. Whole turns rather than equal shares, because
//! llama.cpp runs rows of unequal runs in separate ubatches.
//!
//! **Decode first.** A decode frame that may leave leaves before any prefill frame, and on every stage decode frames
//! pass waiting prefill frames. What a decode frame can still meet on a stage is the one prefill frame that already
//! runs there: over the whole pipeline, one chunk's pass, however long the prompts are and however many (case 23).
//!
//! **But not decode only.** Where decode frames alone can keep a stage busy (a single stage always; k stages with k
//! micro-batches) decode-first would starve prefill until the running generations end. Therefore decode yields: after
//! a number of rounds during which no prefill frame came back, no decode frame leaves until one does. The number goes with
//! the chunk's rows (`ROWS_PER_DECODE_ROUND`), since a short prompt should not wait for many times what it costs itself.
//! The wait is short, since with no decode frames about and no older prefill frame ahead, the oldest prefill frame in
//! flight passes straight through; it is the one chunk that decode may be delayed by. The rule does not bind where
//! the pipeline has gaps that prefill can use: there, a chunk returns sooner than so many rounds.
//!
//! **When it trips.** With `micro_batches` too low, stages idle; too high, batches get so small that reading the weights
//! again for each costs more than idling. With `prefill_chunk` too high, every token waits long while someone's prompt
//! is read; too low, prefill is slow. Both are measured by whoever sets the limits.
//!
//! This file counts frames and rows. It knows neither tokens nor requests, and no clock.

use std::collections::VecDeque;

use cluster::SlotId;
use smallvec::SmallVec;

use super::frame::FrameKind;
use super::limits::EngineLimits;

/// Decode rounds (one step of every running generation) that may pass while prefill frames are in flight and none comes
/// back, at most. At 1, running generations would slow down to one token per chunk where four would delay the chunk by
/// little (a chunk of 512 rows costs as much as tens of steps on a CPU); much higher, a newcomer would wait for its first
/// token as long as the running ones please.
const MOST_DECODE_ROUNDS: usize = 4;

/// Rows of a chunk for each of these rounds; the first round is every chunk's. On a CPU, 64 rows cost several steps.
const ROWS_PER_DECODE_ROUND: usize = 64;

/// Rows that wait, and frames that are under way.
#[derive(Debug)]
pub(super) struct Schedule {
    prefill_chunk: usize,
    prefill_frames: usize,
    micro_batches: usize,
    /// Slots with a token to send, longest waiting first.
    ready: VecDeque<SlotId>,
    /// The ring of slots with prompt rows to send.
    prompts: VecDeque<Share>,
    decode_in_flight: usize,
    prefill_in_flight: usize,
    /// Decode frames sent since a prefill frame last came back, or first went out.
    decode_since_chunk: usize,
    /// Decode rounds that the prefill frames in flight may be made to wait.
    rounds: usize,
}

/// Some prompt rows of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) slot: SlotId,
    pub(super) rows: usize,
}

/// Something of each of some slots: of few in most replicas, so that a step does not need the allocator for it.
pub(super) type FewSlots<T> = SmallVec<[T; 8]>;

/// The next frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Pick {
    /// One row for each of these slots.
    Decode(FewSlots<SlotId>),
    /// So many prompt rows for each of these slots.
    Prefill(FewSlots<Share>),
}

impl Schedule {
    pub(super) fn new(limits: &EngineLimits) -> Self {
        Self {
            prefill_chunk: limits.prefill_chunk as usize,
            prefill_frames: limits.prefill_frames as usize,
            micro_batches: limits.micro_batches as usize,
            ready: VecDeque::new(),
            prompts: VecDeque::new(),
            decode_in_flight: 0,
            prefill_in_flight: 0,
            decode_since_chunk: 0,
            rounds: 0,
        }
    }

    /// A slot has `rows` prompt rows to send.
    pub(super) fn add_prompt(&mut self, slot: SlotId, rows: usize) {
        assert!(rows > 0, "{slot} has prompt rows to send");
        assert!(!self.waits(slot), "{slot} waits for one thing at a time");
        self.prompts.push_back(Share { slot, rows });
    }

    /// A slot has a token to send.
    pub(super) fn add_ready(&mut self, slot: SlotId) {
        assert!(!self.waits(slot), "{slot} waits for one thing at a time");
        self.ready.push_back(slot);
    }

    /// Drops what a slot had to send. Frames in flight stay in flight.
    pub(super) fn forget(&mut self, slot: SlotId) {
        self.ready.retain(|other| *other != slot);
        self.prompts.retain(|share| share.slot != slot);
    }

    /// Drops everything, frames in flight too.
    pub(super) fn clear(&mut self) {
        self.ready.clear();
        self.prompts.clear();
        self.decode_in_flight = 0;
        self.prefill_in_flight = 0;
        self.decode_since_chunk = 0;
    }

    /// Whether a slot has anything to send.
    pub(super) fn waits(&self, slot: SlotId) -> bool {
        self.ready.contains(&slot) || self.prompts.iter().any(|share| share.slot == slot)
    }

    /// Chooses the next frame and counts it as in flight. `decoding` generations run, their rows in flight included.
    pub(super) fn pick(&mut self, decoding: usize) -> Option<Pick> {
        assert!(self.ready.len() <= decoding, "ready slots are decoding");
        if self.may_decode(decoding) {
            return Some(Pick::Decode(self.take_decode(decoding)));
        }
        let may_prefill = !self.prompts.is_empty() && self.prefill_in_flight < self.prefill_frames;
        may_prefill.then(|| Pick::Prefill(self.take_prefill()))
    }

    /// A frame came back.
    pub(super) fn returned(&mut self, kind: FrameKind) {
        let in_flight = match kind {
            FrameKind::Decode => &mut self.decode_in_flight,
            FrameKind::Prefill => {
                self.decode_since_chunk = 0;
                &mut self.prefill_in_flight
            }
        };
        assert!(*in_flight > 0, "a {kind:?} frame came back that was not sent");
        *in_flight -= 1;
    }

    fn may_decode(&self, decoding: usize) -> bool {
        !self.ready.is_empty() && self.decode_in_flight < self.micro_batches && !self.yields(decoding)
    }

    fn yields(&self, decoding: usize) -> bool {
        let frames_per_round = self.micro_batches.min(decoding);
        self.prefill_in_flight > 0 && self.decode_since_chunk >= self.rounds * frames_per_round
    }

    fn take_decode(&mut self, decoding: usize) -> FewSlots<SlotId> {
        self.decode_in_flight += 1;
        self.decode_since_chunk += 1;
        let rows = decoding.div_ceil(self.micro_batches).min(self.ready.len());
        self.ready.drain(..rows).collect()
    }

    fn take_prefill(&mut self) -> FewSlots<Share> {
        if self.prefill_in_flight == 0 {
            self.decode_since_chunk = 0;
            self.rounds = 0;
        }
        self.prefill_in_flight += 1;
        let mut room = self.prefill_chunk;
        let mut shares = FewSlots::new();
        while room > 0
            && let Some(Share { slot, rows: unsent }) = self.prompts.pop_front()
        {
            let rows = unsent.min(room);
            room -= rows;
            shares.push(Share { slot, rows });
            if rows < unsent {
                self.prompts.push_back(Share { slot, rows: unsent - rows });
            }
        }
        let rows = self.prefill_chunk - room;
        self.rounds = self.rounds.max((rows / ROWS_PER_DECODE_ROUND).clamp(1, MOST_DECODE_ROUNDS));
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::Rollback;
    use super::*;

    fn schedule(micro_batches: u32, prefill_frames: u32) -> Schedule {
        Schedule::new(&EngineLimits {
            slots: 16,
            n_ctx: 1024,
            n_vocab: 1,
            prefill_chunk: 10,
            prefill_frames,
            micro_batches,
            queue_limit: 0,
            rollback: Rollback::Any,
        })
    }

    fn decode(slots: &[u32]) -> Option<Pick> {
        Some(Pick::Decode(slots.iter().copied().map(SlotId).collect()))
    }

    fn prefill(shares: &[(u32, usize)]) -> Option<Pick> {
        let share = |&(slot, rows)| Share { slot: SlotId(slot), rows };
        Some(Pick::Prefill(shares.iter().map(share).collect()))
    }

    fn ready(schedule: &mut Schedule, slots: impl IntoIterator<Item = u32>) {
        slots.into_iter().for_each(|slot| schedule.add_ready(SlotId(slot)));
    }

    #[test]
    fn running_generations_spread_evenly_over_the_micro_batches() {
        let mut s = schedule(3, 1);
        ready(&mut s, 0..7);
        assert_eq!(s.pick(7), decode(&[0, 1, 2]));
        assert_eq!(s.pick(7), decode(&[3, 4, 5]));
        assert_eq!(s.pick(7), decode(&[6]));
        assert_eq!(s.pick(7), None);
    }

    #[test]
    fn uneven_micro_batches_even_out() {
        let mut s = schedule(2, 1);
        ready(&mut s, 0..8);
        assert_eq!(s.pick(8), decode(&[0, 1, 2, 3]));
        assert_eq!(s.pick(8), decode(&[4, 5, 6, 7]));
        s.returned(FrameKind::Decode);
        ready(&mut s, [0]);
        assert_eq!(s.pick(5), decode(&[0]), "1, 2 and 3 ended");
        s.returned(FrameKind::Decode);
        ready(&mut s, 4..8);
        assert_eq!(s.pick(5), decode(&[4, 5, 6]), "no more than its share");
        s.returned(FrameKind::Decode);
        ready(&mut s, [0]);
        assert_eq!(s.pick(5), decode(&[7, 0]), "longest waiting first");
    }

    #[test]
    fn no_more_frames_are_in_flight_than_allowed() {
        let mut s = schedule(1, 2);
        s.add_prompt(SlotId(1), 100);
        ready(&mut s, [0]);
        assert_eq!(s.pick(2), decode(&[0]));
        ready(&mut s, [2]);
        assert_eq!(s.pick(2), prefill(&[(1, 10)]), "one decode frame is in flight already");
        assert_eq!(s.pick(2), prefill(&[(1, 10)]), "the chunks of a prompt follow each other");
        assert_eq!(s.pick(2), None);
        s.returned(FrameKind::Prefill);
        assert_eq!(s.pick(2), prefill(&[(1, 10)]));
    }

    #[test]
    fn decode_goes_first() {
        let mut s = schedule(2, 1);
        s.add_prompt(SlotId(0), 30);
        ready(&mut s, [1, 2]);
        assert_eq!(s.pick(2), decode(&[1]));
        assert_eq!(s.pick(2), decode(&[2]));
        assert_eq!(s.pick(2), prefill(&[(0, 10)]));
    }

    #[test]
    fn decode_yields_to_a_chunk_that_does_not_come_back() {
        for (chunk, rounds) in [(10, 1), (128, 2), (2048, MOST_DECODE_ROUNDS)] {
            let mut s = Schedule { prefill_chunk: chunk, ..schedule(1, 1) };
            s.add_prompt(SlotId(0), 3000);
            assert_eq!(s.pick(0), prefill(&[(0, chunk)]));
            for _ in 0..rounds {
                ready(&mut s, [1]);
                assert_eq!(s.pick(1), decode(&[1]));
                s.returned(FrameKind::Decode);
            }
            ready(&mut s, [1]);
            assert_eq!(s.pick(1), None, "the chunk gets its turn");
            s.returned(FrameKind::Prefill);
            assert_eq!(s.pick(1), decode(&[1]), "and decode again");
        }
    }

    #[test]
    fn prompts_take_turns_and_short_ones_share_a_frame() {
        let mut s = schedule(1, 8);
        s.add_prompt(SlotId(0), 25);
        s.add_prompt(SlotId(1), 3);
        s.add_prompt(SlotId(2), 2);
        s.add_prompt(SlotId(3), 12);
        assert_eq!(s.pick(0), prefill(&[(0, 10)]));
        assert_eq!(s.pick(0), prefill(&[(1, 3), (2, 2), (3, 5)]));
        s.add_prompt(SlotId(4), 4);
        assert_eq!(s.pick(0), prefill(&[(0, 10)]));
        assert_eq!(s.pick(0), prefill(&[(3, 7), (4, 3)]));
        assert_eq!(s.pick(0), prefill(&[(0, 5), (4, 1)]));
        assert_eq!(s.pick(0), None);
    }

    #[test]
    fn a_forgotten_slot_is_in_no_frame() {
        let mut s = schedule(1, 1);
        ready(&mut s, [0, 1]);
        s.add_prompt(SlotId(2), 5);
        s.forget(SlotId(0));
        s.forget(SlotId(2));
        assert_eq!(s.pick(1), decode(&[1]));
        assert_eq!(s.pick(1), None);
    }
}
