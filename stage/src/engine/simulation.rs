//! Property test: whatever arrives, leaves, fails and is lost in whatever order, every request gets the answer it would
//! get alone, and the engine keeps its promises.
//!
//! The fake replica checks every frame as it is made and every event as it is sent; see `fake`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;

use super::fake::{Ask, Client, Costs, Draw, Pipeline, mix};
use super::*;

const N_VOCAB: u32 = 24;

/// A run of the simulation.
#[derive(Debug, Clone)]
struct Scenario {
    stages: usize,
    limits: EngineLimits,
    costs: Costs,
    requests: Vec<Plan>,
    /// When a stage is lost, and for how long.
    losses: Vec<(u64, u64)>,
    seed: u64,
}

/// What a client will do.
#[derive(Debug, Clone)]
struct Plan {
    arrives: u64,
    prompt: Prompt,
    max_tokens: u32,
    ignore_eos: bool,
    /// So long after its arrival.
    cancels: Option<u64>,
    leaves_after: Option<usize>,
    /// The sampler fails at this generated token.
    fails_at: Option<u32>,
}

#[derive(Debug, Clone)]
enum Prompt {
    /// `shared` tokens that all requests of a family begin with, then `own` ones.
    Fresh { family: u64, shared: usize, own: usize },
    /// The conversation of an earlier request, and `own` tokens on top.
    Continues { request: usize, own: usize },
}

fn scenarios() -> impl Strategy<Value = Scenario> {
    let rollback = prop_oneof![
        2 => Just(Rollback::Any),
        1 => (1_u32..40).prop_map(Rollback::Window),
        1 => Just(Rollback::AppendOnly),
    ];
    let limits = (1_u32..=6, 2_u32..=56, 1_u32..=12, 1_u32..=4, 1_u32..=4, 0_u32..=6, rollback).prop_map(
        |(slots, n_ctx, prefill_chunk, prefill_frames, micro_batches, queue_limit, rollback)| EngineLimits {
            slots,
            n_ctx,
            n_vocab: N_VOCAB,
            prefill_chunk,
            prefill_frames,
            micro_batches,
            queue_limit,
            rollback,
        },
    );
    let costs = (1_u64..12, 0_u64..5, 0_u64..8, 0_u64..8)
        .prop_map(|(batch, prefill_row, link, jitter)| Costs { batch, prefill_row, link, jitter });
    let losses = vec((0_u64..1500, 0_u64..80), 0..3);
    (1_usize..=4, limits, costs, vec(plans(), 1..24), losses, any::<u64>()).prop_map(
        |(stages, limits, costs, requests, losses, seed)| Scenario {
            stages,
            limits,
            costs,
            requests,
            losses,
            seed,
        },
    )
}

fn plans() -> impl Strategy<Value = Plan> {
    let fresh = (0_u64..3, 0_usize..30, 1_usize..20).prop_map(|(family, shared, own)| Prompt::Fresh {
        family,
        shared,
        own,
    });
    let continues = (0_usize..24, 0_usize..8).prop_map(|(request, own)| Prompt::Continues { request, own });
    (
        0_u64..1500,
        prop_oneof![3 => fresh, 2 => continues],
        1_u32..24,
        any::<bool>(),
        weighted(0.3, 0_u64..250),
        weighted(0.1, 0_usize..12),
        weighted(0.1, 0_u32..12),
    )
        .prop_map(|(arrives, prompt, max_tokens, ignore_eos, cancels, leaves_after, fails_at)| Plan {
            arrives,
            prompt,
            max_tokens,
            ignore_eos,
            cancels,
            leaves_after,
            fails_at,
        })
}

/// What happens next outside the replica.
#[derive(Debug, Clone, Copy)]
enum Action {
    Arrive(usize),
    Cancel(usize),
    Lose(u64),
    Relink,
}

/// A request over all its attempts.
#[derive(Debug, Default)]
struct Story {
    /// What was asked first.
    ask: Ask,
    attempts: Vec<(u64, Rc<RefCell<Client>>)>,
    cancelled: bool,
    /// It was lost, and its next attempt is on its way.
    asks_again: bool,
    /// It never got in.
    gave_up: bool,
}

struct World {
    scenario: Scenario,
    pipeline: Pipeline,
    stories: Vec<Story>,
    actions: BTreeMap<(u64, u64), Action>,
    /// Counts actions and admissions.
    serial: u64,
    is_down: bool,
}

