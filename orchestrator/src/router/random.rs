//! `random`: any, each as likely as the others.
//!
//! **What.** A draw from a seeded generator, so that a run can be repeated.
//!
//! **Why.** The other baseline: what a policy gains over chance is its worth. And where several orchestrators share replicas
//! without knowing of each other's requests, chance does not make them all choose the same.
//!
//! **When it errs.** By chance: some lines are long while others are empty, the more so the fuller the replicas are.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{Policy, ReplicaView};

/// Drawn.
#[derive(Debug, Clone)]
pub struct Random {
    rng: StdRng,
}

impl Random {
    /// The draws that belong to a seed.
    pub fn new(seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed) }
    }
}

impl Policy for Random {
    fn place(&mut self, views: &[ReplicaView]) -> usize {
        self.rng.random_range(0..views.len())
    }
}
