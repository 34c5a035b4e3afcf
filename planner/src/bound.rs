//! What no plan can beat: every device computes the blocks it is fastest at, in fractions, without links, heads or limits
//! of memory, and its time is shared freely between the phases. For clusters too large to search exactly.
//!
//! A replica's slowest stage takes at least N / Σ(1 / block time) over its devices, so its prompt tokens per second are
//! at most a sum over them, and so are its generated tokens per second. What is left is how to divide devices between
//! two sums, which the order of their ratios decides.

use crate::instance::{DenseDevice, Instance};
use crate::objective::{Objective, Rates, better};

/// Bisections within one device's share.
const STEPS: usize = 60;

/// The first number of the best score that a plan's rates could have.
pub(crate) fn bound(inst: &Instance, objective: &dyn Objective) -> f64 {
    let mut devices: Vec<(f64, f64)> = inst.devices.iter().map(|d| rates(inst, d)).collect();
    devices.sort_by(|a, b| (b.0 * a.1).total_cmp(&(a.0 * b.1)));
    let mut ps = 0.0;
    let mut ds: f64 = devices.iter().map(|d| d.1).sum();
    let score = |ps: f64, ds: f64| objective.score(&inst.work, Rates { ps, ds, slots: inst.work.requests });
    let mut best = score(ps, ds);
    for (of_prefill, of_decode) in devices {
        // Objectives on rates have one valley along the way from none of a device to all of it.
        let at = |share: f64| score(ps + share * of_prefill, ds - share * of_decode);
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..STEPS {
            let (a, b) = (low + (high - low) / 3.0, high - (high - low) / 3.0);
            if better(&at(b), &at(a)) { low = a } else { high = b }
        }
        for share in [low, high, 1.0] {
            if better(&at(share), &best) {
                best = at(share);
            }
        }
        ps += of_prefill;
        ds -= of_decode;
    }
    best[0]
}

/// The most prompt and generated tokens per second that a device can add to a replica.
fn rates(inst: &Instance, device: &DenseDevice) -> (f64, f64) {
    let n = inst.n_blocks() as f64;
    let processors = || device.gpu.iter().chain(&device.cpu);
    let fastest = |costs: &[f64]| costs.iter().copied().fold(f64::INFINITY, f64::min);
    let prefill = processors().map(|p| fastest(&p.prefill)).fold(f64::INFINITY, f64::min);
    let most_rows = if inst.serial { 1 } else { inst.work.max_slots };
    let decode =
        (1..=most_rows).flat_map(|rows| processors().map(move |p| rows as f64 / fastest(p.decode(rows))));
    (inst.work.prompt / (prefill * n), decode.fold(0.0, f64::max) / n)
}
