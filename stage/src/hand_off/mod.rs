//! Slots' sequences that change hands between replicas (docs/adr/0009-kv-hand-off.md).
//!
//! On the replica that hands off, `service` gives out keys and values of held slots. On the one that takes over, the master's
//! `take_over` has every stage fetch its own part (`pull`) and keep it beside its cache; once all have, and the other master
//! says that the slot was held all along (`holds`), each puts its part into its slot. `orders` is what all of them ask of the inference
//! thread, between two batches: to copy one slot's sequence in, or out if there is no copy yet (`copies`).

mod copies;
mod facts;
mod holds;
mod orders;
mod pull;
mod service;
mod take_over;

pub(crate) use copies::Copies;
pub(crate) use facts::{KvFacts, SliceForm};
pub(crate) use holds::Holds;
pub(crate) use orders::{Order, Parties};
pub(crate) use service::KvService;
pub(crate) use take_over::TakeOvers;

use std::time::Duration;

/// How long all keys and values of a slot may take to come: half a gigabyte over 100 Mbit/s.
const TRANSFER: Duration = Duration::from_secs(45);

/// How long a stage may take to look at an order between two batches, and to copy a slot's sequence.
const BETWEEN_BATCHES: Duration = Duration::from_secs(30);

/// Waits no longer than that, and says what it waited for.
async fn within<T>(
    limit: Duration,
    what: &str,
    future: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let late = || Err(format!("{what}: no answer for {} s", limit.as_secs_f64()));
    tokio::time::timeout(limit, future).await.unwrap_or_else(|_| late())
}
