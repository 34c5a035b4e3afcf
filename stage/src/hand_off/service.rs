//! The Kv service of every stage: giving out keys and values of held slots, and taking them in in two steps.
//!
//! What was prepared waits in memory, at most one blob for each slot, and is forgotten with its epoch. The master lets few
//! transfers run at once, so that is how many slots' worth of memory a stage needs beside its cache.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use cluster::{Epoch, LayerRange, SlotId};
use futures::StreamExt;
use llama::kv_blob::{Blob, Prepared};
use protocol::certify::LiveIdentity;
use protocol::hand_off::{HeldSlot, PIECE};
use protocol::v1;
use protocol::worker::WorkerConfig;
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::facts::KvFacts;
use super::orders::Order;
use super::pull::{Fetch, Fetched};
use super::{BETWEEN_BATCHES, TRANSFER, within};
use crate::emulated::Network;
use crate::engine::RequestKey;
use crate::events::{Control, Inputs};
use crate::shared::Shared;

/// One worker's side of the Kv service.
pub(crate) struct KvService {
    config: Arc<WorkerConfig>,
    identity: LiveIdentity,
    shared: Arc<Shared>,
    inputs: Inputs,
    /// Where it is emulated.
    network: Option<Arc<Network>>,
    staged: Mutex<HashMap<SlotId, Staged>>,
    /// The sequence that was copied out last, while someone is still being sent of it.
    exported: tokio::sync::Mutex<Option<Exported>>,
}

/// What a Commit will put into a slot.
struct Staged {
    epoch: Epoch,
    transfer: u64,
    blobs: Vec<Prepared>,
}

struct Exported {
    epoch: Epoch,
    slot: SlotId,
    hold: u64,
    blob: Weak<Blob>,
}

impl KvService {
    pub(crate) fn new(
        config: Arc<WorkerConfig>,
        identity: LiveIdentity,
        shared: Arc<Shared>,
        (inputs, network): (Inputs, Option<Arc<Network>>),
    ) -> Self {
        let (staged, exported) = (Mutex::default(), tokio::sync::Mutex::default());
        Self { config, identity, shared, inputs, network, staged, exported }
    }

    fn facts(&self) -> Result<&KvFacts, Status> {
        match self.shared.kv() {
            Some(Ok(facts)) => Ok(facts),
            Some(Err(reason)) => Err(Status::failed_precondition(reason.clone())),
            None => Err(Status::unavailable(format!("stage {} is loading", self.config.stage))),
        }
    }

    fn check_epoch(&self, epoch: u64) -> Result<Epoch, Status> {
        let own = self.shared.epoch();
        if Epoch(epoch) == own && own != Epoch(0) {
            return Ok(own);
        }
        let stage = self.config.stage;
        Err(Status::failed_precondition(format!(
            "this is about epoch {epoch}, but stage {stage} is in {own}"
        )))
    }

    fn check_slot(&self, slot: u32) -> Result<SlotId, Status> {
        let slots = self.config.slots;
        let missing = || Status::invalid_argument(format!("slot {slot} is not one of {slots}"));
        (slot < slots).then_some(SlotId(slot)).ok_or_else(missing)
    }

