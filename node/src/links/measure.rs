//! One measurement of one link, by its sending end, over one connection: round trips first, then a stream as fast as the
//! link takes it, then frames of the sizes that stages send, one at a time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cluster::Millis;
use protocol::listen::FrameSizes;
use protocol::node::{FrameTime, PREFILL_ROWS, Receipt, probe_sizes};
use protocol::tls::describe_status;
use protocol::v1;
use protocol::v1::link_probe_client::LinkProbeClient;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use super::steady::{Meter, Sustained};
use super::{quantile, sorted};

/// Rows of the frames that are timed: decode steps of some batches, and a prefill chunk.
const ROWS: [u32; 4] = [1, 8, 32, PREFILL_ROWS];

/// Round trips that are not counted, and for how long at least: a path wakes up (ARP, a radio's power saving, clocks).
const WARM_UP: Repeat = Repeat { most: usize::MAX, least: 20, within: Duration::from_millis(60) };

/// Round trips: enough for a 99th percentile where they are short.
const ROUND_TRIPS: Repeat = Repeat { most: 200, least: 20, within: Duration::from_millis(600) };

/// Frames of each size.
const FRAMES: Repeat = Repeat { most: 15, least: 2, within: Duration::from_millis(300) };

/// A frame that would take longer is not timed: the rate tells as much.
const LONGEST_FRAME_SECS: f64 = 3.0;

/// A link on which nothing arrives for so long, beyond what its rate explains, is gone. A dead connection is noticed
/// before by its keepalive.
const STALL: Duration = Duration::from_secs(5);

/// Frames handed to the connection ahead of its turn; what may be under way is limited by bytes.
const QUEUE: usize = 64;

/// Why a link was not measured.
#[derive(Debug, Error)]
#[error("the link was lost during {phase}: {reason}")]
pub(crate) struct LinkLost {
    phase: &'static str,
    reason: String,
}

/// What one measurement found.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) round_trip: Millis,
    pub(crate) round_trip_p99: Millis,
    pub(super) sustained: Sustained,
    pub(crate) frames: Vec<FrameTime>,
}

impl Measured {
    pub(crate) const fn bandwidth(&self) -> cluster::BytesPerSecond {
        self.sustained.rate
    }

    pub(crate) const fn spread(&self) -> f64 {
        self.sustained.spread
    }
}

/// How often something is done: until one of the limits is reached, but `least` times.
#[derive(Debug, Clone, Copy)]
struct Repeat {
    most: usize,
    least: usize,
    within: Duration,
}

impl Repeat {
    fn goes_on(&self, done: usize, since: Instant) -> bool {
        done < self.least || (done < self.most && since.elapsed() < self.within)
    }
}

/// Measures the link over a connection that nothing else uses.
pub(crate) async fn measure(channel: Channel, n_embd: u32) -> Result<Measured, LinkLost> {
    let row_bytes = n_embd as usize * 4;
    let mut session = Session::open(channel, row_bytes * PREFILL_ROWS as usize).await?;
    session.phase = "the warm-up";
    session.frames(0, WARM_UP).await?;
    session.phase = "round trips";
    let round_trips = session.frames(0, ROUND_TRIPS).await?;
    let round_trip = quantile(&round_trips, 0.5);
    session.phase = "the stream";
    let sustained = session.stream(Duration::from_secs_f64(round_trip / 1e3)).await?;
    session.phase = "frames";
    let mut frames = Vec::new();
    for rows in ROWS {
        let bytes = rows as usize * row_bytes;
        if bytes as f64 / sustained.rate.0 > LONGEST_FRAME_SECS {
            continue;
        }
        // A receipt is small: half a round trip is its way back.
        let one_way = |taken: f64| Millis((taken - round_trip / 2.0).max(0.0));
        let taken = session.frames(bytes, FRAMES).await?;
        frames.push(FrameTime {
            rows,
            one_way: one_way(quantile(&taken, 0.5)),
            one_way_p99: one_way(quantile(&taken, 0.99)),
        });
    }
    Ok(Measured {
        round_trip: Millis(round_trip),
        round_trip_p99: Millis(quantile(&round_trips, 0.99)),
        sustained,
        frames,
    })
}

