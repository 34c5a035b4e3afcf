//! A request that waits for its first slot, or another one, and what ends its patience.

use tokio::time::Instant;

use crate::app::App;
use crate::desk::Place;
use crate::dispatch::Seat;
use crate::openai::ApiError;

/// A request in the queue.
pub(super) struct Waiting {
    pub(super) seat: Seat,
    /// It came, or came back, to the queue.
    pub(super) since: Instant,
    /// There was first no replica for it, or one was lost.
    pub(super) stranded: Option<Instant>,
    /// Why it lost its last replica.
    pub(super) lost: Option<String>,
}

impl Waiting {
    /// From now on.
    pub(super) fn new(seat: Seat) -> Self {
        Self { seat, since: Instant::now(), stranded: None, lost: None }
    }

    /// Waits for a slot, and gives the replica's number.
    pub(super) async fn slot(&mut self, app: &App) -> Result<usize, ApiError> {
        loop {
            let place = self.seat.place();
            let (deadline, is_stranded) = match place {
                Place::Seated { replica }
                | Place::Prefilled { replica, .. }
                | Place::Moving { from: replica, .. } => return Ok(replica),
                Place::Parked => {
                    let since = *self.stranded.get_or_insert_with(Instant::now);
                    (since + app.limits.replay_timeout, true)
                }
                Place::Waiting { .. } => {
                    // Some replica serves: it is no longer stranded, only late.
                    self.stranded = None;
                    (self.since + app.limits.queue_timeout, false)
                }
            };
            tracing::debug!(?place, "queued");
            tokio::select! {
                biased;
                () = self.seat.moved() => {}
                () = tokio::time::sleep_until(deadline) => {
                    return Err(if is_stranded { self.given_up(app) } else { too_late(app) });
                }
            }
        }
    }

    /// There was no replica for too long.
    fn given_up(&self, app: &App) -> ApiError {
        match (&self.lost, app.fleet.readiness()) {
            (Some(reason), _) => ApiError::ReplicaLost { reason: reason.clone() },
            (None, Err(error)) => error,
            (None, Ok(())) => ApiError::NotReady { reason: "no replica could take the request".into() },
        }
    }
}

pub(super) fn too_late(app: &App) -> ApiError {
    ApiError::QueueTimeout { seconds: app.limits.queue_timeout.as_secs() }
}
