//! A generation whose prompt was computed by one replica, and that goes on on another one.
//!
//! The first replica is asked for the prompt alone: after the first token it holds the request's KV in its slot, and its stream stays
//! open, so that whoever goes away frees the slot. When the desk has reserved a slot at a replica that decodes, that one is asked
//! to go on from the held slot, and pulls the KV (docs/adr/0009). Until it says that it has, both streams are kept:
//! dropping the source then frees both slots, and if the second replica is lost, a third may take the first one's place.
//!
//! Nothing of this can lose a request. If the second replica cannot take the KV, it computes the prompt, as it does where that
//! is known to be faster; if the first is lost or its hold has ended, the request is sent again as any that lost its replica; if
//! nobody decodes any more, the first replica goes on, from the prompt that its slot still holds.

use std::time::Duration;

use protocol::sampling::MAX_HOLD_MS;
use protocol::v1;
use protocol::v1::generate_event::Event;
use tokio::time::Instant;

use super::waiting::{Waiting, too_late};
use super::{Phase, Running, Source};
use crate::app::App;
use crate::config::Limits;
use crate::desk::{Kv, Move, Place};
use crate::dispatch::Seat;
use crate::metrics::HandOffEnd;
use crate::openai::ApiError;
use crate::replica::{Setback, TokenStream};

/// What a hold lasts longer than the wait for a decode slot may: the time to ask for the KV, and to move it.
const MOVING: Duration = Duration::from_secs(60);

/// Who has a request's KV.
pub(super) struct Holder {
    /// Ends when the hold does. Dropping it ends the hold.
    events: TokenStream,
    replica: usize,
    slot: v1::HeldSlot,
    since: Instant,
}

/// A request with its first token, in line for a decode slot.
pub(super) struct Held {
    /// Before the seat, so that whoever is dropped frees the slot and then gives it to the next.
    pub(super) holder: Holder,
    pub(super) seat: Seat,
}

/// What comes next for it.
pub(super) enum Turn {
    /// A slot at this replica is reserved for it.
    Move(usize),
    /// It goes on where it is.
    Stay,
    /// Its KV is gone.
    Gone(Setback),
}

/// For how long a slot is to be held.
pub(super) fn hold_ms(limits: &Limits) -> u32 {
    let longest = (limits.queue_timeout + MOVING).as_millis();
    u32::try_from(longest).unwrap_or(MAX_HOLD_MS).min(MAX_HOLD_MS)
}

impl Holder {
    /// Whether a slot that holds so many tokens of the sequence lacks some.
    pub(super) fn has_more_than(&self, cached: u32) -> bool {
        cached < self.slot.tokens
    }

    /// Waits for the end of the hold, and says why it ended.
    async fn ended(&mut self) -> Setback {
        loop {
            match self.events.next().await {
                Ok(Event::Finished(finished)) => {
                    let reason = match finished.reason() {
                        v1::FinishReason::HoldExpired => "its KV was not held any longer",
                        _ => "its KV was taken over by somebody",
                    };
                    return Setback::Unreached { reason: reason.to_owned() };
                }
                Ok(_) => {}
                // Nothing of it was computed when that happened, so it is not to blame.
                Err(Setback::Lost { reason }) => return Setback::Unreached { reason },
                Err(setback) => return setback,
            }
        }
    }
}

impl Held {
    /// Whether its KV is lost with this replica.
    pub(super) fn is_held_by(&self, replica: usize) -> bool {
        self.holder.replica == replica
    }

    /// Waits for its turn.
    pub(super) async fn turn(&mut self, app: &App) -> Result<Turn, ApiError> {
        let deadline = self.holder.since + app.limits.queue_timeout;
        loop {
            let place = self.seat.place();
            match place {
                Place::Moving { to, .. } => return Ok(Turn::Move(to)),
                // The desk knew of its replica's loss before the first token was counted.
                Place::Seated { .. } if self.seat.has_lost_its_slot() => {
                    let reason = "its replica was restarted".to_owned();
                    return Ok(Turn::Gone(Setback::Unreached { reason }));
                }
                Place::Seated { .. } => return Ok(Turn::Stay),
                Place::Prefilled { .. } | Place::Waiting { .. } | Place::Parked => {}
            }
            tracing::debug!(?place, "queued");
            tokio::select! {
                biased;
                () = self.seat.moved() => {}
                setback = self.holder.ended() => return Ok(Turn::Gone(setback)),
                () = tokio::time::sleep_until(deadline) => return Err(too_late(app)),
            }
        }
    }
}