/// A stream of frames and their receipts.
struct Session {
    frames: mpsc::Sender<v1::ProbeFrame>,
    receipts: Streaming<v1::ProbeReceipt>,
    noise: Bytes,
    /// Frames sent, and what will have arrived with each that is under way.
    number: u64,
    under_way: VecDeque<u64>,
    sent: u64,
    last: Option<Receipt>,
    /// What is being done, for people.
    phase: &'static str,
}

impl Session {
    async fn open(channel: Channel, largest_frame: usize) -> Result<Self, LinkLost> {
        let FrameSizes { max_message, .. } = probe_sizes();
        let mut client = LinkProbeClient::new(channel).max_encoding_message_size(max_message);
        let (frames, queue) = mpsc::channel(QUEUE);
        let opened = tokio::time::timeout(STALL, client.probe(ReceiverStream::new(queue)));
        let lost = |reason| LinkLost { phase: "the start", reason };
        let receipts = match opened.await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return Err(lost(describe_status(&status))),
            Err(_) => return Err(lost(no_answer(STALL))),
        };
        let noise = noise(largest_frame.max(Meter::LARGEST_FRAME));
        let (number, sent, under_way) = (0, 0, VecDeque::new());
        Ok(Self { frames, receipts, noise, number, under_way, sent, last: None, phase: "the start" })
    }

    /// Sends frames of a size, each when the one before has arrived; how long each took with its receipt, in
    /// milliseconds, sorted.
    async fn frames(&mut self, bytes: usize, repeat: Repeat) -> Result<Vec<f64>, LinkLost> {
        let (mut taken, begin) = (Vec::new(), Instant::now());
        while repeat.goes_on(taken.len(), begin) {
            let sent = Instant::now();
            self.send(bytes).await?;
            self.receipt().await?;
            taken.push(sent.elapsed().as_secs_f64() * 1e3);
        }
        Ok(sorted(taken))
    }

    /// Sends as fast as the link takes it until it is known how fast that is.
    async fn stream(&mut self, round_trip: Duration) -> Result<Sustained, LinkLost> {
        let (base, epoch) = (self.sent, self.last.map_or(0, |receipt| receipt.elapsed_us));
        let mut meter = Meter::new(round_trip);
        let sustained = loop {
            let arrived = self.last.map_or(base, |receipt| receipt.bytes);
            while self.sent - arrived < meter.ahead() {
                self.send(meter.frame_bytes()).await?;
            }
            let Receipt { bytes, elapsed_us } = self.receipt().await?;
            meter.arrived(bytes - base, Duration::from_micros(elapsed_us - epoch));
            if let Some(sustained) = meter.verdict() {
                break sustained;
            }
        };
        while !self.under_way.is_empty() {
            self.receipt().await?;
        }
        Ok(sustained)
    }

    async fn send(&mut self, bytes: usize) -> Result<(), LinkLost> {
        let encoding = v1::Encoding::F32.into();
        let data = self.noise.slice(..bytes.min(self.noise.len()));
        self.sent += data.len() as u64;
        self.under_way.push_back(self.sent);
        let frame = v1::ProbeFrame { number: self.number, rows: Some(v1::HiddenRows { encoding, data }) };
        self.number += 1;
        match tokio::time::timeout(STALL, self.frames.send(frame)).await {
            Ok(Ok(())) => Ok(()),
            // The receipts' stream says why nothing is taken any more.
            Ok(Err(_)) => self.receipt().await.map(|_| ()),
            Err(_) => Err(self.lost(no_answer(STALL))),
        }
    }

    async fn receipt(&mut self) -> Result<Receipt, LinkLost> {
        let Some(bytes) = self.under_way.pop_front() else {
            return Err(self.lost("a receipt for nothing was awaited".to_owned()));
        };
        let number = self.number - self.under_way.len() as u64 - 1;
        let receipt = match tokio::time::timeout(STALL, self.receipts.message()).await {
            Ok(Ok(Some(receipt))) => receipt,
            Ok(Ok(None)) => return Err(self.lost("the peer ended the stream".to_owned())),
            Ok(Err(status)) => return Err(self.lost(describe_status(&status))),
            Err(_) => return Err(self.lost(no_answer(STALL))),
        };
        let checked = Receipt::check(receipt, number, bytes, self.last);
        let receipt = checked.map_err(|error| self.lost(error.to_string()))?;
        self.last = Some(receipt);
        Ok(receipt)
    }

    fn lost(&self, reason: String) -> LinkLost {
        LinkLost { phase: self.phase, reason }
    }
}

