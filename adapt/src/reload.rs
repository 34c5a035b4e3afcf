//! Whether another plan pays for what it takes to get there. Pure.
//!
//! What is saved and what it costs are both seconds of the longest wait. While stages load, the replicas that had to go for
//! them serve nobody: the work that they would have done waits, and so does who asked for it, for as long as they would have
//! taken. So loading for `L` seconds with a share `s` of the capacity away costs `L · s`. Where memory has room for both, old
//! replicas serve on until the new ones do, and it costs nothing; the margin is asked for even then.

use serde::Serialize;

use crate::outlook::Outlook;
use crate::tuning::Tuning;

/// What it takes to get to another plan.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Reload {
    /// Until its last stage is loaded.
    pub load_s: f64,
    /// Share of the present capacity that is away meanwhile.
    pub lost_share: f64,
}

/// What another plan saves and costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Payoff {
    /// Seconds saved.
    pub gain_s: f64,
    /// Seconds that it costs to get there.
    pub cost_s: f64,
    /// Seconds that have to be saved.
    pub needed_s: f64,
    /// Whether they are.
    pub pays: bool,
}

/// Weighs what is against what would be.
pub fn weigh(now: &Outlook, then: &Outlook, reload: Reload, tuning: &Tuning) -> Payoff {
    let gain_s = now.score() - then.score();
    let cost_s = reload.load_s.max(0.0) * reload.lost_share.clamp(0.0, 1.0);
    let needed_s = cost_s + tuning.needed_s(now);
    Payoff { gain_s, cost_s, needed_s, pays: gain_s >= needed_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(seconds: f64) -> Outlook {
        Outlook { max_wait_s: seconds, ..Outlook::default() }
    }

    fn weighed(now: f64, then: f64, load_s: f64, lost_share: f64) -> Payoff {
        weigh(&waits(now), &waits(then), Reload { load_s, lost_share }, &Tuning::default())
    }

    #[test]
    fn a_plan_pays_if_it_saves_more_than_the_reload_costs_and_a_fifth_of_what_is() {
        let payoff = weighed(30.0, 6.0, 60.0, 0.25);
        assert_eq!((payoff.gain_s, payoff.cost_s, payoff.needed_s, payoff.pays), (24.0, 15.0, 21.0, true));
        assert!(!weighed(30.0, 10.0, 60.0, 0.25).pays, "20 s are saved, 15 s and a margin of 6 s are needed");
        assert!(!weighed(30.0, 6.0, 60.0, 0.5).pays);
    }

    #[test]
    fn where_nothing_is_lost_the_margin_is_still_asked_for() {
        assert!(weighed(30.0, 23.0, 600.0, 0.0).pays);
        assert!(!weighed(30.0, 25.0, 600.0, 0.0).pays);
        assert!(!weighed(0.6, 0.2, 600.0, 0.0).pays, "0.4 s are nothing");
    }
}
