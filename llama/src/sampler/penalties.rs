//! Repetition, frequency and presence penalties over the tokens seen last, with the arithmetic of llama.cpp's
//! penalties sampler (src/llama-sampler.cpp), but in time proportional to the distinct tokens seen.

use std::collections::{HashMap, VecDeque};

use super::SamplerParams;
use crate::Token;

#[derive(Debug)]
pub(super) struct Penalties {
    repeat: f32,
    frequency: f32,
    presence: f32,
    /// `None` looks back on everything.
    window: Option<usize>,
    recent: VecDeque<Token>,
    counts: HashMap<Token, u32>,
}

impl Penalties {
    /// `None` if the parameters turn all penalties off.
    #[allow(clippy::float_cmp, reason = "exactly these values are off")]
    pub(super) fn new(params: &SamplerParams) -> Option<Self> {
        let (repeat, frequency, presence) =
            (params.repeat_penalty, params.frequency_penalty, params.presence_penalty);
        let is_off = repeat == 1.0 && frequency == 0.0 && presence == 0.0;
        if is_off || params.repeat_last_n == Some(0) {
            return None;
        }
        Some(Self {
            repeat,
            frequency,
            presence,
            window: params.repeat_last_n.map(|n| n as usize),
            recent: VecDeque::new(),
            counts: HashMap::new(),
        })
    }

    /// Whether there is anything to penalise yet.
    pub(super) fn is_active(&self) -> bool {
        !self.counts.is_empty()
    }

    pub(super) fn accept(&mut self, token: Token) {
        *self.counts.entry(token).or_insert(0) += 1;
        let Some(window) = self.window else { return };
        self.recent.push_back(token);
        if self.recent.len() > window
            && let Some(oldest) = self.recent.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
    }

    /// `logits`: `[n_vocab]`, of the vocabulary that the accepted tokens are from.
    #[allow(clippy::cast_precision_loss, reason = "counts are far below 2^24")]
    pub(super) fn apply(&self, logits: &mut [f32]) {
        for (token, count) in &self.counts {
            let logit = &mut logits[token.0 as usize];
            // Dividing alone would make a token with a negative logit likelier.
            if *logit <= 0.0 {
                *logit *= self.repeat;
            } else {
                *logit /= self.repeat;
            }
            *logit -= *count as f32 * self.frequency + self.presence;
        }
    }
}

#[cfg(test)]
mod tests {
    use llama_sys as sys;

    use super::*;

    /// What llama.cpp's own penalties make of `logits` after `history`.
    fn reference(params: &SamplerParams, last_n: i32, history: &[Token], logits: &[f32]) -> Vec<f32> {
        let mut candidates: Vec<_> = (0..)
            .zip(logits)
            .map(|(id, logit)| sys::llama_token_data { id, logit: *logit, p: 0.0 })
            .collect();
        let mut array = sys::llama_token_data_array {
            data: candidates.as_mut_ptr(),
            size: candidates.len(),
            selected: -1,
            sorted: false,
        };
        // SAFETY: the sampler is freed once, after its last use; `array` describes `candidates`
        // (src/llama-sampler.cpp).
        unsafe {
            let sampler = sys::llama_sampler_init_penalties(
                i32::try_from(logits.len()).unwrap(),
                last_n,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            );
            history.iter().for_each(|token| sys::llama_sampler_accept(sampler, token.0));
            sys::llama_sampler_apply(sampler, &raw mut array);
            sys::llama_sampler_free(sampler);
        }
        candidates.iter().map(|candidate| candidate.logit).collect()
    }

    #[test]
    fn the_arithmetic_is_llama_cpps() {
        let logits: Vec<f32> = (0..50u8).map(|i| (f32::from(i) * 0.77).sin() * 9.0).collect();
        let history: Vec<Token> = (0..300).map(|i| Token((i * i + 3 * i) % 50)).collect();
        for (repeat_penalty, frequency_penalty, presence_penalty) in
            [(1.3, 0.0, 0.0), (0.8, 0.25, 0.0), (1.0, -0.5, 1.5), (1.1, 0.1, -0.7)]
        {
            for last_n in [1, 7, 64, 1000] {
                let params = SamplerParams {
                    repeat_penalty,
                    frequency_penalty,
                    presence_penalty,
                    repeat_last_n: u32::try_from(last_n).ok(),
                    ..SamplerParams::default()
                };
                let mut penalties = Penalties::new(&params).unwrap();
                history.iter().for_each(|token| penalties.accept(*token));
                let mut ours = logits.clone();
                penalties.apply(&mut ours);
                for (ours, theirs) in ours.iter().zip(reference(&params, last_n, &history, &logits)) {
                    // A compiler may fuse the multiplication and the addition.
                    assert!((ours - theirs).abs() <= 1e-5, "{ours} is not {theirs} with {params:?}");
                }
            }
        }
    }

    #[test]
    fn parameters_that_do_nothing_make_no_penalties() {
        assert!(Penalties::new(&SamplerParams::default()).is_none());
        let none =
            SamplerParams { presence_penalty: 1.0, repeat_last_n: Some(0), ..SamplerParams::default() };
        assert!(Penalties::new(&none).is_none());
    }
}
