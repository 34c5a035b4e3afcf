//! The master's part in taking a sequence over: every stage prepares its share, the other master says that the slot was held
//! all along, every stage commits; or all of them forget it. Nothing of the slot is computed before every stage has committed.
//!
//! A stage that does not answer an abort may still write to its slot, so then the epoch is over: the agent links anew.

use std::sync::Arc;

use cluster::Epoch;
use futures::future::{join_all, try_join_all};
use protocol::certify::LiveIdentity;
use protocol::hand_off::HeldSlot;
use protocol::tls::{TlsIdentity, connect, describe_status};
use protocol::v1;
use protocol::v1::kv_client::KvClient;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::orders::Order;
use super::{BETWEEN_BATCHES, TRANSFER, within};
use crate::engine::{Transfer, TransferEnd};
use crate::events::Control;
use crate::shared::Shared;

/// Transfers at once: each takes as much memory on every stage as its sequence does in the cache. One copies while another
/// travels.
const AT_ONCE: usize = 2;

/// The transfers under way. Dropping it ends them.
pub(crate) struct TakeOvers {
    shared: Arc<Shared>,
    identity: LiveIdentity,
    orders: mpsc::WeakSender<Control>,
    runtime: Handle,
    places: Arc<Semaphore>,
    tasks: JoinSet<()>,
}

impl TakeOvers {
    pub(crate) fn new(
        shared: Arc<Shared>,
        identity: LiveIdentity,
        orders: mpsc::WeakSender<Control>,
        runtime: Handle,
    ) -> Self {
        Self {
            shared,
            identity,
            orders,
            runtime,
            places: Arc::new(Semaphore::new(AT_ONCE)),
            tasks: JoinSet::new(),
        }
    }

    /// Begins a transfer; its end comes as an order.
    pub(crate) fn begin(&mut self, epoch: Epoch, transfer: Transfer) {
        while self.tasks.try_join_next().is_some() {}
        let (key, orders) = (transfer.key, self.orders.clone());
        let job = Job { shared: Arc::clone(&self.shared), identity: self.identity.now(), epoch, transfer };
        let places = Arc::clone(&self.places);
        let task = async move {
            // Never closed.
            let _place = places.acquire().await;
            let end = job.run().await;
            if let Some(orders) = orders.upgrade() {
                // Without an inference thread nobody waits for it.
                let _ = orders.send(Control::HandOff(Order::Transferred { epoch, key, end })).await;
            }
        };
        self.tasks.spawn_on(task, &self.runtime);
    }

    /// Ends all transfers: their epoch is over.
    pub(crate) fn stop(&mut self) {
        self.tasks.abort_all();
    }
}

struct Job {
    shared: Arc<Shared>,
    identity: TlsIdentity,
    epoch: Epoch,
    transfer: Transfer,
}

impl Job {
    async fn run(&self) -> TransferEnd {
        let stages = match self.connect().await {
            Ok(stages) => stages,
            Err(reason) => return TransferEnd::Untouched { reason },
        };
        let bytes = match self.prepare(&stages).await {
            Ok(bytes) => bytes,
            Err(reason) => {
                self.abort(&stages).await;
                return TransferEnd::Untouched { reason };
            }
        };
        match self.commit(&stages).await {
            Ok(()) => TransferEnd::TakenOver { bytes },
            Err(reason) => {
                self.abort(&stages).await;
                TransferEnd::Spoilt { reason }
            }
        }
    }

    async fn connect(&self) -> Result<Vec<KvClient<Channel>>, String> {
        let connecting = self.shared.chain().into_iter().map(|stage| async move {
            let channel = connect(&stage.address, &self.identity).await.map_err(|error| error.to_string())?;
            Ok::<_, String>(KvClient::new(channel))
        });
        let stages = try_join_all(connecting).await?;
        if stages.is_empty() { Err("the stages' addresses are not known".to_owned()) } else { Ok(stages) }
    }

    /// Has every stage fetch its share, and makes sure of what it fetched. Gives the bytes that travelled.
    async fn prepare(&self, stages: &[KvClient<Channel>]) -> Result<u64, String> {
        let Transfer { key, slot, cached, from } = &self.transfer;
        let preparing = stages.iter().enumerate().map(|(stage, client)| {
            let request = v1::PrepareRequest {
                epoch: self.epoch.0,
                transfer: key.0,
                slot: slot.0,
                first_position: *cached,
                from: Some(from.clone().into()),
            };
            let mut client = client.clone();
            async move {
                let reply =
                    async { client.prepare(request).await.map_err(|status| describe_status(&status)) };
                let reply = within(TRANSFER + 2 * BETWEEN_BATCHES, "fetching", reply).await;
                reply
                    .map(|reply| reply.into_inner().bytes)
                    .map_err(|reason| format!("stage {stage}: {reason}"))
            }
        });
        let bytes = try_join_all(preparing).await?.into_iter().sum();
        self.release(from).await?;
        Ok(bytes)
    }

    /// Ends the hold. Only a slot that was held until then has given what it was said to hold.
    async fn release(&self, from: &HeldSlot) -> Result<(), String> {
        let master = from.chain.last().ok_or("the other replica has no stages")?;
        let releasing = async {
            let channel =
                connect(&master.address, &self.identity).await.map_err(|error| error.to_string())?;
            let request = v1::ReleaseRequest { epoch: from.epoch.0, slot: from.slot.0, hold: from.hold };
            let reply = KvClient::new(channel).release(request).await;
            reply.map_err(|status| describe_status(&status))
        };
        let reply = within(BETWEEN_BATCHES, "releasing the held slot", releasing).await?;
        match reply.into_inner().held {
            true => Ok(()),
            false => Err("the slot was no longer held when all was fetched".to_owned()),
        }
    }

    async fn commit(&self, stages: &[KvClient<Channel>]) -> Result<(), String> {
        let committing = stages.iter().enumerate().map(|(stage, client)| {
            let (request, mut client) = (self.request(), client.clone());
            async move {
                let reply = async { client.commit(request).await.map_err(|status| describe_status(&status)) };
                let reply = within(2 * BETWEEN_BATCHES, "committing", reply).await;
                reply.map_err(|reason| format!("stage {stage}: {reason}"))
            }
        });
        // All are waited for, so that an abort comes after every one of them.
        join_all(committing).await.into_iter().try_for_each(|done| done.map(|_| ()))
    }

    /// Makes sure that no stage writes to the slot any more.
    async fn abort(&self, stages: &[KvClient<Channel>]) {
        let aborting = stages.iter().enumerate().map(|(stage, client)| {
            let (request, mut client) = (self.request(), client.clone());
            async move {
                let reply = async { client.abort(request).await.map_err(|status| describe_status(&status)) };
                if let Err(reason) = within(2 * BETWEEN_BATCHES, "aborting", reply).await {
                    let broken = || format!("stage {stage} does not give a hand-off up: {reason}");
                    self.shared.report_break(self.epoch, broken);
                }
            }
        });
        join_all(aborting).await;
    }

    fn request(&self) -> v1::TransferRequest {
        let Transfer { key, slot, .. } = &self.transfer;
        v1::TransferRequest { epoch: self.epoch.0, transfer: key.0, slot: slot.0 }
    }
}
