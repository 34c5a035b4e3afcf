//! The far end of a measurement: says of every frame that it has arrived, at once and in order, and forgets it.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, stream};
use protocol::v1;
use protocol::v1::link_probe_server::LinkProbe;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tonic::{Request, Response, Status, Streaming};

/// Streams at once. In a survey a node is probed by one peer at a time; a link may also be measured again.
const MOST_STREAMS: usize = 16;

/// A sender that says nothing for so long measures nothing.
const IDLE_DEADLINE: Duration = Duration::from_secs(30);

/// Answers probes.
#[derive(Debug)]
pub(crate) struct ProbeService {
    streams: Arc<Semaphore>,
}

impl ProbeService {
    pub(crate) fn new() -> Self {
        Self { streams: Arc::new(Semaphore::new(MOST_STREAMS)) }
    }
}

/// One stream of frames.
struct Arrivals {
    frames: Streaming<v1::ProbeFrame>,
    bytes: u64,
    first: Option<Instant>,
    _permit: OwnedSemaphorePermit,
}

#[tonic::async_trait]
impl LinkProbe for ProbeService {
    type ProbeStream = Pin<Box<dyn Stream<Item = Result<v1::ProbeReceipt, Status>> + Send>>;

    async fn probe(
        &self,
        request: Request<Streaming<v1::ProbeFrame>>,
    ) -> Result<Response<Self::ProbeStream>, Status> {
        let busy = |_| Status::resource_exhausted(format!("{MOST_STREAMS} measurements run already"));
        let permit = Arc::clone(&self.streams).try_acquire_owned().map_err(busy)?;
        let arrivals = Arrivals { frames: request.into_inner(), bytes: 0, first: None, _permit: permit };
        // No task and no queue between the connection and the receipt: they would be measured too.
        let receipts = stream::try_unfold(arrivals, Arrivals::next);
        Ok(Response::new(Box::pin(receipts)))
    }
}

impl Arrivals {
    async fn next(mut self) -> Result<Option<(v1::ProbeReceipt, Self)>, Status> {
        let silent = |_| Status::deadline_exceeded(format!("no frame for {} s", IDLE_DEADLINE.as_secs()));
        let frame = tokio::time::timeout(IDLE_DEADLINE, self.frames.message()).await.map_err(silent)??;
        let Some(v1::ProbeFrame { number, rows }) = frame else { return Ok(None) };
        let first = *self.first.get_or_insert_with(Instant::now);
        self.bytes = self.bytes.saturating_add(rows.map_or(0, |rows| rows.data.len() as u64));
        let elapsed_us = u64::try_from(first.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(Some((v1::ProbeReceipt { number, bytes: self.bytes, elapsed_us }, self)))
    }
}
