//! Numbers that look random and are the same in every run, and texts to draw from.

use std::time::Duration;

/// Beginnings of texts that models go on from.
pub const BEGINNINGS: [&str; 10] = [
    "The capital of France is",
    "Once upon a time, there was a small",
    "Water boils at",
    "Dear Sir or Madam,",
    "To make a cup of tea, first",
    "In 1969, humans first",
    "The opposite of hot is",
    "My favourite season is winter because",
    "Photosynthesis turns",
    "A good team needs",
];

/// A sequence of them.
#[derive(Debug, Clone)]
pub struct Draws(u64);

impl Draws {
    /// Each seed has a sequence of its own.
    pub fn new(seed: u64) -> Self {
        let mut draws = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d);
        draws.next();
        draws
    }

    /// A sequence of its own, for somebody who draws at the same time.
    pub fn fork(&mut self) -> Self {
        Self::new(self.next())
    }

    /// The next one, less than `below`.
    pub fn below(&mut self, below: usize) -> usize {
        (self.next() % below.max(1) as u64) as usize
    }

    /// A time of at least `from` and less than `to`, in milliseconds.
    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.next() % to.saturating_sub(from).max(1))
    }

    /// One of them.
    pub fn one_of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.below(all.len()))
    }

    /// Puts them into another order.
    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            all.swap(last, self.below(last + 1));
        }
    }

    fn next(&mut self) -> u64 {
        // Knuth's constants; the low bits of such a sequence repeat soon, so the high ones are used.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}
