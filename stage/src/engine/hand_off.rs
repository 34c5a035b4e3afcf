//! Sequences that change hands: a slot that is held for another replica to pull, and one whose sequence comes from another.
//!
//! # Taking over
//!
//! A request that takes a prompt over has its slot from the start, as any other. The engine tells its owner to begin once no
//! frame with rows of the slot is under way: what stages then write to it comes after all they were sent, and before all they
//! will be. Until the owner says how it went, nothing is sent for the slot, and nobody else gets it, not even when the
//! request is cancelled: stages may be writing to it.
//!
//! What was taken over is a prefix that the slot holds, as if it had been there before: the rest of the prompt, one token at
//! least, is computed as ever. If nothing was taken over, all of it is; if stages may have written before it failed, the first
//! frame makes them forget what they hold.
//!
//! # Handing off
//!
//! A request that hands off draws one token and keeps its slot until it is released or its time is up. A slot that is held is
//! in no frame, so whoever is told that it was held until now knows that what they pulled is its sequence.
//!
//! This file knows neither how keys and values travel nor where they come from.

use std::time::Duration;

use cluster::SlotId;
use protocol::hand_off::{HandOff, HeldSlot};

use super::events::{Event, EventSink, FinishReason, HandedOver};
use super::request::{RequestKey, Token};
use super::running::{Advance, Phase, Running, TakeOver};
use super::sampling::{Sample, Sampling};
use super::{Engine, slot::Cache};

/// Keys and values that are to be fetched into a slot of every stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The request that waits for them.
    pub key: RequestKey,
    /// The slot.
    pub slot: SlotId,
    /// Tokens of the sequence that the slot holds.
    pub cached: u32,
    /// Where they are.
    pub from: HeldSlot,
}

/// How a transfer went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransferEnd {
    /// Every stage holds the sequence; so many bytes travelled.
    TakenOver {
        /// Bytes.
        bytes: u64,
    },
    /// No stage has touched its slot.
    Untouched {
        /// Why.
        reason: String,
    },
    /// Some stages may have written to their slots; none will any more.
    Spoilt {
        /// Why.
        reason: String,
    },
}

impl TransferEnd {
    /// Why nothing was taken over.
    pub fn failure(&self) -> Option<&str> {
        match self {
            Self::TakenOver { .. } => None,
            Self::Untouched { reason } | Self::Spoilt { reason } => Some(reason),
        }
    }
}

/// Sums over transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TakenOver {
    /// Sequences taken over.
    pub sequences: u64,
    /// Bytes that travelled for them.
    pub bytes: u64,
    /// Sequences that could not be taken over.
    pub failures: u64,
}

impl<S: Sampling, E: EventSink> Engine<S, E> {
    /// A transfer to begin now, if one is due; to be asked until there is none after every other call.
    /// [`transferred`](Self::transferred) must be told how it went.
    pub fn next_transfer(&mut self) -> Option<Transfer> {
        let steps = &self.steps;
        let running = self.slots.iter_mut().filter_map(|slot| slot.running.as_mut());
        let transfer =
            running.filter(|running| !steps.touch(running.slot())).find_map(Running::begin_transfer);
        self.check_invariants();
        transfer
    }

    /// A transfer has ended. Its request goes on, or its slot goes to the next. Then ask for frames.
    pub fn transferred(&mut self, key: RequestKey, end: TransferEnd, now: Duration) {
        let Some(index) = self.slot_of(key) else { return };
        let slot = &mut self.slots[index];
        let Some(running) = &mut slot.running else { return };
        let Phase::TakingOver { cached, stage } = running.phase() else { return };
        running.record_transfer(&mut slot.cache, &end);
        match &end {
            TransferEnd::TakenOver { bytes } => {
                self.taken_over.sequences += 1;
                self.taken_over.bytes += bytes;
            }
            TransferEnd::Untouched { .. } | TransferEnd::Spoilt { .. } => self.taken_over.failures += 1,
        }
        if stage == TakeOver::Abandoned || !running.go_on(cached, end, now) {
            self.release(index);
            self.start_waiting(now);
        } else {
            let (id, rows) = (running.slot(), running.next_rows());
            self.schedule.add_prompt(id, rows);
        }
        self.check_invariants();
    }

