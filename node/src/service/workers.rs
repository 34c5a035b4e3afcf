//! Workers that this node runs for others. Each lives as long as the stream of orders that asked for it: when its agent wants no more
//! of it, the worker is stopped. When the stream breaks, because the agent has died or cannot be reached, the worker is kept for
//! as long as its order says, loaded as it is, for whoever orders the very same stage: an orchestrator that was started again, or one
//! that is reached again. Then it is stopped, or earlier if another stage has no memory beside it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use cluster::StageMemory;
use futures::Stream;
use protocol::certify::LiveIdentity;
use protocol::emulation::Emulation;
use protocol::membership::RunningStage;
use protocol::node::{StageOrder, WorkerNews};
use protocol::tls::TlsIdentity;
use protocol::v1;
use protocol::v1::worker_order::Order;
use protocol::worker::WorkerConfig;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tonic::{Status, Streaming};

use super::kept::{Client, Kept};
use super::prepare::{Pantry, PreparedOrder, emulate, prepare};
use crate::agent::order::{OnHost, worker_config};
use crate::agent::process::WorkerProcess;
use crate::agent::{STOP_GRACE, WorkerCommand};
use crate::delivery::{Pace, SliceLimits};
use crate::folders::Folders;
use crate::progress::{Progress, Work};
use crate::slices::SliceStore;
use crate::turns::{TurnsError, TurnsFile};

/// Workers at once. A host runs a few; many more is a defect somewhere.
const MOST_WORKERS: usize = 64;

/// Within which an agent that opened a stream says what it wants.
const ORDER_DEADLINE: Duration = Duration::from_secs(5);

/// Between two words about the same work.
const NEWS_PERIOD: Duration = Duration::from_millis(250);

/// News not yet taken by the connection. More than a worker's life has but for its preparation, of which news is dropped.
const QUEUE: usize = 16;

/// Runs workers.
pub(super) struct WorkerHost {
    inner: Arc<Inner>,
    places: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

struct Inner {
    command: WorkerCommand,
    pantry: Pantry,
    /// Where workers listen: wherever the node does.
    bind: IpAddr,
    identity: LiveIdentity,
    /// The device that all workers stand for instead of computing.
    emulation: Option<Emulation>,
    turns: TurnsFile,
    /// Workers that listen, by their processes' ids.
    running: Mutex<BTreeMap<u32, RunningStage>>,
    /// Workers whose streams broke.
    kept: Kept,
}

impl Inner {
    fn running(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, RunningStage>> {
        // The map is whole after every statement.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a node runs workers.
pub(super) struct WorkerHostConfig {
    /// How they are started.
    pub(super) command: WorkerCommand,
    /// Where the models are.
    pub(super) folders: Folders,
    /// For parts of them that it gets from others.
    pub(super) limits: SliceLimits,
    /// Where the node listens.
    pub(super) bind: IpAddr,
    /// The node's.
    pub(super) identity: LiveIdentity,
    /// The device that they stand for instead of computing.
    pub(super) emulation: Option<Emulation>,
}

/// News of a worker on its way to who ordered it. Dropping it stops the worker.
pub(crate) struct NewsStream {
    news: mpsc::Receiver<Result<v1::WorkerEvent, Status>>,
    _wanted: DropGuard,
}

impl Stream for NewsStream {
    type Item = Result<v1::WorkerEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.news.poll_recv(cx)
    }
}

impl WorkerHost {
    /// Runs none yet.
    pub(super) fn new(config: WorkerHostConfig) -> Result<Self, TurnsError> {
        let WorkerHostConfig { command, folders, limits, bind, identity, emulation } = config;
        let (turns, running) = (TurnsFile::new()?, Mutex::default());
        let store = SliceStore::new(folders.slices()).limited(limits.cache);
        let pantry = Pantry { folders, store, identity: identity.clone(), pace: Pace::new(limits.rate) };
        Ok(Self {
            inner: Arc::new(Inner {
                command,
                pantry,
                bind,
                identity,
                emulation,
                turns,
                running,
                kept: Kept::default(),
            }),
            places: Arc::new(Semaphore::new(MOST_WORKERS)),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        })
    }

    /// Starts what the first order asks for.
    pub(super) async fn run(&self, mut orders: Streaming<v1::WorkerOrder>) -> Result<NewsStream, Status> {
        let busy = |_| Status::resource_exhausted(format!("this node runs {MOST_WORKERS} workers already"));
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(busy)?;
        let silent = |_| Status::deadline_exceeded(format!("no order for {} s", ORDER_DEADLINE.as_secs()));
        let first = tokio::time::timeout(ORDER_DEADLINE, orders.message()).await.map_err(silent)??;
        let Some(Order::Start(order)) = first.and_then(|order| order.order) else {
            return Err(Status::invalid_argument("the first order must start a stage"));
        };
        let order = StageOrder::check(order).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (sender, news) = mpsc::channel(QUEUE);
        let wanted = self.stop.child_token();
        let client = Client { orders, news: sender, wanted: wanted.clone() };
        if let Some(client) = self.inner.kept.hand_over(&order, client) {
            let host = Arc::clone(&self.inner);
            let run = Run { host, order, client, stop: self.stop.clone(), _place: place };
            self.tasks.spawn(run.live());
        }
        Ok(NewsStream { news, _wanted: wanted.drop_guard() })
    }

    /// What runs.
    pub(super) fn running(&self) -> Vec<RunningStage> {
        self.inner.running().values().cloned().collect()
    }

    /// Stops all workers, and returns when they are gone: within seconds, whatever they do.
    pub(super) async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(STOP_GRACE * 2, self.tasks.wait()).await.is_err() {
            tracing::warn!("some workers did not stop in time");
        }
    }
}

/// One worker, from its order to its end.
struct Run {
    host: Arc<Inner>,
    order: StageOrder,
    client: Client,
    /// Cancelled when the node stops.
    stop: CancellationToken,
    _place: OwnedSemaphorePermit,
}

/// Why a worker is not watched any more.
enum Watched {
    /// It has ended, or is not wanted.
    Over(String),
    /// The stream of orders broke.
    Orphaned,
}

impl Run {
    async fn live(mut self) {
        let last = match self.work().await {
            Ok(how) => Ok(WorkerNews::Ended { how }.into()),
            Err(status) => Err(status),
        };
        // Whoever ordered it may have gone.
        let _ = self.client.news.send(last).await;
    }

