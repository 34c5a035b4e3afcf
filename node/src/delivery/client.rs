//! One host that is asked for a part of a model. Every wait has a deadline, and everything that comes is checked.

use std::time::Duration;

use protocol::finding::reach::first;
use protocol::node::{Address, Peer};
use protocol::slices::{PIECE, SliceId, SliceWord, piece_bytes};
use protocol::tls::{self, TlsIdentity, describe_status};
use protocol::v1;
use protocol::v1::slices_client::SlicesClient;
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};

/// Within which a host finds out whether it has a part. If somebody has copied its files it looks at all of their bytes first.
const ASK_DEADLINE: Duration = Duration::from_secs(30);

/// Between two words or pieces. A host that waits for its disk or for others says so more often.
const SILENCE: Duration = Duration::from_secs(10);

/// Larger than a piece by what a message has around it.
const MAX_MESSAGE: usize = PIECE + (4 << 10);

/// Why a host gives nothing, or no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// It does not have it, and will not.
    HasNot(String),
    /// It may later.
    Broke(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::HasNot(reason) | Self::Broke(reason)) = self;
        f.write_str(reason)
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let reason = describe_status(&status);
        match status.code() {
            Code::NotFound | Code::InvalidArgument | Code::Unimplemented => Self::HasNot(reason),
            _ => Self::Broke(reason),
        }
    }
}

/// A part on its way.
#[derive(Debug)]
pub(super) struct Coming(Streaming<v1::SlicePiece>);

/// What a host says all bytes of the part are; `told` hears how far it is with finding out.
pub(super) async fn describe(
    source: &Peer,
    identity: &TlsIdentity,
    id: SliceId,
    told: &mut dyn FnMut(SliceWord),
) -> Result<[u8; 32], Failure> {
    let mut words = ask(source, identity, async |mut client: SlicesClient<Channel>| {
        client.describe(v1::SliceRequest::from(id)).await
    })
    .await?;
    loop {
        let Some(word) = next(&mut words).await? else {
            return Err(Failure::Broke("it ended without an answer".to_owned()));
        };
        match SliceWord::check(word).map_err(|error| Failure::Broke(error.to_string()))? {
            SliceWord::Sha256(sha256) => return Ok(sha256),
            word @ SliceWord::Hashing { .. } => told(word),
        }
    }
}

/// Asks for the bytes from an offset on.
pub(super) async fn read(
    source: &Peer,
    identity: &TlsIdentity,
    id: SliceId,
    offset: u64,
) -> Result<Coming, Failure> {
    let request = v1::ReadSliceRequest { slice: Some(id.into()), offset };
    ask(source, identity, async |mut client: SlicesClient<Channel>| client.read(request.clone()).await)
        .await
        .map(Coming)
}

impl Coming {
    /// The next bytes; none at the end, and an empty piece if the host has others to serve first.
    pub(super) async fn next(&mut self) -> Result<Option<bytes::Bytes>, Failure> {
        let piece = next(&mut self.0).await?.map(piece_bytes).transpose();
        piece.map_err(|error| Failure::Broke(error.to_string()))
    }
}

/// Connects to whichever address gives an answer. A host that does not have it may have the address in common with one that
/// does, so each is asked.
async fn ask<T>(
    source: &Peer,
    identity: &TlsIdentity,
    call: impl AsyncFn(SlicesClient<Channel>) -> Result<Response<Streaming<T>>, Status>,
) -> Result<Streaming<T>, Failure> {
    // Whether all that could be reached said that they do not have it.
    let has_not = std::sync::atomic::AtomicBool::new(false);
    let attempt = async |address: &Address| {
        let channel = tls::connect(address, identity).await.map_err(|error| error.to_string())?;
        let client = SlicesClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let answer = tokio::time::timeout(ASK_DEADLINE, call(client)).await;
        let answer = answer.map_err(|_| format!("no answer for {} s", ASK_DEADLINE.as_secs()))?;
        answer.map(Response::into_inner).map_err(|status| {
            let failure = Failure::from(status);
            if matches!(failure, Failure::HasNot(_)) {
                has_not.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            failure.to_string()
        })
    };
    first(&source.addresses, attempt).await.map_err(|reasons| {
        let reason = reasons.join("; ");
        if has_not.into_inner() { Failure::HasNot(reason) } else { Failure::Broke(reason) }
    })
}

async fn next<T>(stream: &mut Streaming<T>) -> Result<Option<T>, Failure> {
    match tokio::time::timeout(SILENCE, stream.message()).await {
        Ok(message) => Ok(message?),
        Err(_) => Err(Failure::Broke(format!("nothing came for {} s", SILENCE.as_secs()))),
    }
}
