//! Whether a sequence is moved to the replica that decodes it, or its prompt is computed there once more.
//!
//! Moving takes as long as its bytes take over the link between two hosts, and some time besides: for connections, and for the ends
//! of batches. All of it is observed on the moves themselves, pair by pair, as a line over the tokens that travelled, whose
//! newest points count most; so it holds whatever the link's bandwidth is, and whoever else uses it. While a move waits for the one
//! before it, it takes no time, as prompts do not either. Computing takes what the replica's own prompts took, or as was
//! predicted of it, or else what those of the other one took; and it holds up every answer that is generated there. The
//! shorter of the two is done. Of what is not known the move is tried; and so is one of many after moves were found to be slow,
//! since links recover. A move that failed counts as long as it took, so a replica that cannot be reached by another is soon not
//! asked any more.
//!
//! Pure, as everything at the desk.

use std::time::Duration;

use rustc_hash::FxHashMap;

use super::member::Member;
use super::{Desk, Ticket};

/// Moves that are left out before one is tried again.
const LEFT_OUT: u32 = 32;

/// How much of what was seen still counts after one more: the last ten or so make the line.
const KEPT: f64 = 0.9;

/// A move that has ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Move {
    /// The replica that had the sequence.
    pub from: usize,
    /// The replica that has it now, or was to have it.
    pub to: usize,
    /// Its tokens that travelled.
    pub tokens: u32,
    /// How long it took.
    pub took: Duration,
}

/// What is known of moves between replicas.
#[derive(Debug, Default)]
pub(super) struct Moves {
    pairs: FxHashMap<(usize, usize), Pair>,
    /// When the last move to a replica ended.
    ended: FxHashMap<usize, Duration>,
}

/// From one replica to another.
#[derive(Debug, Default)]
struct Pair {
    line: Line,
    left_out: u32,
}

/// A line through points, by least squares.
#[derive(Debug, Default)]
struct Line {
    points: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Line {
    fn observe(&mut self, x: f64, y: f64) {
        for sum in [&mut self.points, &mut self.x, &mut self.y, &mut self.xx, &mut self.xy] {
            *sum *= KEPT;
        }
        self.points += 1.0;
        self.x += x;
        self.y += y;
        self.xx += x * x;
        self.xy += x * y;
    }

    /// The line's height; none without a point. It falls nowhere, and is never below the ground.
    fn at(&self, x: f64) -> Option<f64> {
        if self.points <= 0.0 {
            return None;
        }
        let (mean_x, mean_y) = (self.x / self.points, self.y / self.points);
        let spread = self.xx / self.points - mean_x * mean_x;
        // Points that are all alike say nothing of others but in proportion.
        let slope = if spread > mean_x * mean_x * 1e-6 {
            (self.xy / self.points - mean_x * mean_y) / spread
        } else {
            mean_y / mean_x.max(1.0)
        };
        Some((mean_y + slope.max(0.0) * (x - mean_x)).max(0.0))
    }
}

impl Desk {
    /// A move has ended, well or not.
    pub fn saw_move(&mut self, seen: Move, now: Duration) {
        let last = self.moves.ended.insert(seen.to, now);
        let alone = last.map_or(seen.took, |last| seen.took.min(now.saturating_sub(last)));
        let pair = self.moves.pairs.entry((seen.from, seen.to)).or_default();
        pair.line.observe(f64::from(seen.tokens), alone.as_secs_f64());
    }

    /// Seconds that moves of so many tokens take, the mean over the pairs of replicas between which any were made.
    pub fn move_seconds(&self, tokens: f64) -> Option<f64> {
        let seconds: Vec<f64> = self.moves.pairs.values().filter_map(|pair| pair.line.at(tokens)).collect();
        (!seconds.is_empty()).then(|| seconds.iter().sum::<f64>() / seconds.len() as f64)
    }