impl World {
    fn new(scenario: Scenario) -> Self {
        let mut world = Self {
            pipeline: Pipeline::new(scenario.limits, scenario.stages, scenario.costs, scenario.seed),
            stories: scenario.requests.iter().map(|_| Story::default()).collect(),
            actions: BTreeMap::new(),
            serial: 0,
            is_down: false,
            scenario,
        };
        for (index, plan) in world.scenario.requests.clone().into_iter().enumerate() {
            world.act_at(plan.arrives, Action::Arrive(index));
            if let Some(after) = plan.cancels {
                world.act_at(plan.arrives + after, Action::Cancel(index));
            }
        }
        for (at, length) in world.scenario.losses.clone() {
            world.act_at(at, Action::Lose(length));
        }
        world
    }

    fn run(&mut self) {
        for _ in 0..200_000 {
            let action_at = self.actions.keys().next().map(|(at, _)| *at);
            match (action_at, self.pipeline.next_at()) {
                (Some(at), next) if next.is_none_or(|next| at <= next) => {
                    self.pipeline.log.now.set(at.max(self.pipeline.now()));
                    if let Some((_, action)) = self.actions.pop_first() {
                        self.act(action);
                    }
                }
                (_, Some(_)) => {
                    self.pipeline.step();
                }
                (None, None) => return,
                (Some(_), None) => unreachable!(),
            }
        }
        panic!("it does not come to an end");
    }

    fn act_at(&mut self, at: u64, action: Action) {
        self.serial += 1;
        self.actions.insert((at, self.serial), action);
    }

    fn act(&mut self, action: Action) {
        let now = self.pipeline.now();
        match action {
            Action::Arrive(index) => self.arrive(index),
            Action::Cancel(index) => self.cancel(index),
            Action::Lose(_) if self.is_down => {}
            Action::Lose(length) => {
                self.pipeline.lose("stage 1 was lost");
                self.is_down = true;
                self.act_at(now + length, Action::Relink);
                self.replay_lost();
            }
            Action::Relink => {
                self.pipeline.relink();
                self.is_down = false;
            }
        }
    }

