//! The Engine service: requests on their way in, and their events on the way out.
//!
//! Events wait in a channel with room for every event that the request can have, so the inference thread never waits
//! for a slow client; a client that does not read at all costs memory for the tokens of one slot, at most. A client that
//! has gone is noticed by its closed channel.

use std::cell::RefCell;
use std::error::Error;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use protocol::hand_off::{HandOff, HeldSlot};
use protocol::sampling::Generation;
use protocol::v1;
use protocol::worker::WorkerConfig;
use tokio::sync::mpsc::OwnedPermit;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::engine::{
    AdmitError, Closed, Event, EventSink, FailureKind, FinishReason, Finished, GeneratedToken, HandedOver,
    TokenProbability,
};
use crate::events::{Admit, Control, Inputs};
use crate::shared::{LoadState, Shared};

/// Events of a request besides its tokens and its places in the queue: one at the start, one at the end, and one when it
/// has taken a prompt over or is held.
const OTHER_EVENTS: usize = 3;

type Item = Result<v1::GenerateEvent, Status>;

/// The master's side of the Engine service.
pub(crate) struct EngineService {
    config: Arc<WorkerConfig>,
    shared: Arc<Shared>,
    inputs: Inputs,
}

impl EngineService {
    pub(crate) fn new(config: Arc<WorkerConfig>, shared: Arc<Shared>, inputs: Inputs) -> Self {
        Self { config, shared, inputs }
    }

    fn n_vocab(&self) -> Result<u32, Status> {
        if !self.config.is_master() {
            let WorkerConfig { stage, n_stages, .. } = *self.config;
            return Err(Status::unimplemented(format!("stage {stage} of {n_stages} is not the master")));
        }
        match self.shared.load_state() {
            LoadState::Loaded(loaded) => Ok(loaded.n_vocab),
            LoadState::Loading(_) => Err(Status::unavailable("the master is loading")),
            LoadState::Failed(reason) => Err(Status::unavailable(reason)),
        }
    }

    /// Whoever hands off or takes over needs to know where the stages are, and how their keys and values lie.
    fn check_hand_off(&self, generation: &Generation) -> Result<(), Status> {
        if generation.hand_off == HandOff::None {
            return Ok(());
        }
        if let Some(Err(reason)) = self.shared.kv() {
            return Err(Status::failed_precondition(format!("slots cannot change hands here: {reason}")));
        }
        if self.shared.chain().is_empty() {
            let reason = "slots cannot change hands: the replica was linked without its stages' addresses";
            return Err(Status::failed_precondition(reason));
        }
        Ok(())
    }

    /// Room for every event a request can have: a token per position, one of which every prompt takes, and its places
    /// in the queue. It is announced again to those behind whenever someone leaves; nobody leaves more often than
    /// there are places and slots to leave from, since those who come stand behind.
    fn room(&self, generation: &Generation) -> usize {
        let tokens = generation.max_tokens.min(self.config.n_ctx);
        let places = self.config.queue_limit + self.config.slots;
        tokens as usize + places as usize + OTHER_EVENTS
    }
}

#[tonic::async_trait]
impl v1::engine_server::Engine for EngineService {
    type GenerateStream = EventStream;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let n_vocab = self.n_vocab()?;
        let generation = Generation::check(request.into_inner(), n_vocab)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.check_hand_off(&generation)?;
        let (sender, receiver) = mpsc::channel(self.room(&generation));
        // Made before the wait: a client that leaves meanwhile drops it, which frees what the engine has given.
        let events = EventStream { receiver, shared: Arc::clone(&self.shared) };
        let (reply, admitted) = oneshot::channel();
        let admit = Admit { generation, events: Events { sender, shared: Arc::clone(&self.shared) }, reply };
        let gone = || Status::unavailable("the inference thread has ended");
        self.inputs.control.send(Control::Admit(Box::new(admit))).await.map_err(|_| gone())?;
        admitted.await.map_err(|_| gone())?.map_err(|error| refusal(&error))?;
        Ok(Response::new(events))
    }

    async fn engine_status(
        &self,
        _: Request<v1::EngineStatusRequest>,
    ) -> Result<Response<v1::EngineStatusReply>, Status> {
        self.n_vocab()?;
        let status = self.shared.engine().ok_or_else(|| Status::unavailable("the engine has not started"))?;
        Ok(Response::new(v1::EngineStatusReply {
            slots: self.config.slots,
            n_ctx: self.config.n_ctx,
            active: status.active,
            queued: status.queued,
            queue_limit: self.config.queue_limit,
            generated_tokens: status.generated_tokens,
            prefilled_tokens: status.prefilled_tokens,
            held: status.held,
            taken_over: status.taken_over.sequences,
            taken_over_bytes: status.taken_over.bytes,
            not_taken_over: status.taken_over.failures,
        }))
    }
}

/// The status by which the orchestrator tells refusals apart: RESOURCE_EXHAUSTED for a full queue, OUT_OF_RANGE for a
/// prompt longer than a slot, UNAVAILABLE for what may pass, FAILED_PRECONDITION for what goes without a hand-off,
/// INVALID_ARGUMENT for the rest.
fn refusal(error: &AdmitError) -> Status {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    match error {
        AdmitError::QueueFull { .. } => Status::resource_exhausted(message),
        AdmitError::PromptTooLong { .. } => Status::out_of_range(message),
        AdmitError::NotLinked { .. } => Status::unavailable(message),
        AdmitError::CannotHandOff => Status::failed_precondition(message),
        AdmitError::EmptyPrompt
        | AdmitError::TokenOutOfRange { .. }
        | AdmitError::NothingToGenerate
        | AdmitError::ReplayedTooMany { .. }
        | AdmitError::NothingLeft { .. }
        | AdmitError::Sampling(_) => Status::invalid_argument(message),
    }
}

