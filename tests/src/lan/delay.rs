//! The delay line: takes frames out of a TAP device and puts each back when its time has come, since not every kernel
//! has `netem`. One thread for each network; frames of pairs that have no delay never come here.
//!
//! A frame leaves its sender when the last one of its pair has left, takes its bytes over the line rate to be sent,
//! and then travels for the delay. The thread sleeps until deadlines rather than for durations, so errors do not add
//! up. It must not know hosts: it knows the addresses in frames only.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cluster::BytesPerSecond;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use super::namespace::Namespace;

/// An Ethernet address.
pub(super) type Mac = [u8; 6];

/// The header that a TAP device puts before a frame, so that large segments can stay whole: `virtio_net_hdr`.
const VNET_HEADER: usize = 10;

/// Frames that a device keeps while the thread is busy with others.
const DEVICE_QUEUE: u32 = 4096;

/// A pair's backlog beyond which frames are lost, as a switch would. `tc` at the sender keeps it far smaller.
const BACKLOG_BYTES: f64 = 1024.0 * 1024.0;

/// What the way through sockets, bridge and the thread's waking takes anyway, in one direction; measured on two
/// virtual cores. It is taken off the delay.
const OVERHEAD: Duration = Duration::from_micros(40);

/// Of all real-time priorities the least: the thread goes before whatever else runs, since its lateness is an error of
/// the link. It sleeps whenever it can, and the kernel keeps 5 % of the time for others.
const PRIORITY: &str = "1";

/// How frames from one address to another travel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    /// One way.
    pub(super) delay: Duration,
    /// Of frames, headers included.
    pub(super) line_rate: BytesPerSecond,
}

/// Frames seen by a delay line.
#[derive(Debug, Default)]
struct Counts {
    forwarded: AtomicU64,
    dropped: AtomicU64,
}

/// The state of one direction of a pair.
#[derive(Debug)]
struct Lane {
    route: Route,
    /// When the last frame has left its sender.
    sent: Instant,
    /// When the last frame arrives; no later one may overtake it when the delay shrinks.
    arrives: Instant,
}

type Lanes = Mutex<HashMap<(Mac, Mac), Lane>>;

/// A running delay line, stopped when dropped.
#[derive(Debug)]
pub(super) struct DelayLine {
    lanes: Arc<Lanes>,
    counts: Arc<Counts>,
    /// Closing it wakes and ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl DelayLine {
    /// Makes a TAP device in a namespace and starts to serve it.
    pub(super) fn start(namespace: &Namespace, device: &str) -> Result<Self> {
        let build = || {
            let device = DeviceBuilder::new().name(device).layer(Layer::L2).offload(true);
            let device = device.enable(false).tx_queue_len(DEVICE_QUEUE).build_sync()?;
            device.set_nonblocking(true)?;
            io::Result::Ok(device)
        };
        let device = namespace.inside(build)?.with_context(|| format!("making the TAP device {device}"))?;
        let (stop, stopped) = UnixStream::pair()?;
        let lanes = Arc::new(Lanes::default());
        let counts = Arc::new(Counts::default());
        let worker = Worker {
            device,
            stopped,
            lanes: Arc::clone(&lanes),
            counts: Arc::clone(&counts),
            travelling: BinaryHeap::new(),
            taken: 0,
        };
        let thread = std::thread::Builder::new().name("delay-line".into()).spawn(move || worker.run())?;
        Ok(Self { lanes, counts, stop: Some(stop), thread: Some(thread) })
    }

    /// Sets how frames of a pair travel from now on.
    pub(super) fn set(&self, from: Mac, to: Mac, route: Route) {
        let now = Instant::now();
        let mut lanes = lock(&self.lanes);
        let lane = lanes.entry((from, to)).or_insert(Lane { route, sent: now, arrives: now });
        lane.route = route;
    }

    /// Frames delayed and frames lost to a full queue or a device that was down.
    pub(super) fn forwarded_and_dropped(&self) -> (u64, u64) {
        (self.counts.forwarded.load(Ordering::Relaxed), self.counts.dropped.load(Ordering::Relaxed))
    }
}

impl Drop for DelayLine {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic in it has been printed; the tests that miss its frames fail.
            let _ = thread.join();
        }
    }
}

/// A frame on its way, ordered by arrival and then by departure.
type Travelling = Reverse<(Instant, u64, Vec<u8>)>;

struct Worker {
    device: SyncDevice,
    stopped: UnixStream,
    lanes: Arc<Lanes>,
    counts: Arc<Counts>,
    travelling: BinaryHeap<Travelling>,
    taken: u64,
}

impl Worker {
    fn run(mut self) {
        // Both make the delays more precise and no less right, so a refusal is no reason to stop.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
        let _ = Command::new("chrt").args(["--fifo", "--pid", PRIORITY, &thread]).status();
        let mut buffer = vec![0; VNET_HEADER + (1 << 16) + 64];
        while self.wait() {
            while let Ok(length) = self.device.recv(&mut buffer) {
                self.take(&buffer[..length]);
                self.deliver();
            }
            self.deliver();
        }
    }

    /// Waits for a frame or for the next arrival; false when the line is stopped.
    fn wait(&self) -> bool {
        let next = self.travelling.peek().map(|Reverse((arrival, ..))| *arrival);
        let timeout = next
            .and_then(|arrival| Timespec::try_from(arrival.saturating_duration_since(Instant::now())).ok());
        let mut watched =
            [PollFd::new(&self.device, PollFlags::IN), PollFd::new(&self.stopped, PollFlags::IN)];
        match poll(&mut watched, timeout.as_ref()) {
            Ok(_) => watched[1].revents().is_empty(),
            Err(error) => error == rustix::io::Errno::INTR,
        }
    }

