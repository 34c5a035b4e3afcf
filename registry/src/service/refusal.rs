//! How callers are refused: with a reason, told once, and held back when they come too often.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use protocol::throttle::Throttle;
use protocol::tls::root_cause;
use tonic::{Request, Status};

use crate::attempts::Attempts;
use crate::error::RegistryError;
use crate::event::EventKind;
use crate::registry::Registry;

/// Refused attempts of one host, in [`PERIOD`]: somebody who pastes the wrong token a few times is not held back.
const MOST_REFUSALS: u32 = 10;

/// Calls of one host without a token in [`PERIOD`]: one that waits asks every two seconds, and several may share an address.
const MOST_CALLS: u32 = 60;

/// For which attempts are counted.
const PERIOD: Duration = Duration::from_secs(10);

/// Log lines about hosts that are held back.
const LOG_PERIOD: Duration = Duration::from_secs(1);

/// Who is refused, and how often.
#[derive(Debug)]
pub(super) struct Refusals {
    registry: Registry,
    refused: Attempts,
    calls: Attempts,
    held_back: Throttle,
}

/// Who called, as far as the connection tells.
pub(super) fn caller<T>(request: &Request<T>) -> SocketAddr {
    // There is always one behind TCP.
    request.remote_addr().unwrap_or_else(|| (Ipv4Addr::UNSPECIFIED, 0).into())
}

impl Refusals {
    pub(super) fn new(registry: Registry) -> Self {
        Self {
            registry,
            refused: Attempts::new(MOST_REFUSALS, PERIOD),
            calls: Attempts::new(MOST_CALLS, PERIOD),
            held_back: Throttle::new(LOG_PERIOD),
        }
    }

    /// Whether a host may try.
    pub(super) fn may_try(&self, host: IpAddr) -> Result<(), Status> {
        let now = Instant::now();
        self.calls.count(host, now);
        let wait = self.refused.wait(host, now).or_else(|| self.calls.wait(host, now));
        let Some(wait) = wait else { return Ok(()) };
        if let Some(held) = self.held_back.pass(now) {
            tracing::warn!(%host, held, "a host tries to join too often and is held back");
        }
        let seconds = wait.as_secs() + 1;
        Err(Status::resource_exhausted(format!("too many attempts from {host}: wait for {seconds} s")))
    }

    /// Refuses an attempt, and tells of it: in the log, and as an event.
    pub(super) async fn refuse(&self, caller: SocketAddr, who: &str, status: Status) -> Status {
        self.refused.count(caller.ip(), Instant::now());
        let text = format!("{who} at {} was refused: {}", caller.ip(), status.message());
        tracing::warn!(host = %caller.ip(), who, reason = status.message(), "a host was refused");
        let told =
            self.registry.run(move |registry| registry.store().tell(EventKind::JoinRefused, None, &text));
        if let Err(error) = told.await {
            tracing::error!(%error, "the refusal could not be noted");
        }
        status
    }
}

/// What the caller learns of a fault of this side: that there is one. The log says which.
pub(super) fn internal(error: &RegistryError) -> Status {
    tracing::error!(error = %root_cause(error), "the registry failed: {error}");
    Status::internal("the orchestrator's registry failed; its log says how")
}