    /// Ends a hold because another replica has the sequence. False if it had ended already.
    pub fn release_held(&mut self, slot: SlotId, key: RequestKey, now: Duration) -> bool {
        let was_held = self.end_hold(FinishReason::HandedOff, now, |running| {
            running.slot() == slot && running.key() == key && matches!(running.phase(), Phase::Held { .. })
        });
        self.check_invariants();
        was_held
    }

    /// Ends the holds whose time is up.
    pub fn expire_holds(&mut self, now: Duration) {
        let is_due = |running: &Running<S::Sampler, E>| matches!(running.phase(), Phase::Held { until } if until <= now);
        while self.end_hold(FinishReason::HoldExpired, now, is_due) {}
        self.check_invariants();
    }

    /// The slots that are held, and by whom.
    pub fn held_slots(&self) -> impl Iterator<Item = (SlotId, RequestKey)> {
        let held = self.running().filter(|running| matches!(running.phase(), Phase::Held { .. }));
        held.map(|running| (running.slot(), running.key()))
    }

    /// When the next hold expires.
    pub fn next_expiry(&self) -> Option<Duration> {
        let until = |running: &Running<S::Sampler, E>| match running.phase() {
            Phase::Held { until } => Some(until),
            _ => None,
        };
        self.running().filter_map(until).min()
    }

    fn end_hold(
        &mut self,
        reason: FinishReason,
        now: Duration,
        is_meant: impl Fn(&Running<S::Sampler, E>) -> bool,
    ) -> bool {
        let found = self.slots.iter().position(|slot| slot.running.as_ref().is_some_and(&is_meant));
        let Some(index) = found else { return false };
        if let Some(running) = &mut self.slots[index].running {
            running.finish(reason, now);
            tracing::debug!(request = %running.id(), ?reason, "the hold has ended");
        }
        self.release(index);
        self.start_waiting(now);
        true
    }
}

impl<M: Sample, E: EventSink> Running<M, E> {
    /// The transfer that is due, if it is; then it has begun.
    fn begin_transfer(&mut self) -> Option<Transfer> {
        let Phase::TakingOver { cached, stage: stage @ TakeOver::Due } = &mut self.phase else { return None };
        let HandOff::From(from) = &self.ticket.hand_off else { return None };
        *stage = TakeOver::Begun;
        Some(Transfer { key: self.ticket.key, slot: self.slot, cached: *cached as u32, from: from.clone() })
    }

    /// Gives it up while stages may be writing to its slot. False if they are not.
    pub(super) fn abandon(&mut self) -> bool {
        match &mut self.phase {
            Phase::TakingOver { stage: stage @ (TakeOver::Begun | TakeOver::Abandoned), .. } => {
                *stage = TakeOver::Abandoned;
                true
            }
            _ => false,
        }
    }

    fn taken_over(&self) -> &[Token] {
        match &self.ticket.hand_off {
            HandOff::From(from) => &self.ticket.prompt[..from.tokens as usize],
            HandOff::None | HandOff::Hold(_) => &[],
        }
    }

    fn record_transfer(&self, cache: &mut Cache, end: &TransferEnd) {
        match end {
            TransferEnd::TakenOver { .. } => cache.replace(self.taken_over()),
            TransferEnd::Untouched { .. } => {}
            TransferEnd::Spoilt { .. } => cache.spoil(),
        }
    }

