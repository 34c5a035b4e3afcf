//! One random number for each (seed, position), and what it chooses. The same on every platform.

use llama_sys as sys;

use crate::Token;

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): each input bit changes every output bit half of the time.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// SplitMix64's increment, 2⁶⁴ over the golden ratio.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number in [0, 1) that depends on nothing else. Seeds are mixed first, so that neighbouring seeds are not
/// neighbouring positions of one sequence.
pub(super) fn uniform(seed: u64, position: u32) -> f64 {
    let bits = mix(mix(seed.wrapping_add(GAMMA)).wrapping_add(GAMMA.wrapping_mul(u64::from(position) + 1)));
    // The 53 bits that an f64 holds.
    #[allow(clippy::cast_precision_loss, reason = "53 bits fit")]
    let fraction = (bits >> 11) as f64;
    fraction / (1u64 << 53) as f64
}

/// The candidate on which `uniform` falls when each has a width in proportion to exp(logit).
pub(super) fn pick(candidates: &mut [sys::llama_token_data], uniform: f64) -> Option<Token> {
    let max = candidates.iter().map(|candidate| candidate.logit).fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return None;
    }
    let mut sum = 0.0;
    for candidate in candidates.iter_mut() {
        candidate.p = (candidate.logit - max).exp();
        sum += f64::from(candidate.p);
    }
    let target = sum * uniform;
    let mut reached = 0.0;
    for candidate in candidates.iter() {
        reached += f64::from(candidate.p);
        // Not >=: a candidate without width is never chosen.
        if reached > target {
            return Some(Token(candidate.id));
        }
    }
    // Only if `target` was rounded up to the sum.
    candidates.iter().rev().find(|candidate| candidate.p > 0.0).map(|candidate| Token(candidate.id))
}

/// The candidate with the largest logit, the first among equals.
pub(super) fn most_likely(candidates: &[sys::llama_token_data]) -> Option<Token> {
    let mut best: Option<&sys::llama_token_data> = None;
    for candidate in candidates {
        if best.is_none_or(|best| candidate.logit > best.logit) {
            best = Some(candidate);
        }
    }
    best.map(|candidate| Token(candidate.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(logits: &[f32]) -> Vec<sys::llama_token_data> {
        (0..).zip(logits).map(|(id, logit)| sys::llama_token_data { id, logit: *logit, p: 0.0 }).collect()
    }

    #[test]
    fn draws_are_uniform_over_positions_and_over_seeds() {
        let n = 100_000u32;
        let draws: [Box<dyn Fn(u32) -> f64>; 3] = [
            Box::new(|i| uniform(0, i)),
            Box::new(|i| uniform(u64::from(i), 0)),
            Box::new(|i| uniform(u64::from(i), i)),
        ];
        for draw in draws {
            let mut buckets = [0u32; 20];
            let mut product = 0.0;
            for i in 0..n {
                let u = draw(i);
                assert!((0.0..1.0).contains(&u));
                buckets[(u * 20.0) as usize] += 1;
                product += (u - 0.5) * (draw(i + 1) - 0.5);
            }
            let expected = f64::from(n) / 20.0;
            let chi2: f64 = buckets.iter().map(|&b| (f64::from(b) - expected).powi(2) / expected).sum();
            assert!(chi2 < 43.8, "19 degrees of freedom, p = 0.001: {chi2}");
            let correlation = product / f64::from(n) * 12.0;
            assert!(correlation.abs() < 0.015, "{correlation}");
        }
    }

    #[test]
    fn draws_do_not_change_between_versions() {
        // A replica of another build must continue a text: these numbers are part of the wire contract.
        assert_eq!(uniform(0, 0).to_bits(), 0x3fe4_e0db_a5e9_a32f);
        assert_eq!(uniform(42, 7).to_bits(), 0x3fe7_82d4_7a99_890c);
    }

    #[test]
    fn a_candidate_is_picked_as_often_as_it_is_likely() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), f32::NEG_INFINITY, 0.2f32.ln()];
        let mut counts = [0u32; 4];
        for position in 0..100_000 {
            let token = pick(&mut candidates(&logits), uniform(9, position)).unwrap();
            counts[token.0 as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([0.5, 0.3, 0.0, 0.2]) {
            assert!((f64::from(*count) / 1e5 - expected).abs() < 0.005, "{counts:?}");
        }
    }

    #[test]
    fn the_ends_of_the_range_pick_possible_candidates() {
        let forbidden = f32::NEG_INFINITY;
        let mut all = candidates(&[forbidden, 1.0, 2.0, forbidden]);
        assert_eq!(pick(&mut all, 0.0), Some(Token(1)));
        assert_eq!(pick(&mut all, 1.0), Some(Token(2)));
        assert_eq!(pick(&mut candidates(&[forbidden]), 0.5), None);
        assert_eq!(pick(&mut [], 0.5), None);
    }
}
