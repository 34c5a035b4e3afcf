//! Which replicas should prefill and which decode, as they are: cut as they are, with the slots that they have. Pure.
//!
//! Every assignment of roles is tried in the planner's simulator, with the speeds that were observed, on requests like those that
//! come, after those that wait already. Up to six replicas all assignments are tried; beyond, single changes are made while they
//! help. A speed that was never seen, since a replica has never done that, is taken from those that have: replicas of
//! one cluster differ less from each other than prompts from answers.

use cluster::{Millis, Role, TokensPerSecond, Workload};
use planner::sim::{Handover, Request, SimCluster, SimReplica, requests};
use serde::Serialize;

use crate::outlook::{Outlook, outlook};
use crate::tuning::Tuning;

/// All assignments of so many replicas are tried: 729 of six.
const TRY_ALL: usize = 6;

/// Single changes that are made at most where not all are tried, for each replica.
const ROUNDS: usize = 2;

/// Lots of requests that assignments are tried with.
const SEEDS: [u64; 2] = [1, 2];

/// Seconds that a change of one replica's role has to be worth: what is under way finishes where it is, and slots are found held.
const FLIP_S: f64 = 0.1;

/// Nothing is known of anyone: a small model on a laptop, as the router assumes.
const UNKNOWN_PREFILL: TokensPerSecond = TokensPerSecond(500.0);
const UNKNOWN_TPOT: Millis = Millis(50.0);

const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Mixed];

/// A replica.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Runner {
    /// Under which it is known.
    pub number: usize,
    /// What it does.
    pub role: Role,
    /// Requests that it generates at once.
    pub slots: u32,
    /// How fast it is.
    pub speed: Speed,
}

/// How fast a replica is, as far as that is known.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Speed {
    /// Prompt tokens a second.
    pub prefill: Option<TokensPerSecond>,
    /// Time per output token, alone and with every slot busy.
    pub tpot: Option<(Millis, Millis)>,
}

impl Speed {
    /// With what is not known taken from what was predicted, as much faster or slower as it is in what is known of it.
    #[must_use]
    pub fn filled_from(self, predicted: Self) -> Self {
        let slower = match (self.prefill.zip(predicted.prefill), self.tpot.zip(predicted.tpot)) {
            (Some((seen, said)), _) => said.0 / seen.0.max(1e-3),
            (None, Some((seen, said))) => seen.1.0 / said.1.0.max(1e-3),
            (None, None) => 1.0,
        };
        let tpot = predicted.tpot.map(|(alone, full)| (Millis(alone.0 * slower), Millis(full.0 * slower)));
        let prefill = predicted.prefill.map(|said| TokensPerSecond(said.0 / slower.max(1e-3)));
        Self { prefill: self.prefill.or(prefill), tpot: self.tpot.or(tpot) }
    }
}

/// Requests that wait already.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waiting {
    /// For their prompts to be computed.
    pub prompts: usize,
    /// For a slot to be decoded in.
    pub answers: usize,
}

/// What there is, and what is asked of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Situation {
    /// Those that serve.
    pub replicas: Vec<Runner>,
    /// What goes on being asked for.
    pub workload: Workload,
    /// What was asked for already.
    pub waiting: Waiting,
    /// Seconds until a prompt's KV is where its answer is generated.
    pub move_s: f64,
    /// Prompt tokens computed at once.
    pub prefill_chunk: u32,
}

/// A replica's role becomes another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Flip {
    /// Its number.
    pub replica: usize,
    /// What it does.
    pub from: Role,
    /// What it should.
    pub to: Role,
}

/// The best roles that were found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RoleChoice {
    /// What changes for them; nothing if the present roles are the best.
    pub flips: Vec<Flip>,
    /// What requests go through with the roles as they are.
    pub now: Outlook,
    /// And with those.
    pub then: Outlook,
    /// Replicas of which a speed was never seen.
    pub assumed: Vec<usize>,
}

impl RoleChoice {
    /// Whether they are better by enough.
    pub fn is_worth_it(&self, tuning: &Tuning) -> bool {
        !self.flips.is_empty() && self.gain_s() >= tuning.needed_s(&self.now)
    }

