//! The Slices service: gives out parts of models, a few at a time.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use cluster::{Bytes, ModelHash};
use futures::Stream;
use gguf::ReadAt;
use protocol::slices::{PIECE, SliceFile, SliceId, SliceWord, piece_of};
use protocol::v1;
use sha2::{Digest, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use super::pace::Pace;
use super::source::{Opened, open};
use crate::folders::Folders;

/// Transfers at once: more would only share the same disk and network.
const AT_ONCE: usize = 4;

/// Those that wait besides; a cluster has tens of nodes.
const MOST: usize = 64;

/// Pieces and words on their way to the connection.
const QUEUE: usize = 2;

/// Between two words of a transfer that waits for its turn, or of a file that is hashed.
const WORD_PERIOD: Duration = Duration::from_millis(500);

/// Bytes hashed at once.
const BLOCK: usize = 1 << 20;

/// Gives out parts of models. Clones are the same.
#[derive(Clone)]
pub(crate) struct SlicesService(Arc<Inner>);

struct Inner {
    folders: Folders,
    pace: Pace,
    /// One for each transfer under way.
    turns: Arc<Semaphore>,
    /// One for each call.
    places: Arc<Semaphore>,
    /// Of files that were hashed.
    known: Mutex<HashMap<(ModelHash, SliceFile), [u8; 32]>>,
}

/// What is sent. Dropping it ends the work for it.
pub(crate) struct Sent<T> {
    items: mpsc::Receiver<Result<T, Status>>,
    _work: AbortOnDropHandle<()>,
}

impl<T> Stream for Sent<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.items.poll_recv(cx)
    }
}

fn failed(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}

impl SlicesService {
    /// From these folders, no faster than `pace`.
    pub(crate) fn new(folders: Folders, pace: Pace) -> Self {
        let (turns, places) = (Arc::new(Semaphore::new(AT_ONCE)), Arc::new(Semaphore::new(MOST)));
        Self(Arc::new(Inner { folders, pace, turns, places, known: Mutex::default() }))
    }

    fn place(&self) -> Result<OwnedSemaphorePermit, Status> {
        let busy = |_| Status::resource_exhausted(format!("{MOST} transfers are under way or wait already"));
        Arc::clone(&self.0.places).try_acquire_owned().map_err(busy)
    }

    /// On a thread that may wait for the disk.
    async fn open(&self, id: SliceId) -> Result<Opened, Status> {
        let inner = Arc::clone(&self.0);
        let opened = tokio::task::spawn_blocking(move || open(&id, &inner.folders)).await.map_err(failed)?;
        opened.ok_or_else(|| {
            Status::not_found(format!("it has neither {} nor a copy of the model {}", id.file, id.model))
        })
    }
}