    /// Notes when a frame is to arrive.
    fn take(&mut self, frame: &[u8]) {
        let now = Instant::now();
        let arrival = match (addresses(frame), lock(&self.lanes)) {
            (Some(pair), mut lanes) => {
                lanes.get_mut(&pair).map_or(Some(now), |lane| lane.arrival(now, wire_bytes(frame)))
            }
            (None, _) => None,
        };
        let Some(arrival) = arrival else {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        };
        self.taken += 1;
        self.travelling.push(Reverse((arrival, self.taken, frame.to_vec())));
    }

    /// Puts back all frames whose time has come.
    fn deliver(&mut self) {
        while self.travelling.peek().is_some_and(|Reverse((arrival, ..))| *arrival <= Instant::now()) {
            let Some(Reverse((_, _, frame))) = self.travelling.pop() else { return };
            let counter = match self.device.send(&frame) {
                Ok(_) => &self.counts.forwarded,
                Err(_) => &self.counts.dropped,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Lane {
    /// When a frame handed over now arrives; none if the backlog is full.
    fn arrival(&mut self, now: Instant, bytes: f64) -> Option<Instant> {
        let rate = self.route.line_rate.0;
        let backlog = self.sent.saturating_duration_since(now);
        if backlog.as_secs_f64() * rate > BACKLOG_BYTES {
            return None;
        }
        self.sent = self.sent.max(now) + Duration::from_secs_f64(bytes / rate);
        let arrival = self.sent + self.route.delay.saturating_sub(OVERHEAD);
        self.arrives = self.arrives.max(arrival);
        Some(self.arrives)
    }
}

/// Sender and receiver of a frame.
fn addresses(frame: &[u8]) -> Option<(Mac, Mac)> {
    let to = frame.get(VNET_HEADER..VNET_HEADER + 6)?.try_into().ok()?;
    let from = frame.get(VNET_HEADER + 6..VNET_HEADER + 12)?.try_into().ok()?;
    Some((from, to))
}

/// The bytes that a frame takes on the wire: a large segment is cut up, and each piece has headers of its own. Reads
/// `struct virtio_net_hdr` of Linux's `uapi/linux/virtio_net.h`.
fn wire_bytes(frame: &[u8]) -> f64 {
    /// `VIRTIO_NET_HDR_GSO_UDP_L4`.
    const UDP: u8 = 5;
    /// `VIRTIO_NET_HDR_GSO_ECN`, a flag beside the kind of segment.
    const ECN: u8 = 0x80;
    let byte = |at: usize| frame.get(at).copied().unwrap_or(0);
    let field = |at: usize| usize::from(u16::from_ne_bytes([byte(at), byte(at + 1)]));
    let (kind, piece, transport) = (byte(1) & !ECN, field(4), field(6));
    let length = frame.len().saturating_sub(VNET_HEADER);
    if kind == 0 || piece == 0 {
        return length as f64;
    }
    let transport_header = match kind {
        UDP => 8,
        // TCP's own length is in words of four bytes, in the upper half of its thirteenth byte.
        _ => usize::from(byte(VNET_HEADER + transport + 12) >> 4) * 4,
    };
    let headers = transport + transport_header;
    let pieces = length.saturating_sub(headers).div_ceil(piece).max(1);
    (length + (pieces - 1) * headers) as f64
}

fn lock(lanes: &Lanes) -> MutexGuard<'_, HashMap<(Mac, Mac), Lane>> {
    lanes.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(now: Instant, delay: Duration) -> Lane {
        Lane { route: Route { delay, line_rate: BytesPerSecond(1e6) }, sent: now, arrives: now }
    }

    #[test]
    fn a_frame_waits_for_those_before_it_and_then_travels() {
        let now = Instant::now();
        let mut lane = lane(now, Duration::from_millis(10) + OVERHEAD);
        assert_eq!(lane.arrival(now, 1000.0), Some(now + Duration::from_millis(11)));
        assert_eq!(lane.arrival(now, 2000.0), Some(now + Duration::from_millis(13)));
        let later = now + Duration::from_secs(1);
        assert_eq!(lane.arrival(later, 1000.0), Some(later + Duration::from_millis(11)));
    }

    #[test]
    fn no_frame_overtakes_another_when_the_delay_shrinks() {
        let now = Instant::now();
        let mut lane = lane(now, Duration::from_millis(100) + OVERHEAD);
        let first = lane.arrival(now, 1000.0).unwrap();
        lane.route.delay = Duration::ZERO;
        assert_eq!(lane.arrival(now, 1000.0), Some(first));
    }

    #[test]
    fn a_backlog_is_bounded() {
        let now = Instant::now();
        let mut lane = lane(now, Duration::ZERO);
        let taken = (0..2000).filter(|_| lane.arrival(now, 1514.0).is_some()).count() as f64;
        assert!((taken - BACKLOG_BYTES / 1514.0).abs() < 2.0, "{taken} frames");
    }

    #[test]
    fn each_piece_of_a_large_segment_has_its_own_headers() {
        let mut frame = vec![0; VNET_HEADER + 66 + 3 * 1448];
        assert_eq!(wire_bytes(&frame), (66 + 3 * 1448) as f64);
        // TCP over IPv4 behind 34 bytes, with 12 bytes of options.
        frame[1] = 1;
        frame[4..6].copy_from_slice(&1448_u16.to_ne_bytes());
        frame[6..8].copy_from_slice(&34_u16.to_ne_bytes());
        frame[VNET_HEADER + 34 + 12] = 8 << 4;
        assert_eq!(wire_bytes(&frame), 3.0 * 1514.0);
    }
}