impl Running {
    /// The next event; or, while its KV is on its way, that the slot is given up to which it was to come.
    pub(super) async fn next(&mut self) -> Result<Event, Setback> {
        if self.holder.is_none() {
            return self.events.next().await;
        }
        loop {
            tokio::select! {
                biased;
                received = self.events.next() => return received,
                () = self.seat.moved() => {
                    if !matches!(self.seat.place(), Place::Moving { to, .. } if to == self.replica) {
                        return Err(given_up());
                    }
                }
            }
        }
    }
}

impl Source {
    /// Its first token has come, and its KV is held.
    pub(super) fn hold(&mut self, slot: v1::HeldSlot) {
        // No master had it from its beginning to its end.
        self.was_disturbed = true;
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Running(running) => {
                let Running { events, seat, replica, .. } = *running;
                let holder = Holder { events, replica, slot, since: Instant::now() };
                self.phase = Phase::Held(Box::new(Held { holder, seat }));
            }
            other => self.phase = other,
        }
    }

    /// Does what comes next.
    pub(super) async fn turn(&mut self, turn: Turn) -> Result<(), ApiError> {
        let Phase::Held(held) = &self.phase else { return Ok(()) };
        let from = held.holder.replica;
        match turn {
            Turn::Gone(setback) => self.set_back(setback, from),
            Turn::Stay => {
                self.app.metrics.handed_off(HandOffEnd::Stayed);
                self.compute_again();
                Ok(())
            }
            Turn::Move(to) if held.seat.is_worth_moving(from, to) => self.hand_off(to).await,
            Turn::Move(to) => {
                self.compute_at(to, HandOffEnd::LeftOut);
                Ok(())
            }
        }
    }

    /// Asks a replica to take the KV over and to go on.
    async fn hand_off(&mut self, to: usize) -> Result<(), ApiError> {
        let Phase::Held(held) = &self.phase else { return Ok(()) };
        let Some(member) = self.app.fleet.member(to) else {
            return self.set_back(Setback::taken_away(), to);
        };
        let request = v1::GenerateRequest { from: Some(held.holder.slot.clone()), ..self.request_now() };
        match member.replica.generate(request).await {
            Ok(events) => {
                if let Phase::Held(held) = std::mem::replace(&mut self.phase, Phase::Over) {
                    let Held { holder, seat } = *held;
                    self.run(events, Some(holder), (seat, to));
                }
                Ok(())
            }
            Err(Setback::CannotHandOff { reason }) => {
                tracing::debug!(to, %reason, "the prompt is computed again");
                self.compute_at(to, HandOffEnd::Failed);
                Ok(())
            }
            // Its KV is still held: another replica may take it.
            Err(setback) => self.set_back(setback, to),
        }
    }

    /// Its KV has changed hands, or the replica that was to take it has begun to compute the prompt.
    pub(super) fn handed_over(&mut self, told: &v1::HandedOver) -> Result<(), ApiError> {
        let Phase::Running(running) = &mut self.phase else { return Ok(()) };
        // Whatever of the hold is left ends with it.
        let Some(Holder { replica: from, slot, .. }) = running.holder.take() else { return Ok(()) };
        let (to, tokens) = (running.replica, slot.tokens.saturating_sub(running.cached));
        let has_moved = told.failure.is_empty();
        if tokens > 0 {
            let took = Duration::try_from_secs_f64(told.took_ms / 1e3).unwrap_or_default();
            self.app.fleet.dispatch().saw_move(Move { from, to, tokens, took });
            if has_moved {
                self.app.metrics.moved(told.bytes, took);
            }
        }
        let (kv, end) = if has_moved {
            (Kv::Arrived, HandOffEnd::Moved)
        } else {
            tracing::info!(
                request = self.request.request,
                from,
                to,
                reason = told.failure,
                "the KV did not change hands; the prompt is computed again"
            );
            (Kv::Missing, HandOffEnd::Failed)
        };
        self.app.metrics.handed_off(end);
        if running.seat.handed_over(to, kv) {
            running.seat.started(told.tokens);
            return Ok(());
        }
        self.set_back(given_up(), to)
    }

    /// The prompt is computed by a replica that has a slot for it.
    fn compute_at(&mut self, to: usize, end: HandOffEnd) {
        let Phase::Held(held) = &self.phase else { return };
        // If the slot is given up meanwhile, it is told where it is now.
        if held.seat.handed_over(to, Kv::Missing) {
            self.app.metrics.handed_off(end);
            self.compute_again();
        }
    }

    /// It is sent anew to whoever has a slot for it, and its KV is held no longer.
    fn compute_again(&mut self) {
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Held(held) => self.phase = Phase::Waiting(Waiting::new(held.seat)),
            other => self.phase = other,
        }
    }
}

fn given_up() -> Setback {
    Setback::Unreached { reason: "the slot to which its KV was to come is given up".to_owned() }
}
