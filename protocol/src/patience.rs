//! How long this process bears with peers that say nothing: one number for all its connections, set when it starts.

use std::sync::OnceLock;
use std::time::Duration;

/// Where nobody says otherwise: a busy host answers within a second, and nobody waits long for the replacement of a frozen one.
pub const DEFAULT_PEER_TIMEOUT: Duration = Duration::from_secs(3);

/// The shortest that leaves time to answer between two signs of life.
pub const MIN_PEER_TIMEOUT: Duration = Duration::from_secs(2);

static PEER_TIMEOUT: OnceLock<Duration> = OnceLock::new();

/// Sets it, to [`MIN_PEER_TIMEOUT`] at least; before the process connects to anybody, and once.
pub fn set_peer_timeout(timeout: Duration) {
    // Whoever came first has the say: who is connected goes by that.
    let _ = PEER_TIMEOUT.set(timeout.max(MIN_PEER_TIMEOUT));
}

/// A peer that gives no sign of life for so long is lost, and a connection that takes so long is given up.
pub fn peer_timeout() -> Duration {
    *PEER_TIMEOUT.get_or_init(|| DEFAULT_PEER_TIMEOUT)
}