    /// Seconds that they save.
    pub fn gain_s(&self) -> f64 {
        self.now.score() - self.then.score()
    }
}

/// The best roles for what is asked for; none if nobody serves.
pub fn choose_roles(situation: &Situation) -> Option<RoleChoice> {
    let stage = Stage::new(situation);
    let present: Vec<Role> = situation.replicas.iter().map(|replica| replica.role).collect();
    let now = stage.outlook(&present, f64::INFINITY)?;
    let (roles, then) = if present.len() <= TRY_ALL {
        stage.best_of_all(&present, now)
    } else {
        stage.best_by_steps(&present, now)
    };
    let changed = situation.replicas.iter().zip(roles).filter(|(replica, role)| replica.role != *role);
    let flips = changed.map(|(replica, to)| Flip { replica: replica.number, from: replica.role, to });
    Some(RoleChoice { flips: flips.collect(), now, then, assumed: stage.assumed })
}

/// Where assignments are tried.
struct Stage {
    /// Of each replica its slots, seconds per prompt token, and seconds per token by the number that run.
    replicas: Vec<(usize, f64, Vec<f64>)>,
    lots: Vec<Vec<Request>>,
    chunk: f64,
    move_s: f64,
    max_tpot: f64,
    assumed: Vec<usize>,
}

impl Stage {
    fn new(situation: &Situation) -> Self {
        let known = &situation.replicas;
        let prefill = mean(known.iter().filter_map(|one| one.speed.prefill.map(|speed| speed.0)))
            .unwrap_or(UNKNOWN_PREFILL.0);
        let alone = mean(known.iter().filter_map(|one| one.speed.tpot.map(|tpot| tpot.0.0)));
        let full = mean(known.iter().filter_map(|one| one.speed.tpot.map(|tpot| tpot.1.0)));
        let tpot = alone.zip(full).unwrap_or((UNKNOWN_TPOT.0, UNKNOWN_TPOT.0));
        let replica = |one: &Runner| {
            let speed = one.speed.prefill.map_or(prefill, |speed| speed.0);
            let (alone, full) = one.speed.tpot.map_or(tpot, |(alone, full)| (alone.0, full.0));
            let slots = one.slots.max(1) as usize;
            (slots, 1.0 / speed.max(1e-3), tpots(slots, (alone / 1e3, full / 1e3)))
        };
        let lacks = |one: &&Runner| one.speed.prefill.is_none() || one.speed.tpot.is_none();
        Self {
            replicas: known.iter().map(replica).collect(),
            lots: SEEDS.iter().map(|&seed| lot(situation, seed)).collect(),
            chunk: f64::from(situation.prefill_chunk.max(1)),
            move_s: situation.move_s,
            max_tpot: 1.0 / situation.workload.min_rate.0,
            assumed: known.iter().filter(lacks).map(|one| one.number).collect(),
        }
    }

    /// What requests go through; none if somebody waits longer than `most` seconds.
    fn outlook(&self, roles: &[Role], most: f64) -> Option<Outlook> {
        // Then those of the other role do both.
        let is_lacking = lacks_one(roles);
        let replica = |(role, (slots, per_token, tpot)): (&Role, &(usize, f64, Vec<f64>))| {
            let role = if is_lacking { Role::Mixed } else { *role };
            let slots = if role == Role::Prefill { 0 } else { *slots };
            SimReplica::chunked(role, slots, (*per_token, self.chunk), tpot.clone())
        };
        let replicas: Vec<SimReplica> = roles.iter().zip(&self.replicas).map(replica).collect();
        let handover = vec![Handover::linear(0.0, self.move_s); replicas.len() * replicas.len()];
        outlook(&SimCluster::new(replicas, handover), &self.lots, (most, self.max_tpot))
    }

    /// Of two assignments the better: the fewer changes the better, if they are alike.
    fn improve(&self, present: &[Role], best: &mut (Vec<Role>, Outlook, f64), roles: &[Role]) -> bool {
        // Who is to do both is to be called so.
        if lacks_one(roles) {
            return false;
        }
        let flips = present.iter().zip(roles).filter(|(a, b)| a != b).count();
        let price = flips as f64 * FLIP_S;
        let Some(outlook) = self.outlook(roles, best.2 - price) else { return false };
        let cost = outlook.score() + price;
        let is_better = cost < best.2;
        if is_better {
            *best = (roles.to_vec(), outlook, cost);
        }
        is_better
    }

