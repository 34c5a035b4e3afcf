//! Slots: what their caches hold, and what part of that a prompt can start from.
//!
//! A slot's record of its tokens is what every stage's cache holds **once the frames sent so far have run**. Since
//! the frames of one slot run in the order they were sent on every stage (see [`super`]), a frame sent now finds
//! exactly the recorded tokens, whoever sent them and whether or not that request still lives.

use cluster::SlotId;

use super::limits::Rollback;
use super::request::Token;

/// Room for one sequence. `R` is the request that runs in it.
#[derive(Debug)]
pub(super) struct Slot<R> {
    pub(super) id: SlotId,
    pub(super) cache: Cache,
    pub(super) running: Option<R>,
    /// A tick of the engine's count of releases; 0 for a slot never used.
    last_used: u64,
}

/// What a slot's caches hold.
#[derive(Debug)]
pub(super) struct Cache {
    /// `tokens[p]` is the token at position `p`.
    tokens: Vec<Token>,
    /// Positions there are.
    n_ctx: usize,
    /// What the caches hold is not known, and no token of it is recorded.
    is_spoilt: bool,
}

impl<R> Slot<R> {
    pub(super) fn new(id: SlotId, n_ctx: u32) -> Self {
        let cache = Cache { tokens: Vec::new(), n_ctx: n_ctx as usize, is_spoilt: false };
        Self { id, cache, running: None, last_used: 0 }
    }

    /// Ends what runs in it and keeps its tokens for the next.
    pub(super) fn release(&mut self, tick: u64) -> Option<R> {
        self.last_used = tick;
        self.running.take()
    }

    /// Forgets its tokens: the stages have.
    pub(super) fn clear(&mut self) {
        self.cache.tokens.clear();
        self.cache.is_spoilt = false;
        self.last_used = 0;
    }
}

impl Cache {
    /// Positions held.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    #[cfg(test)]
    pub(super) fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Records that `tokens` are sent for positions `from..`. Returns `from` if the stages must forget the positions
    /// from there on first.
    pub(super) fn write(&mut self, from: usize, tokens: &[Token]) -> Option<u32> {
        let held = self.tokens.len();
        assert!(from <= held, "{held} positions are held, position {from} leaves a gap");
        let end = from + tokens.len();
        assert!(end <= self.n_ctx, "a slot has {} positions, not {end}", self.n_ctx);
        self.tokens.truncate(from);
        self.tokens.extend_from_slice(tokens);
        let removes = from < held || std::mem::take(&mut self.is_spoilt);
        removes.then_some(from as u32)
    }

    /// Records that the stages' caches were replaced, and hold `tokens`.
    pub(super) fn replace(&mut self, tokens: &[Token]) {
        assert!(tokens.len() <= self.n_ctx, "a slot has {} positions, not {}", self.n_ctx, tokens.len());
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.is_spoilt = false;
    }

    /// Records that nobody knows what the caches hold: some stages may have replaced theirs.
    pub(super) fn spoil(&mut self) {
        self.tokens.clear();
        self.is_spoilt = true;
    }
}

/// Where a prompt goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placement {
    /// Index of the slot.
    pub(super) index: usize,
    /// Prompt tokens that need no computing.
    pub(super) cached: usize,
}

/// The free slot from which the prompt needs the least computing; of equals the one that was released longest ago,
/// so that the youngest caches live on.
pub(super) fn place<R>(slots: &[Slot<R>], prompt: &[Token], rollback: Rollback) -> Option<Placement> {
    slots
        .iter()
        .enumerate()
        .filter(|(_, slot)| slot.running.is_none())
        .map(|(index, slot)| {
            (slot, Placement { index, cached: rollback.reusable(&slot.cache.tokens, prompt) })
        })
        .max_by(|(a, place_a), (b, place_b)| {
            place_a.cached.cmp(&place_b.cached).then(b.last_used.cmp(&a.last_used)).then(b.id.cmp(&a.id))
        })
        .map(|(_, placement)| placement)
}

