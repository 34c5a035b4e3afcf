//! Where a generation's tokens come from: a place in the queue, then a master, and after its loss another one.
//!
//! A request that lost its replica is sent again with the tokens it has as the end of its prompt. The next master's sampler takes them
//! for what they are: penalties and grammar go on from them, and a draw depends on the seed and the position alone. So the events
//! that come out here are those of one undisturbed generation with a pause in it; only `Started` may come again.
//!
//! So they are where one replica computes the prompt and another one goes on (`hand_off`).
//!
//! What ends it: the bounds of `replay`, a wait that is too long, and whatever would be the same on every replica.

mod hand_off;
mod waiting;

use std::sync::Arc;

use protocol::v1;
use protocol::v1::generate_event::Event;
use tokio::time::Instant;

use crate::app::App;
use crate::desk::{Company, Errand, Order, Place, PromptPrefix};
use crate::dispatch::{Expected, Seat};
use crate::openai::ApiError;
use crate::replay::Trials;
use crate::replica::{Setback, TokenStream};
use hand_off::{Held, Holder};
use waiting::Waiting;

/// Gives a generation's events.
pub(crate) struct Source {
    app: Arc<App>,
    request: v1::GenerateRequest,
    /// Everything that was received, to be told to the next master.
    tokens: Vec<i32>,
    phase: Phase,
    trials: Trials,
    prefix: PromptPrefix,
    was_disturbed: bool,
}

enum Phase {
    /// In the queue.
    Waiting(Waiting),
    /// With a master.
    Running(Box<Running>),
    /// Its first token is there, and its KV is held for another replica.
    Held(Box<Held>),
    Over,
}

struct Running {
    /// Before the seat, so that whoever is dropped cancels its request and then gives its slot to the next.
    events: TokenStream,
    /// Who has its KV, until it has changed hands.
    holder: Option<Holder>,
    seat: Seat,
    replica: usize,
    /// Tokens of the prompt that its slot held already.
    cached: u32,
    /// Tokens from earlier masters.
    before: u32,
}

impl Source {
    /// Takes a place in the queue.
    pub(crate) fn start(app: &Arc<App>, request: v1::GenerateRequest) -> Result<Self, ApiError> {
        let prefix = PromptPrefix::of(&request.prompt);
        let order = order(&request, 0, &prefix, Company::Any);
        let seat = app.fleet.dispatch().arrive(order).map_err(|full| ApiError::QueueFull {
            reason: full.to_string(),
            seconds: retry_after(full.wait),
        })?;
        let phase = Phase::Waiting(Waiting::new(seat));
        Ok(Self {
            app: Arc::clone(app),
            request,
            tokens: Vec::new(),
            phase,
            trials: Trials::default(),
            prefix,
            was_disturbed: false,
        })
    }

    /// How long it was predicted to wait, and behind whom, while it does.
    pub(crate) fn expected(&self) -> Expected {
        match &self.phase {
            Phase::Waiting(waiting) => waiting.seat.expected(),
            Phase::Running(_) | Phase::Held(_) | Phase::Over => Expected::default(),
        }
    }

    /// Whether it has a slot already.
    pub(crate) fn has_slot(&self) -> bool {
        match &self.phase {
            Phase::Waiting(waiting) => matches!(waiting.seat.place(), Place::Seated { .. }),
            Phase::Running(_) | Phase::Held(_) => true,
            Phase::Over => false,
        }
    }

    /// The replica that runs it.
    pub(crate) fn replica(&self) -> Option<usize> {
        match &self.phase {
            Phase::Running(running) => Some(running.replica),
            Phase::Waiting(_) | Phase::Held(_) | Phase::Over => None,
        }
    }

    /// Whether no master can tell how long it took, because none had it from its beginning to its end.
    pub(crate) fn was_disturbed(&self) -> bool {
        self.was_disturbed
    }

