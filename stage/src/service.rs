//! The Stage service: what the agent asks of a worker, and the frames of the stage before.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use cluster::Epoch;
use futures::StreamExt;
use protocol::certify::LiveIdentity;
use protocol::frame::{Frame, FrameLimits, RowInput};
use protocol::hand_off::check_chain;
use protocol::rows::RowEncoding;
use protocol::tls::describe_status;
use protocol::v1;
use protocol::worker::WorkerConfig;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status, Streaming};

use crate::emulated::{Network, came_at};
use crate::events::{Arrived, Control, Inputs, Outlet, frames_in_flight};
use crate::link::{self, EPOCH_KEY, Target};
use crate::memory;
use crate::shared::{LoadState, Loaded, Shared};

/// One worker's side of the Stage service.
pub(crate) struct StageService {
    config: Arc<WorkerConfig>,
    identity: LiveIdentity,
    shared: Arc<Shared>,
    inputs: Inputs,
    /// Where it is emulated.
    network: Option<Arc<Network>>,
    /// The link of the newest epoch; held during a whole Link call, so that calls take turns.
    link: tokio::sync::Mutex<Option<AbortOnDropHandle<()>>>,
    /// The newest epoch that has had its stream from the stage before.
    claimed: Mutex<Epoch>,
}

impl StageService {
    pub(crate) fn new(
        config: Arc<WorkerConfig>,
        identity: LiveIdentity,
        shared: Arc<Shared>,
        (inputs, network): (Inputs, Option<Arc<Network>>),
    ) -> Self {
        Self {
            config,
            identity,
            shared,
            inputs,
            network,
            link: tokio::sync::Mutex::new(None),
            claimed: Mutex::new(Epoch(0)),
        }
    }

    fn loaded(&self) -> Result<Loaded, Status> {
        match self.shared.load_state() {
            LoadState::Loaded(loaded) => Ok(loaded),
            LoadState::Loading(share) => Err(Status::unavailable(format!(
                "stage {} is loading: {:.0} %",
                self.config.stage,
                share * 100.0
            ))),
            LoadState::Failed(reason) => Err(Status::failed_precondition(reason)),
        }
    }

    fn limits(&self, loaded: &Loaded) -> FrameLimits {
        let WorkerConfig { stage, slots, n_ctx, n_batch, n_embd, .. } = *self.config;
        let input = if stage == 0 {
            RowInput::Tokens { n_vocab: loaded.n_vocab }
        } else {
            RowInput::Hidden { n_embd }
        };
        FrameLimits { slots, n_ctx, n_batch, entry_layer: self.config.entry_layer(), input }
    }

    /// Checks a Link call against this stage. An epoch is joined once: whoever lost track takes a higher one.
    fn check_link(&self, request: &v1::LinkRequest) -> Result<Option<RowEncoding>, Status> {
        let own = self.shared.epoch();
        if Epoch(request.epoch) <= own {
            return Err(Status::failed_precondition(format!(
                "stage {} is in {own} already and cannot join epoch {}",
                self.config.stage, request.epoch
            )));
        }
        if request.next.is_empty() != (self.config.n_stages == 1) {
            return Err(Status::invalid_argument(format!(
                "next is {:?} for a stage of {}",
                request.next, self.config.n_stages
            )));
        }
        if request.next.is_empty() {
            return Ok(None);
        }
        RowEncoding::try_from(request.encoding)
            .map(Some)
            .map_err(|error| Status::invalid_argument(error.to_string()))
    }

    /// Makes the inference thread forget the old epoch and join the new one.
    async fn reset(&self, epoch: Epoch, link: Option<Outlet>) -> Result<(), Status> {
        let (done, forgotten) = oneshot::channel();
        let gone = || Status::internal("the inference thread has ended");
        self.inputs.control.send(Control::Reset { epoch, link, done }).await.map_err(|_| gone())?;
        forgotten.await.map_err(|_| gone())
    }

    /// Starts the link's task; the receiver is told once the link is up, and dropped if it ends before.
    fn start_link(
        &self,
        epoch: Epoch,
        next: String,
        frames: mpsc::Receiver<v1::Frame>,
    ) -> (AbortOnDropHandle<()>, oneshot::Receiver<()>) {
        let (up, is_up) = oneshot::channel();
        let target = Target { next, epoch, identity: self.identity.now() };
        let shared = Arc::clone(&self.shared);
        let (stage, next) = (self.config.stage, target.next.clone());
        let task = tokio::spawn(async move {
            let reason = link::run(target, frames, up).await;
            shared.report_break(epoch, || format!("link from stage {stage} to {next}: {reason}"));
        });
        (AbortOnDropHandle::new(task), is_up)
    }

    /// Lets one stream per epoch in.
    fn claim(&self, epoch: Epoch) -> Result<(), Status> {
        let own = self.shared.epoch();
        if epoch != own || own == Epoch(0) {
            return Err(Status::failed_precondition(format!(
                "stream of {epoch}, but this stage is in {own}"
            )));
        }
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        if *claimed == epoch {
            // Frames of the first may have been lost with it, so another cannot go on where it ended.
            return Err(Status::already_exists(format!("{epoch} has had its stream")));
        }
        *claimed = epoch;
        Ok(())
    }
}

