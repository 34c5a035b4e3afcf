//! The way of a frame from one stage to the next: encoded, sent over a TLS stream of this host to itself, received, checked
//! and decoded, from the thread that would compute before to the thread that would compute after.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cluster::{Epoch, SlotId, StepId};
use protocol::frame::{Frame, FrameLimits, RowInput, RowRun, Rows};
use protocol::listen::{FrameSizes, TlsIncoming, server};
use protocol::rows::RowEncoding;
use protocol::tls::{ClusterCa, TlsIdentity, connect};
use protocol::v1::stage_client::StageClient;
use protocol::v1::stage_server::{Stage, StageServer};
use protocol::v1::{self, ForwardReply, LinkReply, LinkRequest, StatusReply, StatusRequest};
use thiserror::Error;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status, Streaming};

/// Threads for connections of each end, as a stage worker has them.
const IO_THREADS: usize = 1;

/// The longest frame.
const MAX_ROWS: u32 = 2048;

/// A frame takes milliseconds; a host that is busy beyond measure, seconds.
const DEADLINE: Duration = Duration::from_secs(10);

/// Why no frame came through.
#[derive(Debug, Error)]
#[error("sending a frame on this host failed: {0}")]
pub struct HopError(String);

fn because(error: impl std::fmt::Display) -> HopError {
    HopError(error.to_string())
}

/// A link from this process to itself.
pub struct Link {
    near: Runtime,
    // Drops after the tasks that it runs.
    _far: Runtime,
    frames: tokio::sync::mpsc::Sender<v1::Frame>,
    arrived: mpsc::Receiver<Result<Frame, String>>,
    n_embd: u32,
    rows: Vec<f32>,
    received: Vec<f32>,
    _serving: Serving,
}

impl Link {
    /// Listens and connects; for rows of `n_embd` numbers.
    ///
    /// # Errors
    /// When the system refuses a port or a thread.
    pub fn new(n_embd: u32) -> Result<Self, HopError> {
        let (near, far) = (io_threads()?, io_threads()?);
        let identity = ClusterCa::new().and_then(|ca| ca.issue("profiler")).map_err(because)?;
        let (arrive, arrived) = mpsc::channel();
        let (serving, address) = far.block_on(listen(n_embd, arrive, &identity))?;
        let (frames, queued) = tokio::sync::mpsc::channel(1);
        near.block_on(async {
            let channel = connect(address, &identity).await.map_err(because)?;
            let call = StageClient::new(channel).forward(Request::new(ReceiverStream::new(queued))).await;
            let mut replies = call.map_err(because)?.into_inner();
            // The stream lives as long as somebody waits for its end.
            tokio::spawn(async move { while let Ok(Some(_)) = replies.message().await {} });
            Ok::<_, HopError>(())
        })?;
        Ok(Self {
            near,
            _far: far,
            frames,
            arrived,
            n_embd,
            rows: Vec::new(),
            received: Vec::new(),
            _serving: serving,
        })
    }

    /// Sends `rows` rows, waits until they are there, and says how long that took.
    ///
    /// # Errors
    /// When they do not arrive.
    pub fn send(&mut self, rows: u32) -> Result<Duration, HopError> {
        self.rows.resize(rows as usize * self.n_embd as usize, 0.5);
        let start = Instant::now();
        let encoding = RowEncoding::F32;
        let frame = Frame {
            epoch: Epoch::default(),
            step: StepId::default(),
            ops: Vec::new(),
            runs: vec![RowRun { slot: SlotId::default(), position: 0, n: rows }],
            prefill: true,
            rows: Rows::Hidden { encoding, data: encoding.encode(&self.rows) },
            copies: Vec::new(),
        };
        self.near.block_on(self.frames.send(frame.into_wire(0))).map_err(because)?;
        let frame = self.arrived.recv_timeout(DEADLINE).map_err(because)?.map_err(HopError)?;
        if let Rows::Hidden { encoding, data } = frame.rows {
            self.received.clear();
            encoding.append(&data, &mut self.received);
        }
        Ok(start.elapsed())
    }
}

fn io_threads() -> Result<Runtime, HopError> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .enable_all()
        .build()
        .map_err(because)
}

type Serving = AbortOnDropHandle<Result<(), tonic::transport::Error>>;

async fn listen(
    n_embd: u32,
    arrive: mpsc::Sender<Result<Frame, String>>,
    identity: &TlsIdentity,
) -> Result<(Serving, SocketAddr), HopError> {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let incoming = TlsIncoming::bind(listen, identity).await.map_err(because)?;
    let address = incoming.local_addr();
    let sizes = FrameSizes::for_rows(MAX_ROWS, n_embd);
    let limits = FrameLimits {
        slots: 1,
        n_ctx: MAX_ROWS,
        n_batch: MAX_ROWS,
        entry_layer: 0,
        input: RowInput::Hidden { n_embd },
    };
    let service = StageServer::new(Far { arrive, limits });
    let router = server(sizes).add_service(service.max_decoding_message_size(sizes.max_message));
    let serving = AbortOnDropHandle::new(tokio::spawn(router.serve_with_incoming(incoming)));
    Ok((serving, address))
}

/// The other end.
struct Far {
    arrive: mpsc::Sender<Result<Frame, String>>,
    limits: FrameLimits,
}

#[tonic::async_trait]
impl Stage for Far {
    type ForwardStream = ReceiverStream<Result<ForwardReply, Status>>;

    async fn forward(
        &self,
        request: Request<Streaming<v1::Frame>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
        let mut frames = request.into_inner();
        let (replies, stream) = tokio::sync::mpsc::channel(1);
        let (arrive, limits) = (self.arrive.clone(), self.limits);
        tokio::spawn(async move {
            // The stream of replies ends with the task.
            let _replies = replies;
            while let Ok(Some(frame)) = frames.message().await {
                let frame = Frame::check(frame, Epoch::default(), &limits).map_err(|e| e.to_string());
                if arrive.send(frame).is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        Err(Status::unimplemented("this is no stage"))
    }

    async fn link(&self, _: Request<LinkRequest>) -> Result<Response<LinkReply>, Status> {
        Err(Status::unimplemented("this is no stage"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_all_sizes_arrive_whole() {
        let mut link = Link::new(64).unwrap();
        for rows in [1, 32, MAX_ROWS] {
            assert!(link.send(rows).unwrap() > Duration::ZERO);
            assert_eq!(link.received.len(), rows as usize * 64);
        }
    }
}