    /// Begins to compute what is left of the prompt. False if nobody listens any more.
    fn go_on(&mut self, cached: usize, end: TransferEnd, now: Duration) -> bool {
        let (tokens, bytes, failure) = match end {
            TransferEnd::TakenOver { bytes } => (self.taken_over().len(), bytes, None),
            TransferEnd::Untouched { reason } => (cached, 0, Some(reason)),
            TransferEnd::Spoilt { reason } => (0, 0, Some(reason)),
        };
        self.phase = Phase::Prefill { sent: tokens };
        let took = now.saturating_sub(self.started);
        let handed_over = HandedOver { tokens: tokens as u32, bytes, took, failure };
        self.ticket.events.send(Event::HandedOver(handed_over)).is_ok()
    }

    /// Whether its slot will be kept for another replica.
    pub(super) fn will_be_held(&self) -> bool {
        matches!(self.ticket.hand_off, HandOff::Hold(_))
    }

    /// Keeps the slot for another replica.
    pub(super) fn hold(&mut self, until: Duration) -> Advance {
        let tokens = self.ticket.prompt.len() as u32;
        let held = Event::Held { slot: self.slot, hold: self.ticket.key, tokens };
        if self.ticket.events.send(held).is_err() {
            return Advance::Over;
        }
        self.phase = Phase::Held { until };
        Advance::Held
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use cluster::{Epoch, RequestId};
    use protocol::frame::KvOp;

    use super::super::fake::{Draw, FakeSampling, roomy};
    use super::super::{Admission, AdmitError, Closed, EngineLimits, Logits, Request, Rollback};
    use super::*;

    #[derive(Debug, Clone, Default)]
    struct Told(Rc<RefCell<Vec<Event>>>);

    impl EventSink for Told {
        fn send(&mut self, event: Event) -> Result<(), Closed> {
            self.0.borrow_mut().push(event);
            Ok(())
        }
    }

    impl Told {
        fn handed_over(&self) -> Option<HandedOver> {
            self.0.borrow().iter().find_map(|event| match event {
                Event::HandedOver(handed_over) => Some(handed_over.clone()),
                _ => None,
            })
        }

        fn reason(&self) -> Option<FinishReason> {
            match self.0.borrow().last() {
                Some(Event::Finished(finished)) => Some(finished.reason),
                _ => None,
            }
        }
    }

    /// Any token will do.
    struct Flat;

    impl Logits for Flat {
        fn row(&self, _: usize) -> Option<&[f32]> {
            Some(&[0.5; 4])
        }
    }

    type TestEngine = Engine<FakeSampling, Told>;

    const NOW: Duration = Duration::from_millis(500);

    fn engine(change: impl FnOnce(&mut EngineLimits)) -> TestEngine {
        let mut limits = EngineLimits { slots: 1, ..roomy() };
        change(&mut limits);
        let mut engine = Engine::new(limits, FakeSampling { n_vocab: limits.n_vocab }).unwrap();
        engine.reset();
        engine
    }

    fn admit(engine: &mut TestEngine, key: u64, n: u32, hand_off: HandOff) -> Result<Told, AdmitError> {
        let told = Told::default();
        let request = Request {
            id: RequestId(key.to_string()),
            prompt: (0..n as i32).map(|token| token % 30).collect(),
            replayed: 0,
            max_tokens: 4,
            ignore_eos: true,
            hand_off,
            sampling: Draw { always: Some(31), ..Draw::default() },
        };
        engine.admit(Admission { key: RequestKey(key), request, events: told.clone() }, NOW)?;
        Ok(told)
    }

    fn from(tokens: u32) -> HandOff {
        HandOff::From(HeldSlot { epoch: Epoch(1), slot: SlotId(0), hold: 1, tokens, chain: Vec::new() })
    }

    /// Runs frames until there are none; gives each one's first run and operations.
    fn run(engine: &mut TestEngine) -> Vec<(u32, u32, Vec<KvOp>)> {
        let mut frames = Vec::new();
        while let Some(frame) = engine.next_frame() {
            frames.push((frame.runs[0].position, frame.runs[0].n, frame.ops));
            engine.complete(frame.step, &Flat, NOW).unwrap();
        }
        frames
    }

    #[test]
    fn what_was_taken_over_is_not_computed() {
        let mut engine = engine(|_| ());
        let told = admit(&mut engine, 1, 6, from(5)).unwrap();
        assert_eq!(engine.next_frame(), None, "nothing is sent before it is there");
        let transfer = engine.next_transfer().unwrap();
        assert_eq!((transfer.key, transfer.slot, transfer.cached), (RequestKey(1), SlotId(0), 0));
        assert_eq!(engine.next_transfer(), None, "it is begun once");
        engine.transferred(RequestKey(1), TransferEnd::TakenOver { bytes: 100 }, NOW);
        assert_eq!(run(&mut engine)[0], (5, 1, vec![]), "the rest of the prompt");
        let handed_over = told.handed_over().unwrap();
        assert_eq!((handed_over.tokens, handed_over.bytes, handed_over.failure), (5, 100, None));
        assert_eq!(told.reason(), Some(FinishReason::Length));
        let sums = engine.status().taken_over;
        assert_eq!((sums.sequences, sums.bytes, sums.failures), (1, 100, 0));
        // It is the slot's now.
        admit(&mut engine, 2, 6, HandOff::None).unwrap();
        assert_eq!(run(&mut engine)[0].0, 5);
    }

    #[test]
    fn what_could_not_be_taken_over_is_computed() {
        let mut engine = engine(|_| ());
        admit(&mut engine, 1, 3, HandOff::None).unwrap();
        run(&mut engine);
        // Three tokens of it are in the slot already, and three of the answer that must go.
        let told = admit(&mut engine, 2, 9, from(8)).unwrap();
        assert_eq!(engine.next_transfer().unwrap().cached, 3);
        let reason = "the other side has gone".to_owned();
        engine.transferred(RequestKey(2), TransferEnd::Untouched { reason: reason.clone() }, NOW);
        let forgets = |from| vec![KvOp::RemoveFrom { slot: SlotId(0), from }];
        assert_eq!(run(&mut engine)[0], (3, 6, forgets(3)), "what was there is used");
        assert_eq!(told.handed_over().unwrap().failure, Some(reason.clone()));
        admit(&mut engine, 3, 30, from(29)).unwrap();
        assert_eq!(engine.next_transfer().unwrap().key, RequestKey(3));
        engine.transferred(RequestKey(3), TransferEnd::Spoilt { reason }, NOW);
        assert_eq!(run(&mut engine)[0], (0, 8, forgets(0)), "nobody knows what was there");
        assert_eq!(engine.status().taken_over.failures, 2);
    }

    #[test]
    fn a_slot_that_is_written_to_is_given_to_nobody() {
        let mut engine = engine(|_| ());
        admit(&mut engine, 1, 6, from(5)).unwrap();
        admit(&mut engine, 2, 4, HandOff::None).unwrap();
        engine.next_transfer().unwrap();
        engine.cancel(RequestKey(1), NOW);
        engine.cancel(RequestKey(1), NOW);
        assert_eq!(engine.next_frame(), None, "stages may be writing");
        engine.transferred(RequestKey(1), TransferEnd::Spoilt { reason: String::new() }, NOW);
        let forgets = vec![KvOp::RemoveFrom { slot: SlotId(0), from: 0 }];
        assert_eq!(run(&mut engine)[0], (0, 4, forgets));
        // Before it has begun there is nothing to wait for.
        admit(&mut engine, 3, 6, from(5)).unwrap();
        engine.cancel(RequestKey(3), NOW);
        assert_eq!((engine.status().active, engine.next_transfer()), (0, None));
        engine.transferred(RequestKey(3), TransferEnd::TakenOver { bytes: 0 }, NOW);
    }

    #[test]
    fn nothing_is_written_while_rows_of_the_slot_are_under_way() {
        let mut engine = engine(|_| ());
        admit(&mut engine, 1, 4, HandOff::None).unwrap();
        let frame = engine.next_frame().unwrap();
        engine.cancel(RequestKey(1), NOW);
        admit(&mut engine, 2, 9, from(8)).unwrap();
        assert_eq!(engine.next_transfer(), None);
        engine.complete(frame.step, &Flat, NOW).unwrap();
        assert_eq!(engine.next_transfer().unwrap().key, RequestKey(2));
        engine.fail_all(super::super::FailureKind::ReplicaLost, "gone");
        engine.transferred(RequestKey(2), TransferEnd::TakenOver { bytes: 0 }, NOW);
        assert_eq!(engine.status().active, 0);
    }

    #[test]
    fn a_held_slot_is_kept_until_it_is_released_or_its_time_is_up() {
        let mut engine = engine(|_| ());
        let hold = HandOff::Hold(Duration::from_secs(2));
        let told = admit(&mut engine, 1, 4, hold.clone()).unwrap();
        let waits = admit(&mut engine, 2, 4, HandOff::None).unwrap();
        run(&mut engine);
        let held = Event::Held { slot: SlotId(0), hold: RequestKey(1), tokens: 4 };
        assert_eq!(told.0.borrow().last(), Some(&held));
        assert_eq!((engine.status().held, engine.next_expiry()), (1, Some(NOW + Duration::from_secs(2))));
        assert_eq!(engine.held_slots().collect::<Vec<_>>(), [(SlotId(0), RequestKey(1))]);
        assert!(!engine.release_held(SlotId(0), RequestKey(9), NOW), "another hold");
        assert!(engine.release_held(SlotId(0), RequestKey(1), NOW));
        assert!(!engine.release_held(SlotId(0), RequestKey(1), NOW), "once only");
        assert_eq!(told.reason(), Some(FinishReason::HandedOff));
        run(&mut engine);
        assert_eq!(waits.reason(), Some(FinishReason::Length));
        let told = admit(&mut engine, 3, 4, hold).unwrap();
        run(&mut engine);
        engine.expire_holds(NOW);
        assert_eq!(told.reason(), None);
        engine.expire_holds(NOW + Duration::from_secs(2));
        assert_eq!(told.reason(), Some(FinishReason::HoldExpired));
        assert_eq!((engine.status().active, engine.next_expiry()), (0, None));
    }

    #[test]
    fn stages_copy_a_sequence_out_with_the_last_rows_of_a_prompt_that_will_be_held() {
        let mut engine = engine(|limits| (limits.slots, limits.prefill_chunk) = (3, 4));
        admit(&mut engine, 1, 6, HandOff::Hold(Duration::from_secs(2))).unwrap();
        admit(&mut engine, 2, 3, HandOff::None).unwrap();
        admit(&mut engine, 3, 2, HandOff::Hold(Duration::from_secs(2))).unwrap();
        let mut copied = Vec::new();
        while let Some(frame) = engine.next_frame() {
            let runs: Vec<_> = frame.runs.iter().map(|run| (run.slot.0, run.position + run.n)).collect();
            assert!(
                frame.copies.iter().all(|slot| runs.contains(&(slot.0, if slot.0 == 0 { 6 } else { 2 })))
            );
            copied.extend(frame.copies);
            engine.complete(frame.step, &Flat, NOW).unwrap();
        }
        copied.sort_unstable();
        assert_eq!(copied, [SlotId(0), SlotId(2)]);
    }

    #[test]
    fn what_cannot_change_hands_is_refused() {
        let mut recurrent = engine(|limits| limits.rollback = Rollback::AppendOnly);
        let refused = admit(&mut recurrent, 1, 4, from(3)).unwrap_err();
        assert!(matches!(refused, AdmitError::CannotHandOff), "{refused}");
        let refused = admit(&mut engine(|_| ()), 1, 4, from(4)).unwrap_err();
        assert_eq!(refused.to_string(), "4 tokens are to be taken over, the prompt has 4");
    }
}