    fn best_of_all(&self, present: &[Role], now: Outlook) -> (Vec<Role>, Outlook) {
        let mut best = (present.to_vec(), now, now.score());
        for code in 0..ROLES.len().pow(present.len() as u32) {
            let digit = |place: usize| ROLES[code / ROLES.len().pow(place as u32) % ROLES.len()];
            let roles: Vec<Role> = (0..present.len()).map(digit).collect();
            self.improve(present, &mut best, &roles);
        }
        (best.0, best.1)
    }

    fn best_by_steps(&self, present: &[Role], now: Outlook) -> (Vec<Role>, Outlook) {
        let mut best = (present.to_vec(), now, now.score());
        for _ in 0..ROUNDS * present.len() {
            let from = best.0.clone();
            let mut any = false;
            for place in 0..present.len() {
                for role in ROLES.into_iter().filter(|role| *role != from[place]) {
                    let mut roles = from.clone();
                    roles[place] = role;
                    any |= self.improve(present, &mut best, &roles);
                }
            }
            if !any {
                break;
            }
        }
        (best.0, best.1)
    }
}

/// Whether nobody prefills, or nobody decodes.
fn lacks_one(roles: &[Role]) -> bool {
    let all = |role: Role| roles.iter().all(|one| *one == role);
    all(Role::Prefill) || all(Role::Decode)
}

/// Those that wait, and those that will come.
fn lot(situation: &Situation, seed: u64) -> Vec<Request> {
    let Situation { workload, waiting, .. } = situation;
    let waits = |prompt: f64| Request { at: 0.0, prompt, output: workload.mean_output().max(1.0) };
    let prompts = std::iter::repeat_n(waits(workload.mean_prompt().max(1.0)), waiting.prompts);
    let answers = std::iter::repeat_n(waits(1.0), waiting.answers);
    answers.chain(prompts).chain(requests(workload, seed)).collect()
}

/// Seconds per token by the number that run, from one to all slots; the first is not used.
fn tpots(slots: usize, (alone, full): (f64, f64)) -> Vec<f64> {
    let share = |n: usize| n.saturating_sub(1) as f64 / slots.saturating_sub(1).max(1) as f64;
    (0..=slots).map(|n| (alone + (full - alone) * share(n)).max(1e-6)).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (n, sum) = values.fold((0_u32, 0.0), |(n, sum), value| (n + 1, sum + value));
    (n > 0).then(|| sum / f64::from(n))
}

#[cfg(test)]
mod tests {
    use cluster::{Arrivals, Lengths};
    use proptest::prelude::*;

    use super::*;

    const FAST: Speed =
        Speed { prefill: Some(TokensPerSecond(1000.0)), tpot: Some((Millis(40.0), Millis(50.0))) };

    fn situation(roles: &[Role], rate: f64, prompt: f64, answer: f64) -> Situation {
        let runner = |(number, role): (usize, &Role)| Runner { number, role: *role, slots: 4, speed: FAST };
        Situation {
            replicas: roles.iter().enumerate().map(runner).collect(),
            workload: Workload {
                arrivals: Arrivals::Poisson(Millis(1e3 / rate)),
                prompt: Lengths::fixed(prompt),
                output: Lengths::fixed(answer),
                requests: 150,
                min_rate: Workload::DEFAULT_MIN_RATE,
                slot_context: 8192,
                max_slots: 8,
            },
            waiting: Waiting::default(),
            move_s: 0.05,
            prefill_chunk: 512,
        }
    }

