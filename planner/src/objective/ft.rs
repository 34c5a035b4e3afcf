//! Finishing time of one request through both phases, after HexGen-2: NP/ΣPS + ND/ΣDS. The paper's baseline (E2LLM,
//! section 4.2), in our reading. It does not look at how fast requests come.

use super::{Objective, Rates, Score, WORST};
use crate::instance::Work;

pub(crate) struct Ft;

impl Objective for Ft {
    fn score(&self, work: &Work, rates: Rates) -> Score {
        if !(rates.ps > 0.0 && rates.ds > 0.0) {
            return WORST;
        }
        let (prefill, decode) = (work.prompt / rates.ps, work.output / rates.ds);
        [prefill + decode, prefill, decode]
    }
}