    /// A client asks, for the first time or again with what it has.
    fn arrive(&mut self, index: usize) {
        if self.stories[index].cancelled {
            return;
        }
        if self.stories[index].ask.prompt.is_empty() {
            self.stories[index].ask = self.word(index);
        }
        let story = &self.stories[index];
        let mut ask = story.ask.clone();
        let tokens = story.tokens();
        ask.prompt.extend(&tokens);
        ask.replayed = tokens.len() as u32;
        ask.max_tokens -= tokens.len() as u32;
        self.serial += 1;
        let key = self.serial;
        match self.pipeline.admit(key, &ask) {
            Ok(client) => {
                self.stories[index].asks_again = false;
                self.stories[index].attempts.push((key, client));
            }
            Err(AdmitError::PromptTooLong { .. }) => {
                assert!(ask.prompt.len() > self.scenario.limits.n_ctx as usize);
                self.stories[index].gave_up = true;
            }
            Err(AdmitError::QueueFull { queued, .. }) => {
                assert_eq!(queued, self.scenario.limits.queue_limit as usize);
                self.act_at(self.pipeline.now() + 40, Action::Arrive(index));
            }
            Err(AdmitError::NotLinked { .. }) => {
                assert!(self.is_down);
                self.act_at(self.pipeline.now() + 10, Action::Arrive(index));
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn cancel(&mut self, index: usize) {
        let before = self.pipeline.engine.status();
        let story = &mut self.stories[index];
        story.cancelled = true;
        let Some((key, client)) = story.attempts.last().cloned() else { return };
        let was_over = client.borrow().end().is_some() || client.borrow().left;
        if !was_over {
            client.borrow_mut().left = true;
        }
        self.pipeline.cancel(key);
        let after = self.pipeline.engine.status();
        if was_over {
            assert_eq!((before.active, before.queued), (after.active, after.queued), "case 19");
        } else {
            assert!(after.active + after.queued < before.active + before.queued);
            assert!(after.queued < before.queued || before.queued == 0, "its place is taken at once");
        }
    }

    /// Those who were told that a stage was lost ask again.
    fn replay_lost(&mut self) {
        for index in 0..self.stories.len() {
            let lost = |(_, client): &(u64, Rc<RefCell<Client>>)| {
                client.borrow().failure().is_some_and(|(kind, _)| kind == FailureKind::ReplicaLost)
            };
            let story = &mut self.stories[index];
            if story.attempts.last().is_some_and(lost) && !story.asks_again {
                story.asks_again = true;
                self.act_at(self.pipeline.now() + 5, Action::Arrive(index));
            }
        }
    }

    fn word(&self, index: usize) -> Ask {
        let plan = &self.scenario.requests[index];
        let own = |n: usize| (0..n as u64).map(move |i| token(mix(index as u64 + 100, i)));
        let prompt: Vec<Token> = match plan.prompt {
            Prompt::Fresh { family, shared, own: n } => {
                (0..shared as u64).map(|i| token(mix(family, i))).chain(own(n)).collect()
            }
            Prompt::Continues { request, own: n } => {
                let earlier = &self.stories[request % self.stories.len()];
                let held = earlier.ask.prompt.iter().copied().chain(earlier.tokens());
                let held: Vec<_> = held.take(self.scenario.limits.n_ctx as usize).collect();
                // A conversation that has not begun is one of its own.
                let n = if held.is_empty() { n + 1 } else { n };
                held.into_iter().chain(own(n)).collect()
            }
        };
        let fails_at = plan.fails_at.map(|generated| prompt.len() as u32 + generated);
        let draw = Draw { seed: index as u64 % 3, fails_at, ..Draw::default() };
        Ask {
            prompt,
            replayed: 0,
            max_tokens: plan.max_tokens,
            ignore_eos: plan.ignore_eos,
            draw,
            leaves_after: plan.leaves_after,
        }
    }

    fn check(&self) {
        self.pipeline.check_idle();
        let started = self.pipeline.log.started.borrow();
        assert!(started.is_sorted(), "first come, first served: {started:?}");
        for (index, story) in self.stories.iter().enumerate() {
            self.check_story(index, story);
        }
        let made: u64 = self.stories.iter().map(|story| story.tokens().len() as u64).sum();
        let counted = self.pipeline.engine.status().generated_tokens;
        let left = self.stories.iter().filter(|story| story.has_left()).count() as u64;
        assert!((made..=made + left).contains(&counted), "{made} tokens were sent, {counted} counted");
    }

    fn check_story(&self, index: usize, story: &Story) {
        let Ask { prompt, draw, max_tokens, ignore_eos, .. } = &story.ask;
        let Some((_, last)) = story.attempts.last() else {
            assert!(story.cancelled || story.gave_up, "request {index} was never admitted");
            return;
        };
        let whole = Draw { fails_at: None, ..draw.clone() };
        let (mut answer, reason) = self.pipeline.model.answer(prompt, &whole, *max_tokens, *ignore_eos);
        let drawn = answer.len() + usize::from(reason == FinishReason::Stop);
        let fails = draw.fails_at.map(|position| position as usize - prompt.len()).filter(|at| *at < drawn);
        answer.truncate(fails.unwrap_or(answer.len()));
        let tokens = story.tokens();
        assert!(answer.starts_with(&tokens), "request {index}: {tokens:?} is no beginning of {answer:?}");
        let last = last.borrow();
        match last.end() {
            Some(Event::Finished(finished)) => {
                assert_eq!(tokens, answer, "request {index}");
                assert_eq!((finished.reason, fails), (reason, None), "request {index}");
            }
            Some(Event::Failed { kind: FailureKind::Internal, .. }) => {
                assert_eq!(tokens, answer, "request {index}");
                assert!(fails.is_some(), "request {index} had no reason to fail");
            }
            Some(_) => assert!(story.cancelled, "request {index} is lost for good"),
            None => assert!(last.left, "request {index} has no end"),
        }
        self.check_gaps(story);
    }

    /// No generation waits longer for a token than a few passes of everyone's decode rows and one chunk, however long
    /// the prompts of others are: its own pass; a pass until a decode frame may leave; or two, if decode yields to a
    /// chunk: until the decode frames are back, and until the chunk is.
    fn check_gaps(&self, story: &Story) {
        let Costs { batch, prefill_row, link, jitter } = self.scenario.costs;
        let step = batch + jitter + link;
        let chunk = batch + jitter + prefill_row * u64::from(self.scenario.limits.prefill_chunk);
        let pass = self.scenario.stages as u64 * (chunk + step);
        let bound = Duration::from_millis(4 * pass);
        for (_, client) in &story.attempts {
            let gap = client.borrow().longest_gap();
            assert!(gap <= bound, "case 23: a token came {gap:?} after the one before, bound {bound:?}");
        }
    }
}

impl Story {
    fn tokens(&self) -> Vec<Token> {
        self.attempts.iter().flat_map(|(_, client)| client.borrow().tokens()).collect()
    }

    fn has_left(&self) -> bool {
        self.attempts.iter().any(|(_, client)| client.borrow().left)
    }
}

/// Any token; end-of-generation too, which a prompt may hold.
fn token(word: u64) -> Token {
    (word % u64::from(N_VOCAB)) as Token
}

/// A run takes well under a millisecond. `PROPTEST_CASES` asks for more.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases.max(1024), failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_request_gets_the_answer_it_would_get_alone(scenario in scenarios()) {
        let mut world = World::new(scenario);
        world.run();
        world.check();
    }
}