    /// Asks the inference thread, and waits until it has looked.
    async fn order<T>(&self, order: impl FnOnce(oneshot::Sender<T>) -> Order) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        let gone = || "the inference thread has ended".to_owned();
        let asked = async {
            let order = Control::HandOff(order(reply));
            self.inputs.control.send(order).await.map_err(|_| gone())?;
            answer.await.map_err(|_| gone())
        };
        within(BETWEEN_BATCHES, "waiting for the end of a batch", asked).await.map_err(Status::unavailable)
    }

    async fn export(&self, epoch: Epoch, slot: SlotId) -> Result<Blob, Status> {
        let blob = self.order(|reply| Order::Export { epoch, slot, reply }).await?;
        blob.map_err(Status::failed_precondition)
    }

    /// The held slot's sequence: the copy that was made for it, or that another stage is being sent of, if there is one.
    async fn held(&self, from: &HeldSlot) -> Result<Arc<Blob>, Status> {
        let HeldSlot { epoch, slot, hold, tokens, .. } = *from;
        if let Some(copied) = self.shared.copies().of(epoch, slot, tokens) {
            return Ok(copied);
        }
        let mut last = self.exported.lock().await;
        let is_same = |last: &&Exported| (last.epoch, last.slot, last.hold) == (epoch, slot, hold);
        if let Some(blob) = last.as_ref().filter(is_same).and_then(|last| last.blob.upgrade()) {
            return Ok(blob);
        }
        let blob = Arc::new(self.export(epoch, slot).await?);
        if blob.tokens() != tokens {
            let held = blob.tokens();
            return Err(Status::failed_precondition(format!("{slot} holds {held} tokens, not {tokens}")));
        }
        *last = Some(Exported { epoch, slot, hold, blob: Arc::downgrade(&blob) });
        Ok(blob)
    }

    async fn fetch(&self, request: v1::PrepareRequest) -> Result<(Staged, SlotId, u64), Status> {
        let facts = self.facts()?;
        let (epoch, slot) = (self.check_epoch(request.epoch)?, self.check_slot(request.slot)?);
        let from = HeldSlot::required(request.from).map_err(invalid)?;
        if from.tokens > facts.n_ctx {
            let (tokens, n_ctx) = (from.tokens, facts.n_ctx);
            return Err(Status::invalid_argument(format!("{tokens} tokens do not fit a slot of {n_ctx}")));
        }
        let first_position = request.first_position;
        let identity = self.identity.now();
        let fetch = Fetch { facts, identity: &identity, from: &from, first_position };
        let asked = Instant::now();
        let Fetched { mut blob, bytes } = fetch.run().await.map_err(Status::unavailable)?;
        if let Some(network) = &self.network {
            network.receive(facts.layers, from.tokens.saturating_sub(first_position), asked).await;
        }
        if blob.first_position() > 0 {
            let own = self.export(epoch, slot).await?;
            let own = own.before(blob.first_position());
            blob = own.followed_by(&blob).map_err(|error| Status::failed_precondition(error.to_string()))?;
        }
        let copied = facts.clone();
        // Copies as much as the slot holds: not beside the connections' work.
        let blobs = tokio::task::spawn_blocking(move || copied.prepare(&blob, slot)).await;
        let blobs = blobs.map_err(|error| Status::internal(error.to_string()))?;
        let blobs = blobs.map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok((Staged { epoch, transfer: request.transfer, blobs }, slot, bytes))
    }

    fn staged(&self) -> MutexGuard<'_, HashMap<SlotId, Staged>> {
        // Every change is one call, so what a panicking thread leaves behind is whole.
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what was prepared for this transfer.
    fn unstage(&self, request: &v1::TransferRequest) -> Option<Staged> {
        let mut staged = self.staged();
        let slot = SlotId(request.slot);
        let is_meant =
            |staged: &Staged| (staged.epoch.0, staged.transfer) == (request.epoch, request.transfer);
        if staged.get(&slot).is_some_and(is_meant) { staged.remove(&slot) } else { None }
    }
}

#[tonic::async_trait]
impl v1::kv_server::Kv for KvService {
    type PullStream = Pin<Box<dyn Stream<Item = Result<v1::KvPiece, Status>> + Send>>;

