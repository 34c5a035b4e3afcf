//! The network of emulated devices: frames and caches come when they would over the devices' cards, each of which sends and
//! receives one thing after the other. What travels here are a few bytes of each; all of this program's own ways are taken.
//!
//! Hidden rows and caches do not get into each other's way: frames are short, and a card would send them in between.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cluster::{Attention, LayerRange, ModelShape};
use protocol::emulation::{EmulatedNetwork, Emulation};
use protocol::plan_files::PlanFileError;
use protocol::rows::RowEncoding;
use protocol::v1;
use protocol::v1::frame::Payload;
use tokio::sync::mpsc;

use super::clock::{Clock, came_at, due_ns, sleep_until};

/// Bytes of a cached element, and of a token id.
const CACHED: f64 = 2.0;
const TOKEN: f64 = 4.0;

/// A device's ways to the others.
#[derive(Debug)]
pub(crate) struct Network {
    network: EmulatedNetwork,
    time_scale: f64,
    model: ModelShape,
    /// Of caches.
    sent: Mutex<Clock>,
    received: Mutex<Clock>,
}

impl Network {
    /// None where the network is this host's own.
    pub(crate) fn of(emulation: Option<&Emulation>) -> Result<Option<Arc<Self>>, PlanFileError> {
        let Some((emulation, network)) = emulation.and_then(|it| Some((it, it.network?))) else {
            return Ok(None);
        };
        Ok(Some(Arc::new(Self {
            network,
            time_scale: emulation.time_scale,
            model: emulation.model.shape()?,
            sent: Mutex::default(),
            received: Mutex::default(),
        })))
    }

    /// Keys and values of so many tokens leave for another device; returns when they are there.
    pub(crate) async fn send(&self, layers: LayerRange, tokens: u32) {
        let there = occupy(&self.sent, self.here(self.cache_bytes(layers, tokens))) + self.latency();
        tokio::time::sleep_until(there.into()).await;
    }

    /// They have come from all who had some.
    pub(crate) async fn receive(&self, layers: LayerRange, tokens: u32, asked: Instant) {
        let time = self.here(self.cache_bytes(layers, tokens));
        let there = {
            let mut card = self.received.lock().unwrap_or_else(PoisonError::into_inner);
            card.occupy(asked, time, Instant::now())
        };
        tokio::time::sleep_until((there + self.latency()).into()).await;
    }

    /// Holds each frame for as long as it would be on its way.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(crate) fn carry(
        self: &Arc<Self>,
        mut frames: mpsc::Receiver<v1::Frame>,
        room: usize,
    ) -> std::io::Result<mpsc::Receiver<v1::Frame>> {
        let (there, carried) = mpsc::channel(room);
        let network = Arc::clone(self);
        // A thread, since a runtime's timers are a millisecond wide.
        std::thread::Builder::new().name("wire".to_owned()).spawn(move || {
            let mut card = Clock::default();
            while let Some(mut frame) = frames.blocking_recv() {
                let time = network.here(network.frame_bytes(&frame));
                let left = card.occupy(came_at(frame.due_ns), time, Instant::now());
                let due = left + network.latency();
                sleep_until(due);
                frame.due_ns = due_ns(due);
                // Nobody takes it any more: the epoch is over.
                if there.blocking_send(frame).is_err() {
                    return;
                }
            }
        })?;
        Ok(carried)
    }

    fn frame_bytes(&self, frame: &v1::Frame) -> f64 {
        let rows: f64 = frame.runs.iter().map(|run| f64::from(run.n)).sum();
        let row = match &frame.payload {
            Some(Payload::Hidden(hidden)) => {
                let encoding = RowEncoding::try_from(hidden.encoding).unwrap_or(RowEncoding::F32);
                f64::from(self.model.n_embd) * encoding.element_bytes() as f64
            }
            Some(Payload::Tokens(_)) | None => TOKEN,
        };
        rows * row
    }

    /// Of blocks with a sliding window only the window is sent.
    fn cache_bytes(&self, layers: LayerRange, tokens: u32) -> f64 {
        let blocks = self.model.blocks.iter().take(layers.end() as usize).skip(layers.start() as usize);
        let of = |block: &cluster::BlockShape| {
            let tokens = match block.kind.attention {
                Attention::SlidingWindow { window } => tokens.min(window),
                Attention::Full | Attention::Recurrent => tokens,
            };
            block.kv_elements_per_token as f64 * CACHED * f64::from(tokens)
        };
        blocks.map(of).sum()
    }

    /// What bytes take of the card.
    fn here(&self, bytes: f64) -> Duration {
        self.scaled(bytes / self.network.bytes_per_second)
    }

    fn latency(&self) -> Duration {
        self.scaled(self.network.latency_ms / 1e3)
    }

    fn scaled(&self, seconds: f64) -> Duration {
        const LONGEST_SECONDS: f64 = 1e7;
        Duration::from_secs_f64((seconds * self.time_scale).clamp(0.0, LONGEST_SECONDS))
    }
}

fn occupy(card: &Mutex<Clock>, time: Duration) -> Instant {
    let now = Instant::now();
    card.lock().unwrap_or_else(PoisonError::into_inner).occupy(now, time, now)
}
