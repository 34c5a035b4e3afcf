//! Beginnings of prompts, so that a prompt can be compared with those that a replica was given without keeping either.
//!
//! A prompt becomes a chain of hashes, one per block of tokens, each of everything up to its end: two prompts share as many
//! blocks as their chains have equal beginnings. Two different ones that hash alike would be routed as if they were the same,
//! and computed as what they are.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;

/// Tokens of a block: a prefix is worth a detour from some dozens of tokens on.
const BLOCK: usize = 32;

/// A prompt's beginnings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptPrefix(Arc<[u64]>);

impl PromptPrefix {
    /// Of a prompt's tokens. What is left of the last block does not count.
    pub fn of(prompt: &[i32]) -> Self {
        let mut hasher = FxHasher::default();
        let chain = prompt.chunks_exact(BLOCK).map(|block| {
            block.hash(&mut hasher);
            hasher.finish()
        });
        Self(chain.collect())
    }

    /// Tokens at the beginning that both have.
    pub(super) fn shared_with(&self, other: &Self) -> u32 {
        let blocks = self.0.iter().zip(&*other.0).take_while(|(a, b)| a == b).count();
        (blocks * BLOCK) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_what_they_begin_with_in_whole_blocks() {
        let long: Vec<i32> = (0..100).collect();
        let mut other = long.clone();
        other[70] = -1;
        let shared = |a: &[i32], b: &[i32]| PromptPrefix::of(a).shared_with(&PromptPrefix::of(b));
        assert_eq!(shared(&long, &long), 96);
        assert_eq!(shared(&long, &other), 64);
        assert_eq!(shared(&long, &long[..40]), 32);
        assert_eq!(shared(&long, &long[1..]), 0);
        assert_eq!(shared(&[], &long), 0);
    }
}
