//! Where a generation's tokens come from: a place in the queue, then a master, and after its loss another one.
//!
//! A request that lost its replica is sent again with the tokens it has as the end of its prompt. The next master's sampler takes them
//! for what they are: penalties and grammar go on from them, and a draw depends on the seed and the position alone. So the events
//! that come out here are those of one undisturbed generation with a pause in it; only `Started` may come again.
//!
//! What ends it: the bounds of `replay`, a wait that is too long, and whatever would be the same on every replica.

use std::sync::Arc;
use std::time::Duration;

use protocol::v1;
use protocol::v1::generate_event::Event;
use tokio::time::Instant;

use crate::app::App;
use crate::desk::{Company, Order, Place, PromptPrefix};
use crate::dispatch::Seat;
use crate::openai::ApiError;
use crate::replay::Trials;
use crate::replica::{Setback, TokenStream};

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
    Over,
}

struct Waiting {
    seat: Seat,
    /// It came, or came back, to the queue.
    since: Instant,
    /// There was first no replica for it, or one was lost.
    stranded: Option<Instant>,
    /// Why it lost its last replica.
    lost: Option<String>,
}

struct Running {
    /// Before the seat, so that whoever is dropped cancels its request and then gives its slot to the next.
    events: TokenStream,
    seat: Seat,
    replica: usize,
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
        let waiting = Waiting { seat, since: Instant::now(), stranded: None, lost: None };
        let phase = Phase::Waiting(waiting);
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

    /// How long it was predicted to wait, while it does.
    pub(crate) fn predicted_wait(&self) -> Duration {
        match &self.phase {
            Phase::Waiting(waiting) => waiting.seat.predicted_wait(),
            Phase::Running(_) | Phase::Over => Duration::ZERO,
        }
    }

    /// Whether it has a slot already.
    pub(crate) fn has_slot(&self) -> bool {
        match &self.phase {
            Phase::Waiting(waiting) => matches!(waiting.seat.place(), Place::Seated { .. }),
            Phase::Running(_) => true,
            Phase::Over => false,
        }
    }

    /// Whether no master can tell how long it took, because none had it from its beginning to its end.
    pub(crate) fn was_disturbed(&self) -> bool {
        self.was_disturbed
    }

    /// Nobody needs the rest: its slot is free from now on.
    pub(crate) fn end(&mut self) {
        if let Phase::Running(running) = std::mem::replace(&mut self.phase, Phase::Over) {
            let Running { events, seat, .. } = *running;
            drop(events);
            seat.done();
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
                    let received = running.events.next().await;
                    if let Some(event) = self.take(received)? {
                        return Ok(event);
                    }
                }
            }
        }
    }

    /// Asks the master of a replica in which there is a slot.
    async fn send(&mut self, replica: usize) -> Result<(), ApiError> {
        let Some(member) = self.app.fleet.member(replica) else {
            return self.set_back(Setback::Unreached { reason: "it was taken away".into() }, replica);
        };
        let accepted = member.replica.generate(self.request_now()).await;
        match accepted {
            Ok(events) => {
                if let Phase::Waiting(Waiting { seat, .. }) = std::mem::replace(&mut self.phase, Phase::Over)
                {
                    let before = self.generated();
                    self.phase = Phase::Running(Box::new(Running { seat, replica, events, before }));
                }
                Ok(())
            }
            Err(setback) => self.set_back(setback, replica),
        }
    }

    /// Takes what a master said; none if the request goes on elsewhere.
    fn take(&mut self, received: Result<Event, Setback>) -> Result<Option<Event>, ApiError> {
        let Phase::Running(running) = &self.phase else { return Ok(None) };
        let Running { seat, replica, before, .. } = &**running;
        match received {
            Ok(Event::Started(started)) => {
                seat.started(started.cached_tokens);
                Ok(Some(Event::Started(started)))
            }
            Ok(Event::Token(token)) => {
                seat.token();
                self.tokens.push(token.id);
                self.trials.progressed();
                Ok(Some(Event::Token(token)))
            }
            Ok(Event::Finished(mut finished)) => {
                finished.prompt_tokens = self.request.prompt.len() as u32;
                finished.generated_tokens += before;
                self.end();
                Ok(Some(Event::Finished(finished)))
            }
            Ok(event) => Ok(Some(event)),
            Err(Setback::Lost { .. }) if self.is_whole() => {
                self.end();
                self.was_disturbed = true;
                Ok(Some(Event::Finished(self.cut_off())))
            }
            Err(setback) => {
                let replica = *replica;
                self.set_back(setback, replica).map(|()| None)
            }
        }
    }

    /// Goes back to the queue, if it may.
    fn set_back(&mut self, setback: Setback, replica: usize) -> Result<(), ApiError> {
        let (reason, company) = match setback {
            Setback::Final(error) => return Err(error),
            Setback::Unreached { reason } => (reason, Some(Company::Any)),
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
            Phase::Running(running) => (running.seat, None),
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

impl Waiting {
    /// Waits for a slot, and gives the replica's number.
    async fn slot(&mut self, app: &App) -> Result<usize, ApiError> {
        loop {
            let place = self.seat.place();
            let (deadline, is_stranded) = match place {
                Place::Seated { replica }
                | Place::Prefilled { replica }
                | Place::Moving { from: replica, .. } => return Ok(replica),
                Place::Parked => {
                    let since = *self.stranded.get_or_insert_with(Instant::now);
                    (since + app.limits.replay_timeout, true)
                }
                Place::Waiting { .. } => {
                    // Some replica serves: it is no longer stranded, only late.
                    self.stranded = None;
                    (self.since + app.limits.queue_timeout, false)
                }
            };
            tracing::debug!(?place, "queued");
            tokio::select! {
                biased;
                () = self.seat.moved() => {}
                () = tokio::time::sleep_until(deadline) => {
                    return Err(if is_stranded { self.given_up(app) } else { too_late(app) });
                }
            }
        }
    }

    /// There was no replica for too long.
    fn given_up(&self, app: &App) -> ApiError {
        match (&self.lost, app.fleet.readiness()) {
            (Some(reason), _) => ApiError::ReplicaLost { reason: reason.clone() },
            (None, Err(error)) => error,
            (None, Ok(())) => ApiError::NotReady { reason: "no replica could take the request".into() },
        }
    }
}

fn too_late(app: &App) -> ApiError {
    ApiError::QueueTimeout { seconds: app.limits.queue_timeout.as_secs() }
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