    /// Prepares, starts and watches. How the worker ended.
    async fn work(&mut self) -> Result<String, Status> {
        let stage = self.order.stage;
        let mut prepared = match self.prepare().await {
            // A stage that nobody may ever ask for again must not be in the way of one that is asked for.
            Err(status) if self.host.kept.end_all() => {
                tracing::info!(stage, reason = status.message(), "kept workers make room");
                tokio::time::sleep(STOP_GRACE).await;
                self.prepare().await?
            }
            prepared => prepared?,
        };
        let predicted = prepared.predicted;
        // For as long as the worker may load them.
        let _pins = std::mem::take(&mut prepared.pins);
        let config = self.config(prepared);
        let threads = config.threads;
        let started = tokio::select! {
            () = self.client.wanted.cancelled() => return Ok("was not wanted any more".to_owned()),
            started = WorkerProcess::start(&self.host.command, &config, &self.client.wanted) => started,
        };
        let worker = started.map_err(|error| Status::aborted(error.to_string()))?;
        let Some(port) = NonZero::new(worker.port) else {
            return Err(Status::internal("the worker listens at port 0"));
        };
        tracing::info!(stage, model = %self.order.model, layers = %self.order.layers, pid = worker.pid,
                       "a worker was started");
        let pid = worker.pid;
        self.host.running().insert(pid, self.describe());
        let how = self.serve(worker, predicted, WorkerNews::Listening { pid, port, threads }).await;
        self.host.running().remove(&pid);
        tracing::info!(stage, %how, "a worker ended");
        Ok(how)
    }

    /// Watches the worker for who ordered it, and for who orders it after that.
    async fn serve(
        &mut self,
        mut worker: WorkerProcess,
        predicted: StageMemory,
        listening: WorkerNews,
    ) -> String {
        let mut identity = self.host.identity.watch();
        loop {
            let _ = self.client.news.send(Ok(listening.clone().into())).await;
            match self.watch(&mut worker, &mut identity).await {
                Watched::Over(reason) if reason.is_empty() => {
                    let ended = worker.kill().await;
                    return ended
                        .map_or_else(|| "ended".to_owned(), |ended| ended.explain(predicted.total()));
                }
                Watched::Over(reason) => {
                    worker.stop(STOP_GRACE).await;
                    return reason;
                }
                Watched::Orphaned => match self.heir(&mut worker).await {
                    Some(heir) => {
                        tracing::info!(
                            stage = self.order.stage,
                            pid = worker.pid,
                            "a kept worker is wanted again"
                        );
                        self.client = heir;
                    }
                    None => {
                        worker.stop(STOP_GRACE).await;
                        return "was stopped: nobody asked for it again".to_owned();
                    }
                },
            }
        }
    }