impl Rollback {
    /// Tokens of `held` that `prompt` can start from. One prompt token at least is left to compute, because the
    /// first drawn token needs its logits; where that takes a rollback that the caches cannot do, it starts over.
    fn reusable(self, held: &[Token], prompt: &[Token]) -> usize {
        let common = held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let cached = common.min(prompt.len().saturating_sub(1));
        let appends = cached == held.len();
        let possible = match self {
            Self::Any => true,
            // Within the window nothing has been dropped yet. A slot cannot have outgrown it and come back: that
            // would have been a rollback, which is only possible to 0.
            Self::Window(window) => appends || held.len() <= window as usize,
            Self::AppendOnly => appends,
        };
        if possible { cached } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(id: u32, tokens: &[Token], last_used: u64) -> Slot<()> {
        let mut slot = Slot::new(SlotId(id), 4);
        slot.cache.write(0, tokens);
        slot.release(last_used);
        slot
    }

    fn placed(slots: &[Slot<()>], prompt: &[Token]) -> Option<(usize, usize)> {
        place(slots, prompt, Rollback::Any).map(|p| (p.index, p.cached))
    }

    #[test]
    fn the_longest_common_prefix_wins() {
        let slots = [slot(0, &[1, 2], 1), slot(1, &[1, 2, 3, 9], 2), slot(2, &[7], 3)];
        assert_eq!(placed(&slots, &[1, 2, 3, 4]), Some((1, 3)));
    }

    #[test]
    fn of_equal_slots_the_longest_unused_wins() {
        let slots = [slot(0, &[5], 3), slot(1, &[6], 1), slot(2, &[7], 2)];
        assert_eq!(placed(&slots, &[1]), Some((1, 0)));
        let fresh = [slot(0, &[5], 3), slot(1, &[], 0), slot(2, &[], 0)];
        assert_eq!(placed(&fresh, &[1]), Some((1, 0)), "then the lowest number");
    }

    #[test]
    fn a_taken_slot_is_never_chosen() {
        let mut slots = [slot(0, &[1, 2], 1), slot(1, &[], 0)];
        slots[0].running = Some(());
        assert_eq!(placed(&slots, &[1, 2, 3]), Some((1, 0)));
        slots[1].running = Some(());
        assert_eq!(placed(&slots, &[1, 2, 3]), None);
    }

    #[test]
    fn one_prompt_token_is_always_left_to_compute() {
        assert_eq!(Rollback::Any.reusable(&[1, 2, 3], &[1, 2, 3]), 2);
        assert_eq!(Rollback::Any.reusable(&[1, 2, 3, 4], &[1, 2, 3]), 2);
        assert_eq!(Rollback::Any.reusable(&[1], &[1]), 0);
    }

    #[test]
    fn a_window_that_was_outgrown_cannot_be_rolled_back() {
        let window = Rollback::Window(3);
        assert_eq!(window.reusable(&[1, 2, 3], &[1, 2, 9]), 2, "not outgrown");
        assert_eq!(window.reusable(&[1, 2, 3, 4], &[1, 2, 9]), 0, "outgrown");
        assert_eq!(window.reusable(&[1, 2, 3, 4], &[1, 2, 3, 4, 5]), 4, "appending needs none");
        assert_eq!(window.reusable(&[1, 2, 3, 4], &[1, 2, 3, 4]), 0, "the last logits do");
    }

    #[test]
    fn a_recurrent_state_can_only_be_appended_to() {
        assert_eq!(Rollback::AppendOnly.reusable(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(Rollback::AppendOnly.reusable(&[1, 2], &[1, 2]), 0);
        assert_eq!(Rollback::AppendOnly.reusable(&[1, 2], &[1, 3]), 0);
        assert_eq!(Rollback::AppendOnly.reusable(&[], &[1, 3]), 0);
    }

    #[test]
    fn writing_over_held_positions_says_what_to_forget() {
        let mut cache = slot(0, &[], 0).cache;
        assert_eq!(cache.write(0, &[1, 2, 3]), None);
        assert_eq!(cache.write(3, &[4]), None);
        assert_eq!(cache.write(2, &[9]), Some(2));
        assert_eq!(cache.tokens(), [1, 2, 9]);
    }

    #[test]
    #[should_panic(expected = "leaves a gap")]
    fn a_gap_in_a_slot_is_a_defect() {
        slot(0, &[1], 0).cache.write(2, &[3]);
    }

    #[test]
    #[should_panic(expected = "a slot has 4 positions, not 5")]
    fn a_row_beyond_the_slots_end_is_a_defect() {
        slot(0, &[1, 2, 3, 4], 0).cache.write(4, &[5]);
    }
}
