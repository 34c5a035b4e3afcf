//! A small seeded generator and a hash (splitmix64), so that a failing seed fails everywhere.

#[derive(Debug, Clone)]
pub(in super::super) struct Random(pub(in super::super) u64);

impl Random {
    pub(in super::super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        finish(self.0)
    }

    /// In `0..n`.
    pub(in super::super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A hash of two words; not symmetric.
pub(in super::super) fn mix(a: u64, b: u64) -> u64 {
    finish(a.rotate_left(23).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ finish(b.wrapping_add(1)))
}

fn finish(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