    async fn watch(
        &mut self,
        worker: &mut WorkerProcess,
        identity: &mut watch::Receiver<TlsIdentity>,
    ) -> Watched {
        loop {
            tokio::select! {
                // A word that it is not wanted comes before the end of the connection that brought it.
                biased;
                () = worker.ended() => return Watched::Over(String::new()),
                () = self.stop.cancelled() => return Watched::Over("was stopped".to_owned()),
                // A second order says that it is not wanted; without one, the stream has broken.
                order = self.client.orders.message() => return match order {
                    Ok(Some(_)) => Watched::Over("was stopped".to_owned()),
                    Ok(None) | Err(_) => Watched::Orphaned,
                },
                () = self.client.wanted.cancelled() => return Watched::Orphaned,
                // The host holds on to its identity, so there is always somebody who might renew it.
                Ok(()) = identity.changed() => {
                    let renewed = identity.borrow_and_update().clone();
                    if let Err(error) = worker.renew(renewed).await {
                        tracing::warn!(pid = worker.pid, %error, "a worker could not be given its new certificate");
                    }
                }
            }
        }
    }

    /// Waits for who orders the same stage, for as long as the order says.
    async fn heir(&self, worker: &mut WorkerProcess) -> Option<Client> {
        if self.order.keep_secs == 0 {
            return None;
        }
        let keep = Duration::from_secs(u64::from(self.order.keep_secs));
        tracing::info!(
            stage = self.order.stage,
            pid = worker.pid,
            seconds = self.order.keep_secs,
            "the stream of orders broke; the worker is kept"
        );
        let heir = self.host.kept.wait(&self.order);
        tokio::select! {
            heir = heir => heir.ok(),
            () = worker.ended() => None,
            () = self.stop.cancelled() => None,
            () = tokio::time::sleep(keep) => None,
        }
    }

    fn describe(&self) -> RunningStage {
        let StageOrder { model, stage, n_stages, layers, .. } = &self.order;
        RunningStage { model: model.clone(), stage: *stage, n_stages: *n_stages, layers: *layers }
    }

    async fn prepare(&self) -> Result<PreparedOrder, Status> {
        let (order, host, wanted) = (self.order.clone(), Arc::clone(&self.host), self.client.wanted.clone());
        let mut teller = Teller { news: self.client.news.clone(), last: None };
        let prepared = tokio::task::spawn_blocking(move || {
            if let Some(emulation) = &host.emulation {
                return emulate(&order, emulation);
            }
            prepare(&order, &host.pantry, &wanted.clone(), &mut |progress| {
                teller.tell(&progress);
                if wanted.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
        });
        let prepared = prepared.await.map_err(|error| Status::internal(error.to_string()))?;
        prepared.map_err(|error| {
            tracing::warn!(stage = self.order.stage, model = %self.order.model, %error, "a stage cannot be run");
            error.status()
        })
    }

    fn config(&self, prepared: PreparedOrder) -> WorkerConfig {
        let host = OnHost {
            slice: prepared.slice,
            embedding: prepared.embedding,
            listen: SocketAddr::new(self.host.bind, 0),
            tls: self.host.identity.now(),
            emulation: self.host.emulation.clone(),
            turns: self.host.turns.path().to_owned(),
        };
        worker_config(&self.order, &prepared.shape, host)
    }
}

/// Tells of work now and then.
struct Teller {
    news: mpsc::Sender<Result<v1::WorkerEvent, Status>>,
    last: Option<(Work, Instant)>,
}

impl Teller {
    fn tell(&mut self, progress: &Progress) {
        if self.last.is_some_and(|(work, at)| work == progress.work && at.elapsed() < NEWS_PERIOD) {
            return;
        }
        self.last = Some((progress.work, Instant::now()));
        let Progress { work, done, total } = *progress;
        let news = WorkerNews::Preparing { work: work.to_string(), done, total };
        // If the connection is slow, the next word will do.
        let _ = self.news.try_send(Ok(news.into()));
    }
}
