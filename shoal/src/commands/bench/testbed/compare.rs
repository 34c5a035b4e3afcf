//! What clients saw beside what the simulator says, and whether they agree.

use planner::sim::{Served, SimCluster};
use serde::{Deserialize, Serialize};

use super::drive::Seen;

/// Within this share of what was simulated they agree.
pub(super) const TOLERANCE: f64 = 0.1;

/// Waits below a second agree within so many.
const SHORT_WAIT: f64 = 1.0;
const SHORT_TOLERANCE: f64 = 0.2;

/// What requests went through, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Figures {
    /// The longest wait: what the first token came later than it would have on an idle replica, and the second later than the
    /// further ones.
    pub(super) max_wait_s: f64,
    /// Mean time to the first token.
    pub(super) ttft_s: f64,
    /// Mean time per further token.
    pub(super) tpot_s: f64,
    /// When the last token came.
    pub(super) end_s: f64,
}

/// Simulated and measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Comparison {
    pub(super) simulated: Figures,
    pub(super) measured: Figures,
}

/// One request, by whomever it was followed.
#[derive(Debug, Clone, Copy)]
struct Course {
    ttft: f64,
    wait: f64,
    tpot: f64,
    end: f64,
}

impl Figures {
    /// Of the simulator's requests. Waits are those that a client would see, so that both are of the same kind: on a replica that does
    /// both phases, a prompt that answers hold up waits.
    pub(super) fn simulated(served: &[Served], prompts: &[f64], cluster: &SimCluster) -> Self {
        let course = |(served, prompt): (&Served, &f64)| {
            let alone = cluster.replicas()[served.prefilled_by].prompt_seconds(*prompt);
            Course {
                ttft: served.ttft(),
                wait: (served.ttft() - alone).max(0.0) + (served.decode_start - served.first_token),
                tpot: served.tpot(),
                end: served.finish,
            }
        };
        Self::of(served.iter().zip(prompts).map(course))
    }

    /// Of what clients saw.
    pub(super) fn measured(seen: &[Seen], prompts: &[f64], cluster: &SimCluster) -> Self {
        let course = |(seen, prompt): (&Seen, &f64)| {
            let alone = cluster.replicas().get(seen.replica).map_or(0.0, |it| it.prompt_seconds(*prompt));
            let ttft = seen.first - seen.arrival;
            // Of two tokens nobody can tell what of the second's time was a wait.
            let tpot = match seen.tokens - 2.0 {
                further if further > 0.0 => (seen.last - seen.second) / further,
                _ => seen.second - seen.first,
            };
            let pause = (seen.second - seen.first - tpot).max(0.0);
            Course { ttft, wait: (ttft - alone).max(0.0) + pause, tpot, end: seen.last }
        };
        Self::of(seen.iter().zip(prompts).map(course))
    }

    fn of(courses: impl Iterator<Item = Course>) -> Self {
        let none = Self { max_wait_s: 0.0, ttft_s: 0.0, tpot_s: 0.0, end_s: 0.0 };
        let mut n = 0.0_f64;
        let sums = courses.fold(none, |sums, course| {
            n += 1.0;
            Self {
                max_wait_s: sums.max_wait_s.max(course.wait),
                ttft_s: sums.ttft_s + course.ttft,
                tpot_s: sums.tpot_s + course.tpot,
                end_s: sums.end_s.max(course.end),
            }
        });
        Self { ttft_s: sums.ttft_s / n.max(1.0), tpot_s: sums.tpot_s / n.max(1.0), ..sums }
    }
}

impl Comparison {
    /// Whether all three agree.
    pub(super) fn agrees(&self) -> bool {
        let (simulated, measured) = (self.simulated, self.measured);
        waits_agree(simulated.max_wait_s, measured.max_wait_s)
            && share(simulated.ttft_s, measured.ttft_s).abs() <= TOLERANCE
            && share(simulated.tpot_s, measured.tpot_s).abs() <= TOLERANCE
    }
}

fn waits_agree(simulated: f64, measured: f64) -> bool {
    let is_short = simulated < SHORT_WAIT && measured < SHORT_WAIT;
    let close = (measured - simulated).abs() <= SHORT_TOLERANCE;
    (is_short && close) || share(simulated, measured).abs() <= TOLERANCE
}

/// By what share the measured figure is above the simulated one.
pub(super) fn share(simulated: f64, measured: f64) -> f64 {
    if simulated > 0.0 { measured / simulated - 1.0 } else { measured.signum() * f64::from(measured != 0.0) }
}

#[cfg(test)]
mod tests {
    use cluster::Role;
    use planner::sim::SimReplica;

    use super::*;

    fn cluster() -> SimCluster {
        // A thousand prompt tokens a second.
        SimCluster::without_handover(vec![SimReplica::simple(Role::Mixed, 4, 0.001, vec![0.1; 5])])
    }

    #[test]
    fn a_wait_is_what_an_idle_replica_would_not_have_needed() {
        let seen = |first: f64, second: f64| Seen {
            arrival: 10.0,
            first,
            second,
            last: second + 9.0,
            tokens: 11.0,
            replica: 0,
        };
        // Half a second of prompt; a second per token.
        let prompts = [500.0, 500.0];
        let of = |seen: &[Seen]| Figures::measured(seen, &prompts[..seen.len()], &cluster());
        let none = of(&[seen(10.5, 11.5)]);
        assert!(none.max_wait_s.abs() < 1e-9 && (none.tpot_s - 1.0).abs() < 1e-9);
        let both = of(&[seen(10.5, 11.5), seen(12.5, 16.5)]);
        assert!((both.max_wait_s - 5.0).abs() < 1e-9, "2 s before the first token, 3 s before the second");
        assert!((both.ttft_s - 1.5).abs() < 1e-9 && (both.end_s - 25.5).abs() < 1e-9);
    }

    #[test]
    fn a_simulated_request_waits_for_its_slot_and_its_cache() {
        let served = Served {
            arrival: 1.0,
            prefill_start: 3.0,
            first_token: 3.5,
            slot: 4.0,
            decode_start: 4.5,
            finish: 14.5,
            output: 11.0,
            prefilled_by: 0,
            decoded_by: 0,
        };
        let figures = Figures::simulated(&[served], &[500.0], &cluster());
        assert_eq!((figures.max_wait_s, figures.ttft_s, figures.tpot_s), (3.0, 2.5, 1.0));
        assert!((figures.max_wait_s - served.wait()).abs() < 1e-9);
    }

    #[test]
    fn short_waits_agree_within_a_fifth_of_a_second_and_long_ones_within_a_tenth() {
        for (simulated, measured, agrees) in [
            (0.0, 0.19, true),
            (0.0, 0.21, false),
            (0.9, 0.75, true),
            (0.95, 1.04, true),
            (10.0, 10.9, true),
            (10.0, 11.1, false),
            (10.0, 8.9, false),
        ] {
            assert_eq!(waits_agree(simulated, measured), agrees, "{simulated} {measured}");
        }
    }
}
