//! Passes over the logits of a whole vocabulary. Knows nothing of parameters.

use llama_sys as sys;

use super::{SamplerError, check_token};
use crate::Token;

/// No model computes more; below it, dividing by the smallest temperature cannot overflow.
const LIMIT: f32 = 1e30;

/// Numbers compared at once: enough for any CPU's vectors.
const LANES: usize = 16;

/// The largest logit. −∞ marks a token that must not be chosen; NaN and +∞ are errors.
pub(super) fn max(logits: &[f32]) -> Result<f32, SamplerError> {
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut is_bad = [false; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &logit) in chunk.iter().enumerate() {
            max[lane] = if logit > max[lane] { logit } else { max[lane] };
            is_bad[lane] |= !is_logit(logit);
        }
    }
    for (lane, &logit) in rest.iter().enumerate() {
        max[lane] = if logit > max[lane] { logit } else { max[lane] };
        is_bad[lane] |= !is_logit(logit);
    }
    if is_bad.contains(&true) {
        return Err(first_bad(logits));
    }
    Ok(max.into_iter().fold(f32::NEG_INFINITY, f32::max))
}

fn is_logit(logit: f32) -> bool {
    logit < LIMIT
}

#[cold]
fn first_bad(logits: &[f32]) -> SamplerError {
    let bad = logits.iter().enumerate().find(|(_, logit)| !is_logit(**logit));
    let (index, value) = bad.map_or((0, f32::NAN), |(index, logit)| (index, *logit));
    SamplerError::BadLogit { token: token_at(index), value }
}

fn token_at(index: usize) -> Token {
    // A vocabulary's size is an i32 in llama.cpp.
    Token(i32::try_from(index).unwrap_or(i32::MAX))
}

/// The first token whose logit is `value`.
pub(super) fn first_of(logits: &[f32], value: f32) -> Option<Token> {
    logits.iter().position(|logit| *logit == value).map(token_at)
}

/// All tokens that may be chosen, in the vocabulary's order.
pub(super) fn fill(logits: &[f32], candidates: &mut Vec<sys::llama_token_data>) {
    candidates.clear();
    candidates.extend(
        (0..)
            .zip(logits)
            .filter(|(_, logit)| **logit > f32::NEG_INFINITY)
            .map(|(id, logit)| sys::llama_token_data { id, logit: *logit, p: 0.0 }),
    );
}

/// The log probability of `token`, and the `top_n` likeliest tokens with theirs, likeliest first (the lower id first
/// among equals), from the `[n_vocab]` raw logits: temperature, penalties and filters do not count.
pub fn logprobs(
    logits: &[f32],
    token: Token,
    top_n: usize,
) -> Result<(f32, Vec<(Token, f32)>), SamplerError> {
    check_token(token, u32::try_from(logits.len()).unwrap_or(u32::MAX))?;
    let max = max(logits)?;
    if max == f32::NEG_INFINITY {
        return Err(SamplerError::NothingAllowed { position: 0 });
    }
    // Each term is at most 1: f32 is exact enough for a term, not for a sum of 150,000.
    let sum: f64 = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
    let normaliser = f64::from(max) + sum.ln();
    #[allow(clippy::cast_possible_truncation, reason = "reported as f32")]
    let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
    let top = likeliest(logits, top_n).into_iter().map(|(token, logit)| (token, logprob(logit))).collect();
    Ok((logprob(logits[token.0 as usize]), top))
}

/// The `n` largest logits, largest first. For small `n` almost every logit is dropped after one comparison.
fn likeliest(logits: &[f32], n: usize) -> Vec<(Token, f32)> {
    let mut top: Vec<(Token, f32)> = Vec::with_capacity(n.min(logits.len()) + 1);
    if n == 0 {
        return top;
    }
    for (index, &logit) in logits.iter().enumerate() {
        if top.len() == n && top.last().is_some_and(|(_, least)| logit <= *least) {
            continue;
        }
        let at = top.partition_point(|(_, larger)| *larger >= logit);
        top.insert(at, (token_at(index), logit));
        top.truncate(n);
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_sees_every_lane_and_the_rest() {
        for at in 0..37 {
            let mut logits = vec![-1.0; 37];
            logits[at] = 2.0;
            assert_eq!(max(&logits), Ok(2.0));
            assert_eq!(first_of(&logits, 2.0), Some(token_at(at)));
        }
        assert_eq!(max(&[f32::NEG_INFINITY; 20]), Ok(f32::NEG_INFINITY));
    }

    #[test]
    fn what_is_no_logit_is_named() {
        for value in [f32::NAN, f32::INFINITY] {
            let mut logits = vec![0.0; 40];
            logits[33] = value;
            let Err(SamplerError::BadLogit { token, .. }) = max(&logits) else { panic!("{value} was taken") };
            assert_eq!(token, Token(33));
        }
    }

    #[test]
    fn forbidden_tokens_are_no_candidates() {
        let mut candidates = Vec::new();
        fill(&[1.0, f32::NEG_INFINITY, 2.0], &mut candidates);
        let ids: Vec<i32> = candidates.iter().map(|candidate| candidate.id).collect();
        assert_eq!(ids, [0, 2]);
    }

    #[test]
    fn logprobs_are_a_log_softmax() {
        let logits = [1.0f32, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
        let sum: f64 = [1.0f64, 3.0, 2.0, 3.0].iter().map(|x| x.exp()).sum();
        let (logprob, top) = logprobs(&logits, Token(2), 3).unwrap();
        assert!((f64::from(logprob) - (2.0 - sum.ln())).abs() < 1e-6);
        assert_eq!(top.iter().map(|(token, _)| token.0).collect::<Vec<_>>(), [1, 3, 2]);
        assert!((f64::from(top[0].1) - (3.0 - sum.ln())).abs() < 1e-6);
        assert_eq!(logprobs(&logits, Token(4), 0).unwrap(), (f32::NEG_INFINITY, vec![]));
        assert_eq!(logprobs(&logits, Token(0), 50).unwrap().1.len(), 5);
        assert!(matches!(logprobs(&logits, Token(5), 0), Err(SamplerError::Token { .. })));
    }
}