#[tonic::async_trait]
impl v1::stage_server::Stage for StageService {
    type ForwardStream = Pin<Box<dyn Stream<Item = Result<v1::ForwardReply, Status>> + Send>>;

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusReply>, Status> {
        let mut reply = v1::StatusReply {
            epoch: self.shared.epoch().0,
            steps: self.shared.steps(),
            link_failure: self.shared.broken().unwrap_or_default(),
            step_times: self.shared.observed().steps().map(v1::StepTimes::from).collect(),
            visits: Some(self.shared.observed().visits.tally().into()),
            round_trips: Some(self.shared.observed().round_trips.tally().into()),
            ..Default::default()
        };
        match self.shared.load_state() {
            LoadState::Loading(share) => {
                reply.set_state(v1::LoadState::Loading);
                reply.progress = share;
            }
            LoadState::Failed(reason) => {
                reply.set_state(v1::LoadState::Failed);
                reply.failure = reason;
            }
            LoadState::Loaded(loaded) => {
                reply.set_state(v1::LoadState::Loaded);
                reply.progress = 1.0;
                reply.gpu_layers = loaded.gpu_layers;
                reply.memory = Some(v1::MemoryReport {
                    weights: loaded.weights,
                    cache: loaded.cache,
                    compute: loaded.compute,
                    runtime: loaded.runtime,
                    resident: memory::resident(),
                });
            }
        }
        Ok(Response::new(reply))
    }

    async fn link(&self, request: Request<v1::LinkRequest>) -> Result<Response<v1::LinkReply>, Status> {
        let request = request.into_inner();
        self.loaded()?;
        let mut link = self.link.lock().await;
        let encoding = self.check_link(&request)?;
        let chain = check_chain(request.chain.clone())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let epoch = Epoch(request.epoch);
        // The old link first: the inference thread may be waiting for room in it.
        *link = None;
        self.shared.prepare_epoch(epoch);
        self.shared.set_chain(chain);
        let Some(encoding) = encoding else {
            self.reset(epoch, None).await?;
            self.shared.enter_epoch(epoch);
            return Ok(Response::new(v1::LinkReply {}));
        };
        let room = frames_in_flight(&self.config);
        let (frames, mut outgoing) = mpsc::channel(room);
        if let Some(network) = &self.network {
            let failed =
                |error| Status::internal(format!("starting the thread of an emulated link: {error}"));
            outgoing = network.carry(outgoing, room).map_err(failed)?;
        }
        self.reset(epoch, Some(Outlet { frames, encoding })).await?;
        self.shared.enter_epoch(epoch);
        let (task, is_up) = self.start_link(epoch, request.next, outgoing);
        *link = Some(task);
        // Stage 0, to which the master's link leads, joins last: nobody waits for that one.
        if !self.config.is_master() && is_up.await.is_err() {
            let reason = self.shared.broken_in(epoch).unwrap_or_else(|| "the link ended".to_owned());
            return Err(Status::unavailable(reason));
        }
        Ok(Response::new(v1::LinkReply {}))
    }

    async fn forward(
        &self,
        request: Request<Streaming<v1::Frame>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
        let limits = self.limits(&self.loaded()?);
        let epoch = request
            .metadata()
            .get(EPOCH_KEY)
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .map(Epoch)
            .ok_or_else(|| Status::invalid_argument(format!("no epoch in the metadata key {EPOCH_KEY}")))?;
        self.claim(epoch)?;
        let intake = Intake {
            epoch,
            limits,
            stage: self.config.stage,
            shared: Arc::clone(&self.shared),
            frames: self.inputs.frames.clone(),
        };
        // The reply stream reads the frames: it lives and dies with the connection, so nothing outlives its owner.
        let ended = futures::stream::once(intake.run(request.into_inner()));
        let replies = ended.filter_map(|end| std::future::ready(end.err().map(Err)));
        Ok(Response::new(Box::pin(replies)))
    }
}

/// Takes the frames of the stage before. However it ends, the epoch's chain is broken then.
struct Intake {
    epoch: Epoch,
    limits: FrameLimits,
    stage: u32,
    shared: Arc<Shared>,
    frames: mpsc::Sender<Arrived>,
}

impl Intake {
    async fn run(self, mut incoming: Streaming<v1::Frame>) -> Result<(), Status> {
        tokio::select! {
            // No frame is taken beyond that: dropping a half-taken one is right then. The stage before learns why.
            reason = self.shared.end_of(self.epoch) => Err(Status::aborted(reason)),
            end = self.take(&mut incoming) => end,
        }
    }

    async fn take(&self, incoming: &mut Streaming<v1::Frame>) -> Result<(), Status> {
        loop {
            let frame = match incoming.message().await {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    self.report(|| "the stage before ended its stream".to_owned());
                    return Ok(());
                }
                Err(status) => {
                    self.report(|| {
                        format!("the stream from the stage before broke: {}", describe_status(&status))
                    });
                    return Err(status);
                }
            };
            let at = came_at(frame.due_ns);
            let frame = Frame::check(frame, self.epoch, &self.limits).map_err(|error| {
                self.report(|| format!("a frame of the stage before was refused: {error}"));
                Status::invalid_argument(format!("stage {}: {error}", self.stage))
            })?;
            if self.frames.send(Arrived { frame, at }).await.is_err() {
                return Err(Status::internal("the inference thread has ended"));
            }
        }
    }

    fn report(&self, reason: impl FnOnce() -> String) {
        self.shared.report_break(self.epoch, || format!("stage {}: {}", self.stage, reason()));
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        // Of a connection that broke, tonic only drops the reply stream.
        self.report(|| "the connection from the stage before broke".to_owned());
    }
}
