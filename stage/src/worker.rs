//! Puts a worker together: services on a small tokio runtime, one inference thread, and the ties to the agent.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use protocol::certify::LiveIdentity;
use protocol::listen::{Clients, FrameSizes, ListenError, TlsIncoming, server};
use protocol::plan_files::PlanFileError;
use protocol::v1::engine_server::EngineServer;
use protocol::v1::kv_server::KvServer;
use protocol::v1::stage_server::StageServer;
use protocol::worker::{WorkerConfig, WorkerLineError};
use thiserror::Error;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use crate::emulated::Network;
use crate::events::{Control, Inputs, channels};
use crate::generate::EngineService;
use crate::hand_off::KvService;
use crate::service::StageService;
use crate::shared::Shared;
use crate::{inference, parent};

/// Threads for connections. One copies and encrypts rows faster than a LAN of 1 Gbit/s takes them, and every further one
/// costs a token a wake-up more: the rest of the cores compute.
const IO_THREADS: usize = 1;

/// Largest message to the engine: a prompt of a million tokens, a grammar and a bias for every token.
const MAX_REQUEST: usize = 16 << 20;

/// Why a worker ended.
#[derive(Debug, Error)]
pub enum WorkerError {
    /// The agent's line is wrong, or the answer could not be written as one.
    #[error(transparent)]
    Line(#[from] WorkerLineError),
    /// The operating system refused stdin, stdout, a thread or a signal.
    #[error("stage worker: {doing} failed")]
    Stdio {
        /// What was being done.
        doing: &'static str,
        /// The operating system's reason.
        #[source]
        source: io::Error,
    },
    /// It cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The network that it is to emulate cannot be.
    #[error("stage worker: the emulated network's model")]
    Network(#[from] PlanFileError),
    /// The server ended by itself.
    #[error("stage worker: the server failed")]
    Serve(#[source] tonic::transport::Error),
    /// A defect; the log says more.
    #[error("stage worker: the inference thread has panicked")]
    Inference,
}

/// Runs a stage worker in this process: configuration from stdin, hello to stdout, then service until stdin ends, which
/// ends the process.
///
/// # Errors
/// When the worker cannot start, or when it fails beyond a model that does not load, which Status tells of.
pub fn run_worker() -> Result<(), WorkerError> {
    let config = parent::read_config()?;
    let identity = LiveIdentity::new(config.tls.clone());
    parent::follow_into_death(identity.clone())?;
    llama::init_logging();
    let runtime = Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .thread_name("io")
        .enable_all()
        .build()
        .map_err(|source| WorkerError::Stdio { doing: "starting the io threads", source })?;
    runtime.block_on(async {
        parent::ignore_interrupts()?;
        let worker = Worker::start_as(config, identity).await?;
        parent::greet(worker.address().port())?;
        worker.ended().await
    })
}

/// A running worker. Dropping it ends its service; the inference thread ends after the batch it is in.
#[derive(Debug)]
pub struct Worker {
    address: SocketAddr,
    serving: AbortOnDropHandle<Result<(), tonic::transport::Error>>,
    inference: Inference,
}

/// The inference thread, told to stop on drop.
#[derive(Debug)]
struct Inference {
    inputs: Inputs,
    thread: Option<JoinHandle<()>>,
    ended: oneshot::Receiver<()>,
}

impl Worker {
    /// Listens, serves, and begins to load. Needs a tokio runtime with IO and time.
    ///
    /// # Errors
    /// When it cannot listen or start a thread.
    pub async fn start(config: WorkerConfig) -> Result<Self, WorkerError> {
        let identity = LiveIdentity::new(config.tls.clone());
        Self::start_as(config, identity).await
    }

    /// The same with an identity that may be renewed.
    async fn start_as(config: WorkerConfig, identity: LiveIdentity) -> Result<Self, WorkerError> {
        let config = Arc::new(config);
        let incoming = TlsIncoming::bind_live(config.listen, &identity, Clients::Members).await?;
        let address = incoming.local_addr();
        let shared = Shared::new();
        let (inputs, inlet) = channels(&config);
        let sizes = FrameSizes::for_rows(config.n_batch, config.n_embd);
        let network = Network::of(config.emulation.as_deref())?;
        let ways = || (inputs.clone(), network.clone());
        let hand_off = KvService::new(Arc::clone(&config), identity.clone(), Arc::clone(&shared), ways());
        let stage = StageService::new(Arc::clone(&config), identity.clone(), Arc::clone(&shared), ways());
        let engine = EngineService::new(Arc::clone(&config), Arc::clone(&shared), inputs.clone());
        let router = server(sizes)
            .add_service(StageServer::new(stage).max_decoding_message_size(sizes.max_message))
            .add_service(EngineServer::new(engine).max_decoding_message_size(MAX_REQUEST))
            .add_service(KvServer::new(hand_off));
        let serving = AbortOnDropHandle::new(tokio::spawn(router.serve_with_incoming(incoming)));
        let (alive, ended) = oneshot::channel::<()>();
        let runtime = Handle::current();
        let thread = thread::Builder::new()
            .name("inference".to_owned())
            .spawn(move || {
                // Dropped at the end, also of a panic.
                let _alive = alive;
                inference::run(config, identity, shared, inlet, &runtime);
            })
            .map_err(|source| WorkerError::Stdio { doing: "starting the inference thread", source })?;
        Ok(Self { address, serving, inference: Inference { inputs, thread: Some(thread), ended } })
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the end of the worker, which is a failure, as long as nobody has told it to stop.
    ///
    /// # Errors
    /// Says what ended it.
    pub async fn ended(mut self) -> Result<(), WorkerError> {
        tokio::select! {
            served = &mut self.serving => match served {
                Ok(served) => served.map_err(WorkerError::Serve),
                Err(_) => Err(WorkerError::Inference),
            },
            // Nothing is ever sent.
            _ = &mut self.inference.ended => Err(WorkerError::Inference),
        }
    }

    /// Ends the worker and waits for its inference thread.
    ///
    /// # Errors
    /// When the thread has panicked.
    pub async fn stop(mut self) -> Result<(), WorkerError> {
        drop(self.serving);
        // A full queue is no obstacle here: the thread empties it.
        let _ = self.inference.inputs.control.send(Control::Stop).await;
        let Some(thread) = self.inference.thread.take() else { return Ok(()) };
        let joined = tokio::task::spawn_blocking(move || thread.join()).await;
        joined.is_ok_and(|ended| ended.is_ok()).then_some(()).ok_or(WorkerError::Inference)
    }
}

impl Drop for Inference {
    fn drop(&mut self) {
        // If the queue is full the thread ends all the same, when the services have dropped their ends of it.
        let _ = self.inputs.control.try_send(Control::Stop);
    }
}
