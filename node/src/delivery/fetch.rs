//! Fetches parts of a model: one host after the other is asked, and where one breaks off, the next goes on. What the part must be
//! is asked of whoever ordered the stage; the others only give bytes.
//!
//! It runs on a thread that may wait for the disk, and waits for the network there too.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use cluster::{Bytes, ModelHash};
use protocol::node::Peer;
use protocol::slices::{SliceId, SliceWord};
use protocol::tls::TlsIdentity;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::client::{Failure, describe, read};
use super::pace::Pace;
use crate::progress::{Progress, Work};
use crate::slices::{Arrival, CUTTER, Deliver, Receiving, SliceError, Verdict};

/// Between two rounds in which no host gave anything. A break of some seconds is not worth a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// After so long without a byte from anywhere it is one; whoever ordered the stage then tries again.
const PATIENCE: Duration = Duration::from_secs(40);

type Observer<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// Gets parts of one model from other hosts.
pub(crate) struct Fetcher<'a> {
    pub(crate) handle: Handle,
    pub(crate) identity: TlsIdentity,
    pub(crate) pace: &'a Pace,
    pub(crate) model: ModelHash,
    /// The likeliest first; the last one's word counts.
    pub(crate) sources: &'a [Peer],
    /// Ends it.
    pub(crate) stop: &'a CancellationToken,
}

/// What is known of the hosts while one file comes.
struct Round<'a> {
    id: SliceId,
    /// In the order in which they are asked.
    sources: Vec<&'a Peer>,
    /// Those that gave some of what is here.
    gave: Vec<bool>,
}

impl Deliver for Fetcher<'_> {
    fn deliver(&mut self, arrival: &Arrival<'_>, observer: &mut Observer<'_>) -> Result<(), SliceError> {
        let id = SliceId { model: self.model, cutter: CUTTER, file: arrival.file, form: *arrival.form };
        let sha256 = self.describe(id, observer)?;
        let sources: Vec<&Peer> = self.sources.iter().collect();
        let mut round = Round { id, gave: vec![false; sources.len()], sources };
        let mut got = String::new();
        for _ in 0..2 {
            let mut file = Receiving::open(arrival.path, arrival.form.bytes, sha256)?;
            self.fill(&mut round, &mut file, observer)?;
            match file.finish(arrival.record)? {
                Verdict::Right => return Ok(()),
                Verdict::Wrong(wrong) => {
                    tracing::warn!(file = %id.file, got = %wrong, "what came has wrong bytes; it is fetched again");
                    got = wrong;
                    round.others_first();
                }
            }
        }
        Err(SliceError::WrongBytes { file: id.file, got, wanted: ModelHash(sha256).to_string() })
    }
}

impl Fetcher<'_> {
    /// Waits for the network, unless nobody wants it any more.
    fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T, SliceError> {
        let stopped = self.stop.cancelled();
        self.handle.block_on(async {
            tokio::select! {
                done = work => Ok(done),
                () = stopped => Err(SliceError::Stopped),
            }
        })
    }

    /// What all bytes of a part must be: by the word of whoever ordered the stage, or if that is away, of another.
    fn describe(&self, id: SliceId, observer: &mut Observer<'_>) -> Result<[u8; 32], SliceError> {
        let work = Work::Receiving(id.file);
        go_on(observer, Progress { work, done: Bytes::ZERO, total: id.form.bytes })?;
        let mut reasons = Vec::new();
        for source in self.sources.iter().rev() {
            let mut told = |word| {
                if let SliceWord::Hashing { done, total } = word {
                    // Whoever stops it stops the wait too.
                    let _ = observer(Progress { work: Work::Asking(id.file), done, total });
                }
            };
            match self.wait(describe(source, &self.identity, id, &mut told))? {
                Ok(sha256) => return Ok(sha256),
                Err(failure) => reasons.push(format!("{}: {failure}", source.name)),
            }
        }
        Err(SliceError::NoSource { file: id.file, reasons })
    }

    /// Gets all that is missing.
    fn fill(
        &self,
        round: &mut Round<'_>,
        file: &mut Receiving,
        observer: &mut Observer<'_>,
    ) -> Result<(), SliceError> {
        let mut last_byte = Instant::now();
        loop {
            let (before, mut failures) = (file.received(), Vec::new());
            for at in 0..round.sources.len() {
                let had = file.received();
                let outcome = self.take_from(round.sources[at], round.id, file, observer)?;
                round.gave[at] |= file.received() > had;
                if file.is_whole() {
                    return Ok(());
                }
                let failure =
                    outcome.err().unwrap_or_else(|| Failure::Broke("it ended too early".to_owned()));
                let source = &round.sources[at].name;
                tracing::info!(file = %round.id.file, %source, at = file.received(), %failure, "a host gives no more");
                failures.push((format!("{source}: {failure}"), failure));
            }
            if file.received() > before {
                last_byte = Instant::now();
            }
            let hopeless = failures.iter().all(|(_, failure)| matches!(failure, Failure::HasNot(_)));
            if hopeless || last_byte.elapsed() > PATIENCE {
                let reasons = failures.into_iter().map(|(reason, _)| reason).collect();
                return Err(SliceError::NoSource { file: round.id.file, reasons });
            }
            go_on(observer, progress(round.id, file))?;
            self.wait(tokio::time::sleep(PAUSE))?;
        }
    }

    /// Gets what one host gives.
    fn take_from(
        &self,
        source: &Peer,
        id: SliceId,
        file: &mut Receiving,
        observer: &mut Observer<'_>,
    ) -> Result<Result<(), Failure>, SliceError> {
        let mut coming = match self.wait(read(source, &self.identity, id, file.received()))? {
            Ok(coming) => coming,
            Err(failure) => return Ok(Err(failure)),
        };
        let from = file.received();
        while !file.is_whole() {
            let piece = match self.wait(coming.next())? {
                Ok(Some(piece)) => piece,
                Ok(None) => return Ok(Ok(())),
                Err(failure) => return Ok(Err(failure)),
            };
            self.wait(self.pace.take(piece.len()))?;
            if !file.append(&piece)? {
                return Ok(Err(Failure::HasNot("it gave more bytes than there are".to_owned())));
            }
            go_on(observer, progress(id, file))?;
        }
        let bytes = file.received() - from;
        tracing::info!(file = %id.file, source = %source.name, from, bytes, "a part of a model was received");
        Ok(Ok(()))
    }
}

impl Round<'_> {
    /// Those who gave wrong bytes are asked last from now on; which of them did is not known.
    fn others_first(&mut self) {
        let gave: Vec<_> = std::mem::take(&mut self.sources).into_iter().zip(&self.gave).collect();
        let (bad, good): (Vec<_>, Vec<_>) = gave.into_iter().partition(|(_, gave)| **gave);
        self.sources = good.into_iter().chain(bad).map(|(source, _)| source).collect();
        self.gave.fill(false);
    }
}

fn progress(id: SliceId, file: &Receiving) -> Progress {
    Progress { work: Work::Receiving(id.file), done: Bytes(file.received()), total: id.form.bytes }
}

fn go_on(observer: &mut Observer<'_>, progress: Progress) -> Result<(), SliceError> {
    if observer(progress).is_break() { Err(SliceError::Stopped) } else { Ok(()) }
}