    /// Nobody needs the rest: its slot is free from now on.
    pub(crate) fn end(&mut self) {
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Running(running) => {
                let Running { events, holder, seat, .. } = *running;
                drop((events, holder));
                seat.done();
            }
            Phase::Held(held) => {
                let Held { holder, seat } = *held;
                drop(holder);
                seat.done();
            }
            Phase::Waiting(_) | Phase::Over => {}
        }
    }

    /// The next event. After [`Event::Finished`] and after an error there is none.
    pub(crate) async fn next(&mut self) -> Result<Event, ApiError> {
        let closing = self.app.closing();
        let received = tokio::select! {
            biased;
            received = self.receive() => received,
            () = closing.cancelled() => Err(ApiError::ShuttingDown),
        };
        if received.is_err() {
            self.phase = Phase::Over;
        }
        received
    }

    /// Can be dropped at any await: nothing that was received is lost by it.
    async fn receive(&mut self) -> Result<Event, ApiError> {
        loop {
            match &mut self.phase {
                Phase::Over => {
                    return Err(ApiError::Internal { reason: "a generation was read after its end" });
                }
                Phase::Waiting(waiting) => {
                    let replica = waiting.slot(&self.app).await?;
                    self.send(replica).await?;
                }
                Phase::Running(running) => {
                    let received = running.next().await;
                    if let Some(event) = self.take(received)? {
                        return Ok(event);
                    }
                }
                Phase::Held(held) => {
                    let turn = held.turn(&self.app).await?;
                    self.turn(turn).await?;
                }
            }
        }
    }

    /// Asks the master of a replica in which there is a slot.
    async fn send(&mut self, replica: usize) -> Result<(), ApiError> {
        let Some(member) = self.app.fleet.member(replica) else {
            return self.set_back(Setback::taken_away(), replica);
        };
        let Phase::Waiting(waiting) = &self.phase else { return Ok(()) };
        let mut request = self.request_now();
        if waiting.seat.errand() == Errand::Prompt {
            request.hold_ms = hand_off::hold_ms(&self.app.limits);
        }
        let accepted = member.replica.generate(request).await;
        match accepted {
            Ok(events) => {
                if let Phase::Waiting(Waiting { seat, .. }) = std::mem::replace(&mut self.phase, Phase::Over)
                {
                    self.run(events, None, (seat, replica));
                }
                Ok(())
            }
            Err(Setback::CannotHandOff { reason }) => {
                tracing::debug!(replica, %reason, "the replica decodes what it has the prompt of");
                waiting.seat.do_whole();
                Ok(())
            }
            Err(setback) => self.set_back(setback, replica),
        }
    }

    fn run(&mut self, events: TokenStream, holder: Option<Holder>, (seat, replica): (Seat, usize)) {
        let running = Running { events, holder, seat, replica, cached: 0, before: self.generated() };
        self.phase = Phase::Running(Box::new(running));
    }

    /// Takes what a master said; none if nobody need be told.
    fn take(&mut self, received: Result<Event, Setback>) -> Result<Option<Event>, ApiError> {
        let is_whole = self.is_whole();
        let Phase::Running(running) = &mut self.phase else { return Ok(None) };
        match received {
            Ok(Event::Started(started)) => {
                running.cached = started.cached_tokens;
                match &running.holder {
                    Some(holder) if holder.has_more_than(started.cached_tokens) => return Ok(None),
                    Some(_) => return self.handed_over(&v1::HandedOver::default()).map(|()| None),
                    None => running.seat.started(started.cached_tokens),
                }
                Ok(Some(Event::Started(started)))
            }
            Ok(Event::Token(token)) => {
                running.seat.token();
                self.tokens.push(token.id);
                self.trials.progressed();
                Ok(Some(Event::Token(token)))
            }
            Ok(Event::Held(slot)) => {
                self.hold(slot);
                Ok(None)
            }
            Ok(Event::HandedOver(handed_over)) => self.handed_over(&handed_over).map(|()| None),
            Ok(Event::Finished(mut finished)) => {
                finished.prompt_tokens = self.request.prompt.len() as u32;
                finished.generated_tokens += running.before;
                self.end();
                Ok(Some(Event::Finished(finished)))
            }
            Ok(event) => Ok(Some(event)),
            Err(Setback::Lost { .. }) if is_whole => {
                self.end();
                self.was_disturbed = true;
                Ok(Some(Event::Finished(self.cut_off())))
            }
            Err(setback) => {
                let replica = running.replica;
                self.set_back(setback, replica).map(|()| None)
            }
        }
    }

    /// Goes back to the queue, if it may; or to the line for decode slots, if it was to change hands and its KV is still there.
    fn set_back(&mut self, setback: Setback, replica: usize) -> Result<(), ApiError> {
        let (reason, company) = match setback {
            Setback::Final(error) => return Err(error),
            Setback::Unreached { reason } | Setback::CannotHandOff { reason } => (reason, Some(Company::Any)),
            Setback::Lost { reason } => {
                let company = self.trials.lost();
                if company.is_some() {
                    self.app.metrics.replayed();
                }
                (reason, company)
            }
        };
        let Some(company) = company else {
            return Err(ApiError::LostRepeatedly { attempts: self.trials.replays() + 1, reason });
        };
        tracing::info!(
            request = self.request.request,
            replica,
            generated = self.tokens.len(),
            replays = self.trials.replays(),
            %reason,
            "the replica was lost; the request is sent again"
        );
        self.was_disturbed = true;
        // Before it is bound again, lest it is bound to the one that was lost.
        self.app.fleet.refresh(replica);
        let now = Instant::now();
        let (seat, stranded) = match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Waiting(Waiting { seat, stranded, .. }) => (seat, stranded),
            Phase::Running(running) => match *running {
                Running { holder: Some(holder), seat, .. } if company == Company::Any => {
                    self.phase = Phase::Held(Box::new(Held { holder, seat }));
                    return Ok(());
                }
                Running { seat, .. } => (seat, None),
            },
            Phase::Held(held) if company == Company::Any && !held.is_held_by(replica) => {
                self.phase = Phase::Held(held);
                return Ok(());
            }
            Phase::Held(held) => (held.seat, None),
            Phase::Over => return Ok(()),
        };
        seat.lost(order(&self.request, self.generated(), &self.prefix, company));
        let stranded = stranded.or(Some(now));
        self.phase = Phase::Waiting(Waiting { seat, since: now, stranded, lost: Some(reason) });
        Ok(())
    }

    /// What a master has to be asked for now.
    fn request_now(&self) -> v1::GenerateRequest {
        let mut request = self.request.clone();
        request.prompt.extend_from_slice(&self.tokens);
        request.replayed = self.generated();
        request.max_tokens = request.max_tokens.saturating_sub(request.replayed);
        request
    }

    fn generated(&self) -> u32 {
        // No more than a slot holds.
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// Whether only the word of its end is missing: it has as many tokens as it may, or as a slot has room for.
    fn is_whole(&self) -> bool {
        let fills_slot = self.request.prompt.len() + self.tokens.len() > self.app.n_ctx as usize;
        self.generated() >= self.request.max_tokens || fills_slot
    }

    /// What the master would have said, but for its times.
    fn cut_off(&self) -> v1::Finished {
        v1::Finished {
            reason: v1::FinishReason::Length.into(),
            prompt_tokens: self.request.prompt.len() as u32,
            generated_tokens: self.generated(),
            prefill_ms: 0.0,
            decode_ms: 0.0,
        }
    }
}

/// What the desk is told of a request that has got so many tokens already.
fn order(request: &v1::GenerateRequest, generated: u32, prefix: &PromptPrefix, company: Company) -> Order {
    let prompt = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
    Order {
        prompt: prompt.saturating_add(generated),
        most_output: request.max_tokens.saturating_sub(generated),
        prefix: prefix.clone(),
        company,
    }
}

/// Whole seconds, for a header: at least one, and never so many that nobody would come back.
fn retry_after(wait: f64) -> u16 {
    const LONGEST: f64 = 600.0;
    wait.ceil().clamp(1.0, LONGEST) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_names_whole_seconds_that_somebody_would_wait() {
        assert_eq!([0.0, 0.2, 1.5, 1e9, f64::INFINITY].map(retry_after), [1, 1, 2, 600, 600]);
    }
}
