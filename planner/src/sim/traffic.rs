//! Requests of a workload, drawn from a seed.

use cluster::{Arrivals, Lengths, Spread, Workload};

use crate::rng::Rng;

/// One request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// When it comes, in seconds.
    pub at: f64,
    /// Tokens of its prompt.
    pub prompt: f64,
    /// Tokens generated for it; the first comes out of prefill.
    pub output: f64,
}

/// The workload's requests. Lengths are rescaled to their mean, so that seeds differ in shape and not in load, and
/// never exceed what a slot has room for.
pub fn requests(workload: &Workload, seed: u64) -> Vec<Request> {
    if let Arrivals::Trace(entries) = &workload.arrivals {
        let of = |entry: &cluster::TraceEntry| Request {
            at: entry.at.0 / 1e3,
            prompt: f64::from(entry.prompt),
            output: f64::from(entry.output),
        };
        return entries.iter().map(of).collect();
    }
    let n = workload.requests as usize;
    let context = f64::from(workload.slot_context);
    let prompts = lengths(workload.prompt, n, &mut Rng::fork(seed, 1));
    let outputs = lengths(workload.output, n, &mut Rng::fork(seed, 2));
    let mut clock = Rng::fork(seed, 3);
    let mut at = 0.0;
    let mut all = Vec::with_capacity(n);
    for (index, (prompt, output)) in prompts.into_iter().zip(outputs).enumerate() {
        at = match workload.arrivals {
            Arrivals::Poisson(interval) => at + clock.exponential() * interval.0 / 1e3,
            Arrivals::Every(interval) => index as f64 * interval.0 / 1e3,
            Arrivals::Trace(_) => at,
        };
        let prompt = prompt.min(context - 1.0).max(1.0);
        all.push(Request { at, prompt, output: output.min(context - prompt).max(1.0) });
    }
    all
}

fn lengths(of: Lengths, n: usize, rng: &mut Rng) -> Vec<f64> {
    let draw = |rng: &mut Rng| match of.spread {
        Spread::None => of.mean,
        Spread::LogNormal(cv) => rng.log_normal(of.mean, cv),
        Spread::Exponential => of.mean * rng.exponential(),
    };
    let drawn: Vec<f64> = (0..n).map(|_| draw(rng)).collect();
    let scale = of.mean * n as f64 / drawn.iter().sum::<f64>();
    drawn.into_iter().map(|length| (length * scale).round().max(1.0)).collect()
}

#[cfg(test)]
mod tests {
    use cluster::Millis;

    use super::*;

    fn workload(arrivals: Arrivals) -> Workload {
        Workload {
            arrivals,
            prompt: Lengths::log_normal(500.0, 0.35),
            output: Lengths::log_normal(700.0, 0.4),
            requests: 1000,
            min_rate: Workload::DEFAULT_MIN_RATE,
            slot_context: 8192,
            max_slots: 32,
        }
    }

    #[test]
    fn lengths_keep_their_mean_in_every_seed() {
        for seed in 0..5 {
            let all = requests(&workload(Arrivals::Every(Millis(100.0))), seed);
            let mean = all.iter().map(|r| r.output).sum::<f64>() / 1000.0;
            assert!((mean - 700.0).abs() < 1.0, "{mean}");
            assert!((all[999].at - 99.9).abs() < 1e-9);
        }
    }

    #[test]
    fn poisson_arrivals_have_the_mean_interval_and_one_seed_gives_one_sequence() {
        let poisson = workload(Arrivals::Poisson(Millis(100.0)));
        let all = requests(&poisson, 7);
        assert!((all[999].at - 100.0).abs() < 10.0, "{}", all[999].at);
        assert_eq!(all, requests(&poisson, 7));
        assert_ne!(all, requests(&poisson, 8));
    }
}
