//! What the inference thread is told, and how much of it may wait.
//!
//! Everything that goes round in a replica is a frame that its master made, and the engine has at most `micro_batches`
//! decode frames and one prefill frame per stage in flight. Each queue of frames holds that many, so none is ever full
//! while everyone keeps to the protocol; when one is full anyway, its sender waits, and the wait spreads back to where
//! the frames come from.

use std::time::Instant;

use cluster::Epoch;
use protocol::frame::Frame;
use protocol::rows::RowEncoding;
use protocol::sampling::Generation;
use protocol::v1;
use protocol::worker::WorkerConfig;
use tokio::sync::{mpsc, oneshot};

use crate::engine::AdmitError;
use crate::generate::Events;
use crate::hand_off::Order;

/// Requests to the inference thread that may wait; their senders wait when it is full. It empties the queue between
/// any two batches.
const CONTROL_QUEUE: usize = 64;

/// Orders to the inference thread.
#[derive(Debug)]
pub(crate) enum Control {
    /// Forget every sequence and join an epoch.
    Reset {
        /// The epoch.
        epoch: Epoch,
        /// Where frames go; `None` for the only stage of a replica.
        link: Option<Outlet>,
        /// Told once the sequences are forgotten.
        done: oneshot::Sender<()>,
    },
    /// Copy a slot's sequence, or what else a hand-off needs.
    HandOff(Order),
    /// Take a request in. Stages other than the master drop it.
    Admit(Box<Admit>),
    /// End the thread.
    Stop,
}

/// A request on its way to the engine.
#[derive(Debug)]
pub(crate) struct Admit {
    pub(crate) generation: Generation,
    pub(crate) events: Events,
    pub(crate) reply: oneshot::Sender<Result<(), AdmitError>>,
}

/// A frame, and when it came.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) frame: Frame,
    pub(crate) at: Instant,
}

/// The way to the next stage.
#[derive(Debug)]
pub(crate) struct Outlet {
    pub(crate) frames: mpsc::Sender<v1::Frame>,
    pub(crate) encoding: RowEncoding,
}

/// The senders' side.
#[derive(Debug, Clone)]
pub(crate) struct Inputs {
    pub(crate) control: mpsc::Sender<Control>,
    pub(crate) frames: mpsc::Sender<Arrived>,
}

/// The inference thread's side.
pub(crate) struct Inlet {
    pub(crate) control: mpsc::Receiver<Control>,
    pub(crate) frames: mpsc::Receiver<Arrived>,
    /// For tasks that tell the thread how they ended. It does not keep the thread alive.
    pub(crate) orders: mpsc::WeakSender<Control>,
}

pub(crate) fn channels(config: &WorkerConfig) -> (Inputs, Inlet) {
    let (control, control_inlet) = mpsc::channel(CONTROL_QUEUE);
    let (frames, frames_inlet) = mpsc::channel(frames_in_flight(config));
    let orders = control.downgrade();
    (Inputs { control, frames }, Inlet { control: control_inlet, frames: frames_inlet, orders })
}

/// Frames that a replica has in flight at most.
pub(crate) fn frames_in_flight(config: &WorkerConfig) -> usize {
    config.micro_batches as usize + config.n_stages as usize
}