impl Inner {
    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<(ModelHash, SliceFile), [u8; 32]>> {
        // The map is whole after every statement.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn, and says so now and then; none if nobody listens any more.
    async fn turn<T>(
        &self,
        waiting: impl Fn() -> T,
        items: &mpsc::Sender<Result<T, Status>>,
    ) -> Option<OwnedSemaphorePermit> {
        loop {
            let turn = Arc::clone(&self.turns).acquire_owned();
            match tokio::time::timeout(WORD_PERIOD, turn).await {
                // It is never closed.
                Ok(turn) => return turn.ok(),
                Err(_) => items.send(Ok(waiting())).await.ok()?,
            }
        }
    }

    async fn describe(
        self: Arc<Self>,
        id: SliceId,
        opened: Opened,
        words: mpsc::Sender<Result<v1::SliceWord, Status>>,
    ) {
        let (done, total) = (Bytes::ZERO, id.form.bytes);
        let waiting = || SliceWord::Hashing { done, total }.into();
        let Some(_turn) = self.turn(waiting, &words).await else { return };
        let telling = words.clone();
        let hashed = tokio::task::spawn_blocking(move || {
            let mut told = Instant::now();
            hash(opened.bytes.as_ref(), &mut |done| {
                if told.elapsed() >= WORD_PERIOD {
                    told = Instant::now();
                    // If the connection is slow, the next word will do.
                    let _ = telling.try_send(Ok(SliceWord::Hashing { done, total }.into()));
                }
                if telling.is_closed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
        });
        let last = match hashed.await.map_err(failed) {
            Ok(Ok(Some(sha256))) => {
                self.known().insert((id.model, id.file), sha256);
                Ok(SliceWord::Sha256(sha256).into())
            }
            Ok(Ok(None)) => return,
            Ok(Err(error)) => Err(failed(error)),
            Err(status) => Err(status),
        };
        // Whoever asked may have gone.
        let _ = words.send(last).await;
    }

    async fn send(
        self: Arc<Self>,
        id: SliceId,
        opened: Opened,
        offset: u64,
        pieces: mpsc::Sender<Result<v1::SlicePiece, Status>>,
    ) {
        let Some(_turn) = self.turn(v1::SlicePiece::default, &pieces).await else { return };
        let (bytes, total) = (Arc::clone(&opened.bytes), id.form.bytes.0);
        let mut at = offset;
        while at < total {
            let size = (total - at).min(PIECE as u64) as usize;
            let (source, from) = (Arc::clone(&bytes), at);
            let read = tokio::task::spawn_blocking(move || {
                let mut piece = vec![0; size];
                source.read_exact_at(from, &mut piece).map(|()| piece)
            });
            let piece = match read.await.map_err(failed) {
                Ok(Ok(piece)) => Ok(piece_of(piece)),
                Ok(Err(error)) => Err(failed(format!("reading {} at {from}: {error}", id.file))),
                Err(status) => Err(status),
            };
            let ends = piece.is_err();
            self.pace.take(piece.as_ref().map_or(0, |piece| piece.data.len())).await;
            if pieces.send(piece).await.is_err() || ends {
                return;
            }
            at += size as u64;
        }
        tracing::info!(file = %id.file, model = %id.model, bytes = total - offset, "a part of a model was given out");
    }
}

/// Of all bytes; none if it was stopped.
fn hash(
    bytes: &dyn ReadAt,
    told: &mut dyn FnMut(Bytes) -> ControlFlow<()>,
) -> std::io::Result<Option<[u8; 32]>> {
    let (mut hasher, mut block, mut done) = (Sha256::new(), vec![0; BLOCK], 0);
    while done < bytes.len() {
        let size = (bytes.len() - done).min(BLOCK as u64) as usize;
        bytes.read_exact_at(done, &mut block[..size])?;
        hasher.update(&block[..size]);
        done += size as u64;
        if told(Bytes(done)).is_break() {
            return Ok(None);
        }
    }
    Ok(Some(hasher.finalize().into()))
}

fn invalid(error: protocol::node::BadMessage) -> Status {
    Status::invalid_argument(error.to_string())
}

#[tonic::async_trait]
impl v1::slices_server::Slices for SlicesService {
    type DescribeStream = Sent<v1::SliceWord>;

    async fn describe(
        &self,
        request: Request<v1::SliceRequest>,
    ) -> Result<Response<Self::DescribeStream>, Status> {
        let id = SliceId::check(request.into_inner()).map_err(invalid)?;
        let place = self.place()?;
        let opened = self.open(id).await?;
        let known = opened.sha256.or_else(|| self.0.known().get(&(id.model, id.file)).copied());
        let (words, items) = mpsc::channel(QUEUE);
        let inner = Arc::clone(&self.0);
        let work = tokio::spawn(async move {
            let _place = place;
            match known {
                // Whoever asked may have gone.
                Some(sha256) => drop(words.send(Ok(SliceWord::Sha256(sha256).into())).await),
                None => inner.describe(id, opened, words).await,
            }
        });
        Ok(Response::new(Sent { items, _work: AbortOnDropHandle::new(work) }))
    }

    type ReadStream = Sent<v1::SlicePiece>;

    async fn read(
        &self,
        request: Request<v1::ReadSliceRequest>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let (id, offset) = SliceId::check_read(request.into_inner()).map_err(invalid)?;
        let place = self.place()?;
        let opened = self.open(id).await?;
        let (pieces, items) = mpsc::channel(QUEUE);
        let inner = Arc::clone(&self.0);
        let work = tokio::spawn(async move {
            let _place = place;
            inner.send(id, opened, offset, pieces).await;
        });
        Ok(Response::new(Sent { items, _work: AbortOnDropHandle::new(work) }))
    }
}