    async fn pull(&self, request: Request<v1::PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let request = request.into_inner();
        let facts = self.facts()?;
        let from = HeldSlot::required(request.from).map_err(invalid)?;
        self.check_epoch(from.epoch.0)?;
        self.check_slot(from.slot.0)?;
        let layers = LayerRange::new(request.first_block, request.end_block).map_err(invalid)?;
        if layers.start() < facts.layers.start() || layers.end() > facts.layers.end() {
            let (stage, own) = (self.config.stage, facts.layers);
            return Err(Status::invalid_argument(format!("stage {stage} has blocks {own}, not {layers}")));
        }
        let whole = self.held(&from).await?;
        let part = whole.part(facts.indices(layers)).map_err(invalid)?.from(request.first_position);
        if let Some(network) = &self.network {
            network.send(layers, from.tokens.saturating_sub(request.first_position)).await;
        }
        let pieces = part.pieces().map_err(|error| Status::internal(error.to_string()))?;
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        let header = facts.header_of(&part, layers, bytes);
        let header = v1::kv_piece::Piece::Header(header.into());
        let data = Pieces { waiting: pieces.into(), _of: whole }.map(v1::kv_piece::Piece::Data);
        let all = std::iter::once(header).chain(data).map(|piece| Ok(v1::KvPiece { piece: Some(piece) }));
        // One who does not read keeps the copy no longer than that.
        let stream = futures::stream::iter(all).take_until(tokio::time::sleep(TRANSFER));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn prepare(
        &self,
        request: Request<v1::PrepareRequest>,
    ) -> Result<Response<v1::PrepareReply>, Status> {
        let (staged, slot, bytes) = self.fetch(request.into_inner()).await?;
        let own = self.check_epoch(staged.epoch.0)?;
        let mut all = self.staged();
        all.retain(|_, staged| staged.epoch == own);
        all.insert(slot, staged);
        Ok(Response::new(v1::PrepareReply { bytes }))
    }

    async fn commit(
        &self,
        request: Request<v1::TransferRequest>,
    ) -> Result<Response<v1::CommitReply>, Status> {
        let request = request.into_inner();
        let Some(Staged { epoch, blobs, .. }) = self.unstage(&request) else {
            let v1::TransferRequest { transfer, slot, .. } = request;
            return Err(Status::failed_precondition(format!(
                "nothing of transfer {transfer} is prepared for slot {slot}"
            )));
        };
        let slot = SlotId(request.slot);
        let done = self.order(|reply| Order::Import { epoch, slot, blobs, reply }).await?;
        done.map_err(Status::internal)?;
        Ok(Response::new(v1::CommitReply {}))
    }

    async fn abort(&self, request: Request<v1::TransferRequest>) -> Result<Response<v1::AbortReply>, Status> {
        drop(self.unstage(&request.into_inner()));
        self.order(|reply| Order::Fence { reply }).await?;
        Ok(Response::new(v1::AbortReply {}))
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::ReleaseReply>, Status> {
        let v1::ReleaseRequest { epoch, slot, hold } = request.into_inner();
        let (epoch, slot) = (self.check_epoch(epoch)?, self.check_slot(slot)?);
        let hold = RequestKey(hold);
        let held = self.shared.holds().release(slot, hold);
        if held {
            let order = Control::HandOff(Order::Released { epoch, slot, hold });
            let gone = |_| Status::unavailable("the inference thread has ended");
            // Whoever asks need not wait until the slot is given to somebody else.
            self.inputs.control.send(order).await.map_err(gone)?;
        }
        Ok(Response::new(v1::ReleaseReply { held }))
    }
}

fn invalid(error: impl std::fmt::Display) -> Status {
    Status::invalid_argument(error.to_string())
}

/// A blob's bytes in pieces of at most [`PIECE`]: small ones are put together, large ones cut.
struct Pieces {
    waiting: VecDeque<Bytes>,
    /// Lets others be sent of the same copy.
    _of: Arc<Blob>,
}

impl Iterator for Pieces {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        let mut piece = BytesMut::new();
        while let Some(front) = self.waiting.front_mut() {
            if piece.is_empty() && front.len() >= PIECE {
                return Some(front.split_to(PIECE));
            }
            let n = front.len().min(PIECE - piece.len());
            piece.extend_from_slice(&front.split_to(n));
            if front.is_empty() {
                self.waiting.pop_front();
            }
            if piece.len() == PIECE {
                break;
            }
        }
        (!piece.is_empty()).then(|| piece.freeze())
    }
}