    const PPPD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Prefill, Role::Decode];

    #[test]
    fn long_answers_make_prefill_replicas_decode() {
        // Three prefill 3,000 prompt tokens a second, one decodes 80: a second of either is asked for.
        let fitting = choose_roles(&situation(&PPPD, 1.0, 2400.0, 30.0)).unwrap();
        assert!(!fitting.is_worth_it(&Tuning::default()), "{fitting:?}");
        let shifted = choose_roles(&situation(&PPPD, 1.0, 100.0, 170.0)).unwrap();
        assert!(shifted.is_worth_it(&Tuning::default()), "{shifted:?}");
        let is_helpful = |flip: &Flip| flip.from != flip.to && flip.to != Role::Prefill;
        assert!(shifted.flips.iter().all(is_helpful), "{shifted:?}");
        assert!(shifted.now.max_wait_s > 5.0 * shifted.then.max_wait_s, "{shifted:?}");
    }

    #[test]
    fn a_speed_that_was_never_seen_is_that_of_the_others() {
        let known = situation(&PPPD, 1.0, 100.0, 170.0);
        let mut unknown = known.clone();
        for replica in &mut unknown.replicas {
            match replica.role {
                Role::Prefill => replica.speed.tpot = None,
                _ => replica.speed.prefill = None,
            }
        }
        let (known, unknown) = (choose_roles(&known).unwrap(), choose_roles(&unknown).unwrap());
        assert_eq!((known.flips, known.then), (unknown.flips, unknown.then));
        assert_eq!(unknown.assumed, [0, 1, 2, 3]);
    }

    #[test]
    fn a_speed_that_was_only_predicted_is_off_by_as_much_as_one_that_was_seen() {
        let half = Speed { prefill: Some(TokensPerSecond(500.0)), tpot: None };
        let filled = half.filled_from(FAST);
        assert_eq!(filled, Speed { tpot: Some((Millis(80.0), Millis(100.0))), ..half });
        let half = Speed { prefill: None, tpot: filled.tpot };
        assert_eq!(half.filled_from(FAST), filled);
        assert_eq!(Speed::default().filled_from(FAST), FAST);
        assert_eq!(filled.filled_from(Speed::default()), filled);
    }

    #[test]
    fn those_that_wait_count() {
        let mut quiet = situation(&PPPD, 0.3, 1000.0, 100.0);
        let before = choose_roles(&quiet).unwrap();
        quiet.waiting = Waiting { prompts: 0, answers: 40 };
        let after = choose_roles(&quiet).unwrap();
        assert!(before.now.max_wait_s < 5.0 && after.now.max_wait_s > 30.0, "{before:?} {after:?}");
        assert!(after.is_worth_it(&Tuning::default()), "{after:?}");
    }

    #[test]
    fn many_replicas_are_changed_one_by_one() {
        let mut roles = vec![Role::Prefill; 9];
        roles.push(Role::Decode);
        let choice = choose_roles(&situation(&roles, 2.5, 100.0, 170.0)).unwrap();
        assert!(choice.is_worth_it(&Tuning::default()) && choice.flips.len() >= 4, "{choice:?}");
    }

    #[test]
    fn nobody_has_no_roles_and_one_role_does_both() {
        assert_eq!(choose_roles(&situation(&[], 1.0, 100.0, 100.0)), None);
        let only = choose_roles(&situation(&[Role::Prefill], 0.1, 100.0, 20.0)).unwrap();
        assert!(only.flips.is_empty(), "{only:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn what_is_chosen_is_never_worse_than_what_is_and_is_chosen_again(
            roles in prop::collection::vec(0_usize..3, 1..5), rate in 0.05_f64..4.0, prompt in 1.0_f64..4000.0,
            answer in 1.0_f64..500.0, waiting in 0_usize..30,
        ) {
            let roles: Vec<Role> = roles.into_iter().map(|role| ROLES[role]).collect();
            let mut situation = situation(&roles, rate, prompt, answer);
            situation.workload.requests = 40;
            situation.waiting = Waiting { prompts: waiting, answers: waiting / 2 };
            let choice = choose_roles(&situation).unwrap();
            prop_assert!(choice.then.score() <= choice.now.score());
            for flip in &choice.flips {
                situation.replicas[flip.replica].role = flip.to;
            }
            let again = choose_roles(&situation).unwrap();
            prop_assert!(!again.is_worth_it(&Tuning::default()), "{choice:?} and then {again:?}");
        }
    }
}