fn no_answer(after: Duration) -> String {
    format!("nothing arrived for {} s", after.as_secs())
}

/// What no middlebox can compress: Marsaglia's xorshift.
fn noise(bytes: usize) -> Bytes {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut noise = Vec::with_capacity(bytes + 8);
    while noise.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend_from_slice(&state.to_le_bytes());
    }
    noise.truncate(bytes);
    noise.into()
}

#[cfg(test)]
mod tests {
    use protocol::listen::{TlsIncoming, server};
    use protocol::tls::{ClusterCa, connect};
    use protocol::v1::link_probe_server::{LinkProbe, LinkProbeServer};
    use tokio_util::task::AbortOnDropHandle;
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::links::ProbeService;

    async fn measure_against(probe: impl LinkProbe) -> Result<Measured, LinkLost> {
        let ca = ClusterCa::new().unwrap();
        let incoming = TlsIncoming::bind(([127, 0, 0, 1], 0).into(), &ca.issue("b").unwrap()).await.unwrap();
        let address = incoming.local_addr();
        let FrameSizes { max_message, .. } = probe_sizes();
        let service = LinkProbeServer::new(probe).max_decoding_message_size(max_message);
        let serving = server(probe_sizes()).add_service(service).serve_with_incoming(incoming);
        let _serving = AbortOnDropHandle::new(tokio::spawn(serving));
        let channel = connect(address, &ca.issue("a").unwrap()).await.unwrap();
        measure(channel, 64).await
    }

    #[tokio::test]
    async fn a_link_of_this_host_has_a_rate_a_round_trip_and_times_of_all_frames() {
        let measured = measure_against(ProbeService::new()).await.unwrap();
        assert!(measured.round_trip.0 > 0.0 && measured.round_trip <= measured.round_trip_p99);
        assert!(measured.bandwidth().0 > 1e6, "{measured:?}");
        assert_eq!(measured.frames.iter().map(|frame| frame.rows).collect::<Vec<_>>(), ROWS);
    }

    /// Takes some frames, and then misbehaves.
    struct Broken(fn(v1::ProbeReceipt) -> Result<v1::ProbeReceipt, Status>);

    #[tonic::async_trait]
    impl LinkProbe for Broken {
        type ProbeStream = ReceiverStream<Result<v1::ProbeReceipt, Status>>;

        async fn probe(
            &self,
            request: Request<Streaming<v1::ProbeFrame>>,
        ) -> Result<Response<Self::ProbeStream>, Status> {
            let (mut frames, answer) = (request.into_inner(), self.0);
            let (sender, receipts) = mpsc::channel(1);
            tokio::spawn(async move {
                while let Ok(Some(frame)) = frames.message().await {
                    let receipt =
                        v1::ProbeReceipt { number: frame.number, bytes: 0, elapsed_us: frame.number };
                    let receipt = if frame.number < 30 { Ok(receipt) } else { answer(receipt) };
                    if sender.send(receipt).await.is_err() {
                        return;
                    }
                }
            });
            Ok(Response::new(ReceiverStream::new(receipts)))
        }
    }

    #[tokio::test]
    async fn a_peer_that_breaks_off_or_makes_no_sense_loses_the_link_with_the_reason() {
        let breaks_off = measure_against(Broken(|_| Err(Status::aborted("gone"))));
        let error = breaks_off.await.unwrap_err().to_string();
        assert!(error.contains("lost during") && error.contains("gone"), "{error}");
        let lies = measure_against(Broken(|receipt| Ok(v1::ProbeReceipt { bytes: u64::MAX, ..receipt })));
        let error = lies.await.unwrap_err().to_string();
        assert!(error.contains("a probe's receipt"), "{error}");
    }
}