    /// Whether a request's sequence had better be moved to a replica than computed there once more.
    pub fn is_worth_moving(&mut self, ticket: Ticket, (from, to): (usize, usize)) -> bool {
        let Some(entry) = self.entries.get(&ticket) else { return true };
        let Some(pair) = self.moves.pairs.get_mut(&(from, to)) else { return true };
        let prompt = f64::from(entry.order.prompt);
        let Some(moving) = pair.line.at(prompt) else { return true };
        let known = |replica: usize| self.members.get(replica).and_then(|it| it.prefill_seconds(prompt));
        let Some(computing) = known(to).or_else(|| known(from)) else { return true };
        let held_up = self.members.get(to).map_or(0, Member::generating);
        if moving <= computing * (1 + held_up) as f64 || pair.left_out == LEFT_OUT {
            pair.left_out = 0;
            return true;
        }
        pair.left_out += 1;
        false
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Epoch, Millis, Role, TokensPerSecond};

    use super::*;
    use crate::desk::{Company, Order, PredictedRates, PromptPrefix};
    use crate::router::PolicyName;

    #[test]
    fn a_line_goes_through_its_points_and_follows_the_newest() {
        let mut line = Line::default();
        assert_eq!(line.at(10.0), None);
        line.observe(100.0, 0.2);
        assert!((line.at(100.0).unwrap() - 0.2).abs() < 1e-9);
        assert!((line.at(200.0).unwrap() - 0.4).abs() < 1e-9, "one point: in proportion");
        line.observe(1100.0, 1.2);
        assert!((line.at(600.0).unwrap() - 0.7).abs() < 1e-9);
        for _ in 0..100 {
            line.observe(100.0, 2.0);
            line.observe(1100.0, 12.0);
        }
        assert!((line.at(600.0).unwrap() - 7.0).abs() < 0.01);
        assert!(line.at(0.0).unwrap() >= 0.0);
    }

    /// A desk whose replica 1 computes 100 prompt tokens a second, and a request with so many.
    fn desk(prompt: u32) -> (Desk, Ticket) {
        let mut desk = Desk::new(PolicyName::Jsq.policy(0), 8);
        let predicted = PredictedRates {
            prefill: TokensPerSecond(100.0),
            tpot_alone: Millis(10.0),
            tpot_full: Millis(10.0),
        };
        for role in [Role::Prefill, Role::Decode] {
            let replica = desk.add(2, predicted);
            desk.serve(replica, Some(Epoch(1)), Duration::ZERO);
            desk.set_role(replica, role, Duration::ZERO);
        }
        let order = Order { prompt, most_output: 10, prefix: PromptPrefix::default(), company: Company::Any };
        let ticket = desk.arrive(order, Duration::ZERO).unwrap().ticket;
        (desk, ticket)
    }

    #[test]
    fn a_sequence_is_moved_unless_computing_it_again_is_seen_to_be_faster() {
        let (mut desk, ticket) = desk(200);
        assert!(desk.is_worth_moving(ticket, (0, 1)), "nothing is known");
        // 200 tokens take 2 s to compute.
        let mut now = Duration::ZERO;
        let mut see = |desk: &mut Desk, took: u64, after: u64| {
            now += Duration::from_secs(after);
            desk.saw_move(Move { from: 0, to: 1, tokens: 100, took: Duration::from_secs(took) }, now);
        };
        see(&mut desk, 1, 9);
        assert!(desk.is_worth_moving(ticket, (0, 1)));
        // Eight at once, one after the other.
        (1..9).for_each(|nth| see(&mut desk, nth, 1));
        assert!(desk.is_worth_moving(ticket, (0, 1)));
        (0..8).for_each(|_| see(&mut desk, 5, 5));
        assert!(!desk.is_worth_moving(ticket, (0, 1)));
        assert!(desk.is_worth_moving(ticket, (1, 0)), "another way is another link");
    }

    #[test]
    fn a_link_that_was_slow_is_tried_again_some_time() {
        let (mut desk, ticket) = desk(200);
        let slow = Move { from: 0, to: 1, tokens: 100, took: Duration::from_secs(5) };
        desk.saw_move(slow, Duration::from_secs(5));
        let tried = (0..=LEFT_OUT).filter(|_| desk.is_worth_moving(ticket, (0, 1))).count();
        assert_eq!(tried, 1);
    }
}