/// A request's events on their way to tonic. Dropping it cancels the request.
pub(crate) struct EventStream {
    receiver: mpsc::Receiver<Item>,
    shared: Arc<Shared>,
}

impl Stream for EventStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        self.receiver.poll_recv(cx)
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        // Closed first, so that the inference thread sees it when it looks.
        self.receiver.close();
        self.shared.ring();
    }
}

/// The engine's end of a request's channel.
#[derive(Debug)]
pub(crate) struct Events {
    sender: mpsc::Sender<Item>,
    shared: Arc<Shared>,
}

impl Events {
    /// Tells later whether the client is still there.
    pub(crate) fn watch(&self) -> Watch {
        Watch(self.sender.downgrade())
    }
}

/// Events on their way to the requests' channels. A channel's receiver is woken by what it gets, so events wait here until the
/// next step's frames have gone out: another stage waits for those.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outbox(Rc<RefCell<Vec<Posted>>>);

/// An event, and the place that is kept for it in its request's channel.
type Posted = (OwnedPermit<Item>, Item);

impl Outbox {
    /// The engine's end of a channel, through this outbox.
    pub(crate) fn for_request(&self, events: Events) -> PostedEvents {
        PostedEvents { events, outbox: self.clone() }
    }

    /// Passes on all that waits.
    pub(crate) fn flush(&self) {
        for (place, item) in self.0.borrow_mut().drain(..) {
            place.send(item);
        }
    }
}

/// Where the engine puts a request's events.
#[derive(Debug)]
pub(crate) struct PostedEvents {
    events: Events,
    outbox: Outbox,
}

impl EventSink for PostedEvents {
    fn send(&mut self, event: Event) -> Result<(), Closed> {
        // The room is taken now, so that one whose client has gone is given up at once.
        let place = self.events.sender.clone().try_reserve_owned().map_err(|_| Closed)?;
        let event = Some(self.events.wire(event));
        self.outbox.0.borrow_mut().push((place, Ok(v1::GenerateEvent { event })));
        Ok(())
    }
}

impl Events {
    fn wire(&self, event: Event) -> v1::generate_event::Event {
        use v1::generate_event::Event as Wire;
        match event {
            Event::Queued { position } => Wire::Queued(v1::Queued { position }),
            Event::Started { slot, cached } => {
                Wire::Started(v1::Started { slot: slot.0, cached_tokens: cached })
            }
            Event::Token(token) => Wire::Token(token.into()),
            Event::Held { slot, hold, tokens } => {
                let (epoch, chain) = (self.shared.epoch(), self.shared.chain());
                Wire::Held(HeldSlot { epoch, slot, hold: hold.0, tokens, chain }.into())
            }
            Event::HandedOver(handed_over) => Wire::HandedOver(handed_over.into()),
            Event::Finished(finished) => Wire::Finished(finished.into()),
            Event::Failed { kind, message } => {
                Wire::Failed(v1::Failed { kind: v1::FailureKind::from(kind).into(), message })
            }
        }
    }
}

/// Tells what became of a request.
#[derive(Debug)]
pub(crate) struct Watch(mpsc::WeakSender<Item>);

/// What became of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It waits or runs.
    Alive,
    /// It waits or runs, but nobody listens.
    Abandoned,
    /// The engine is done with it.
    Over,
}

impl Watch {
    pub(crate) fn fate(&self) -> Fate {
        match self.0.upgrade() {
            None => Fate::Over,
            Some(sender) if sender.is_closed() => Fate::Abandoned,
            Some(_) => Fate::Alive,
        }
    }
}

impl From<HandedOver> for v1::HandedOver {
    fn from(HandedOver { tokens, bytes, took, failure }: HandedOver) -> Self {
        Self { tokens, bytes, took_ms: took.as_secs_f64() * 1e3, failure: failure.unwrap_or_default() }
    }
}

impl From<GeneratedToken> for v1::GeneratedToken {
    fn from(GeneratedToken { id, position, logprob, top }: GeneratedToken) -> Self {
        let top =
            top.into_iter().map(|TokenProbability { id, logprob }| v1::TokenProbability { id, logprob });
        Self { id, position, logprob, top: top.collect() }
    }
}

impl From<Finished> for v1::Finished {
    fn from(finished: Finished) -> Self {
        let reason = match finished.reason {
            FinishReason::Stop => v1::FinishReason::Stop,
            FinishReason::Length => v1::FinishReason::Length,
            FinishReason::HandedOff => v1::FinishReason::HandedOff,
            FinishReason::HoldExpired => v1::FinishReason::HoldExpired,
        };
        Self {
            reason: reason.into(),
            prompt_tokens: finished.prompt_tokens,
            generated_tokens: finished.generated_tokens,
            prefill_ms: finished.prefill.as_secs_f64() * 1e3,
            decode_ms: finished.decode.as_secs_f64() * 1e3,
        }
    }
}

impl From<FailureKind> for v1::FailureKind {
    fn from(kind: FailureKind) -> Self {
        match kind {
            FailureKind::Invalid => Self::Invalid,
            FailureKind::ReplicaLost => Self::ReplicaLost,
            FailureKind::Internal => Self::Internal,
        }
    }
}
