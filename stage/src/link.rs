//! The way out: one connection and one stream to the next stage, for one epoch. When it ends, for whatever reason, the
//! epoch's chain is broken; it is never mended within an epoch, since frames may have been lost with it.

use std::cmp::Ordering;
use std::time::Duration;

use cluster::Epoch;
use protocol::tls::{TlsIdentity, connect, describe_status};
use protocol::v1;
use protocol::v1::stage_client::StageClient;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;
use tonic::transport::Channel;

/// Metadata key under which a Forward call names its epoch.
pub(crate) const EPOCH_KEY: &str = "shoal-epoch";

/// How long the next stage may take to listen and to join the epoch. The master's link waits until the agent has
/// linked all other stages; each of them answers within a batch.
const DEADLINE: Duration = Duration::from_secs(30);

/// Pause between attempts: far below what a user notices, far above what an attempt costs.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Where a link leads.
#[derive(Debug)]
pub(crate) struct Target {
    /// `host:port`.
    pub(crate) next: String,
    pub(crate) epoch: Epoch,
    pub(crate) identity: TlsIdentity,
}

/// Why an attempt failed.
enum Failed {
    /// It may succeed later.
    Retry(String),
    /// It will not.
    Final(String),
}

/// Runs a link to its end and says why it ended. `up` is told once the next stage takes frames.
pub(crate) async fn run(
    target: Target,
    frames: mpsc::Receiver<v1::Frame>,
    up: oneshot::Sender<()>,
) -> String {
    let mut client = match establish(&target).await {
        Ok(client) => client,
        Err(reason) => return reason,
    };
    let mut request = Request::new(ReceiverStream::new(frames));
    request.metadata_mut().insert(EPOCH_KEY, target.epoch.0.into());
    let mut replies = match client.forward(request).await {
        Ok(response) => response.into_inner(),
        Err(status) => return describe_status(&status),
    };
    // Whoever waited for it may have given up; the link serves all the same.
    let _ = up.send(());
    loop {
        match replies.message().await {
            Ok(Some(v1::ForwardReply {})) => {}
            Ok(None) => return "the next stage ended it".to_owned(),
            Err(status) => return describe_status(&status),
        }
    }
}

/// Connects, and waits until the next stage is in the epoch.
async fn establish(target: &Target) -> Result<StageClient<Channel>, String> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let reason = match attempt(target).await {
            Ok(client) => return Ok(client),
            Err(Failed::Final(reason)) => return Err(reason),
            Err(Failed::Retry(reason)) => reason,
        };
        if Instant::now() + RETRY_PAUSE > deadline {
            return Err(format!("not up within {} s: {reason}", DEADLINE.as_secs()));
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

async fn attempt(target: &Target) -> Result<StageClient<Channel>, Failed> {
    let retry = |error: &dyn std::fmt::Display| Failed::Retry(error.to_string());
    let channel = connect(&target.next, &target.identity).await.map_err(|error| retry(&error))?;
    let mut client = StageClient::new(channel);
    let status =
        client.status(v1::StatusRequest {}).await.map_err(|status| retry(&describe_status(&status)))?;
    let v1::StatusReply { epoch, failure, .. } = status.into_inner();
    if !failure.is_empty() {
        return Err(Failed::Final(format!("the next stage failed to load: {failure}")));
    }
    match Epoch(epoch).cmp(&target.epoch) {
        Ordering::Equal => Ok(client),
        Ordering::Less => {
            Err(retry(&format_args!("the next stage is in epoch {epoch}, not yet in {}", target.epoch)))
        }
        Ordering::Greater => Err(Failed::Final(format!("the next stage has moved on to epoch {epoch}"))),
    }
}
