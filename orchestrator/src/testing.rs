//! For tests: where the test model is, and a master whose every word the test chooses.
//!
//! The master is a peer at the other end of a real TLS connection; vocabulary and templates are a real model's.

use std::net::SocketAddr;
use std::path::PathBuf;

use protocol::listen::{FrameSizes, TlsIncoming, server};
use protocol::tls::TlsIdentity;
use protocol::v1;
use protocol::v1::engine_server::{Engine, EngineServer};
use protocol::v1::generate_event::Event;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use crate::config::{Limits, ReplicaFeed};
use crate::fleet::Fleet;
use crate::router::PolicyName;

/// SmolLM2, of which only the vocabulary is loaded.
pub(crate) fn smollm2() -> PathBuf {
    let folder = std::env::var_os("SHOAL_MODELS").map(PathBuf::from).unwrap_or_else(|| {
        PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/shoal/models")
    });
    let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is missing: run scripts/fetch-models.sh", path.display());
    path
}

/// A fleet of these replicas.
pub(crate) fn fleet(feeds: Vec<ReplicaFeed>, tls: &TlsIdentity, limits: &Limits) -> Fleet {
    let fleet = Fleet::new(tls.clone(), PolicyName::Jsq, limits.queue);
    for feed in feeds {
        fleet.add(feed);
    }
    fleet
}

/// A master that hands its calls to the test.
pub(crate) struct Master {
    pub(crate) address: SocketAddr,
    /// What it says of its engine; while there is nothing, it does not answer.
    pub(crate) engine: watch::Sender<Option<v1::EngineStatusReply>>,
    calls: mpsc::Receiver<Call>,
    _server: AbortOnDropHandle<()>,
}

/// A request that reached the master, not yet answered.
pub(crate) struct Call {
    pub(crate) request: v1::GenerateRequest,
    answer: tokio::sync::oneshot::Sender<Result<mpsc::Receiver<Result<v1::GenerateEvent, Status>>, Status>>,
}

/// A request that was accepted.
pub(crate) struct Accepted {
    events: mpsc::Sender<Result<v1::GenerateEvent, Status>>,
}

impl Master {
    pub(crate) async fn start(identity: &TlsIdentity) -> Self {
        let incoming = TlsIncoming::bind(([127, 0, 0, 1], 0).into(), identity).await.unwrap();
        let address = incoming.local_addr();
        let (sender, calls) = mpsc::channel(8);
        let (engine, said) = watch::channel(None);
        let switchboard = Switchboard { calls: sender, engine: said };
        let router = server(FrameSizes::for_rows(1, 1)).add_service(EngineServer::new(switchboard));
        let serving = tokio::spawn(async move { router.serve_with_incoming(incoming).await.unwrap() });
        Self { address, engine, calls, _server: AbortOnDropHandle::new(serving) }
    }

    /// The next request.
    pub(crate) async fn call(&mut self) -> Call {
        self.calls.recv().await.expect("the master goes on")
    }

    /// Whether no request has come.
    pub(crate) fn is_idle(&mut self) -> bool {
        self.calls.try_recv().is_err()
    }
}

impl Call {
    pub(crate) fn accept(self) -> Accepted {
        let (events, receiver) = mpsc::channel(64);
        assert!(self.answer.send(Ok(receiver)).is_ok(), "the orchestrator waits for an answer");
        Accepted { events }
    }

    pub(crate) fn refuse(self, status: Status) {
        assert!(self.answer.send(Err(status)).is_ok(), "the orchestrator waits for an answer");
    }
}

impl Accepted {
    pub(crate) async fn tell(&self, event: Event) {
        self.events
            .send(Ok(v1::GenerateEvent { event: Some(event) }))
            .await
            .expect("the orchestrator listens");
    }

    pub(crate) async fn queue(&self, position: u32) {
        self.tell(Event::Queued(v1::Queued { position })).await;
    }

    pub(crate) async fn start(&self, cached_tokens: u32) {
        self.tell(Event::Started(v1::Started { slot: 0, cached_tokens })).await;
    }

    pub(crate) async fn token(&self, id: i32) {
        self.tell(Event::Token(v1::GeneratedToken { id, ..Default::default() })).await;
    }

    pub(crate) async fn tokens(&self, ids: &[i32]) {
        for &id in ids {
            self.token(id).await;
        }
    }

    pub(crate) async fn finish(self, reason: v1::FinishReason, generated_tokens: u32) {
        let finished = v1::Finished {
            reason: reason.into(),
            prompt_tokens: 0,
            generated_tokens,
            prefill_ms: 10.0,
            decode_ms: 20.0,
        };
        self.tell(Event::Finished(finished)).await;
    }

    /// Waits until the request is cancelled.
    pub(crate) async fn cancelled(&self) {
        self.events.closed().await;
    }
}

struct Switchboard {
    calls: mpsc::Sender<Call>,
    engine: watch::Receiver<Option<v1::EngineStatusReply>>,
}

#[tonic::async_trait]
impl Engine for Switchboard {
    type GenerateStream = ReceiverStream<Result<v1::GenerateEvent, Status>>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let call = Call { request: request.into_inner(), answer };
        self.calls.send(call).await.map_err(|_| Status::unavailable("the test is over"))?;
        let events = answered.await.map_err(|_| Status::unavailable("the test hung up"))??;
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn engine_status(
        &self,
        _: Request<v1::EngineStatusRequest>,
    ) -> Result<Response<v1::EngineStatusReply>, Status> {
        let mut engine = self.engine.clone();
        let said = engine.wait_for(Option::is_some).await.map(|said| *said);
        said.ok().flatten().map(Response::new).ok_or_else(|| Status::unavailable("the test is over"))
    }
}
