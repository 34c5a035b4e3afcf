//! What is asked of the inference thread, which alone touches caches: it does each of these between two batches.

use cluster::{Epoch, SlotId};
use llama::kv_blob::{Blob, Prepared};
use tokio::sync::oneshot;

use crate::chain::Chain;
use crate::engine::{RequestKey, TransferEnd};
use crate::master::Master;

/// An order, and whom to tell.
#[derive(Debug)]
pub(crate) enum Order {
    /// Copy a slot's sequence out.
    Export { epoch: Epoch, slot: SlotId, reply: oneshot::Sender<Result<Blob, String>> },
    /// Replace a slot's sequence: a blob for each slice.
    Import { epoch: Epoch, slot: SlotId, blobs: Vec<Prepared>, reply: oneshot::Sender<Result<(), String>> },
    /// Say that all earlier orders are done.
    Fence { reply: oneshot::Sender<()> },
    /// To the master: a hold was released.
    Released { epoch: Epoch, slot: SlotId, hold: RequestKey },
    /// To the master: a transfer that it began has ended.
    Transferred { epoch: Epoch, key: RequestKey, end: TransferEnd },
}

/// What orders are about.
pub(crate) struct Parties<'a> {
    pub(crate) epoch: Epoch,
    /// The epoch's chain is broken: nothing goes on in it.
    pub(crate) is_broken: bool,
    pub(crate) chain: &'a mut dyn Chain,
    pub(crate) master: Option<&'a mut Master>,
}

impl Parties<'_> {
    /// Obeys. Whoever does not wait for an answer any more gets none.
    pub(crate) fn obey(&mut self, order: Order) {
        match order {
            Order::Export { epoch, slot, reply } => {
                // Also of a broken chain: its slots are as they were, and the hold, which ends with it, is asked for at the end. So
                // whoever fetches hears of the stage that failed, and not of those that know it already.
                let blob = self
                    .check_epoch(epoch)
                    .and_then(|()| self.chain.export(slot).map_err(|error| error.to_string()));
                let _ = reply.send(blob);
            }
            Order::Import { epoch, slot, blobs, reply } => {
                let done = self
                    .check(epoch)
                    .and_then(|()| self.chain.import(slot, &blobs).map_err(|error| error.to_string()));
                let _ = reply.send(done);
            }
            Order::Fence { reply } => {
                let _ = reply.send(());
            }
            Order::Released { epoch, slot, hold } => {
                let is_current = self.check(epoch).is_ok();
                if let Some(master) = self.master.as_deref_mut().filter(|_| is_current) {
                    master.release_held(slot, hold);
                }
            }
            Order::Transferred { epoch, key, end } => {
                if epoch == self.epoch
                    && let Some(master) = &mut self.master
                {
                    master.transferred(key, end);
                }
            }
        }
    }

    /// Orders of other epochs are about sequences that are no more.
    fn check_epoch(&self, epoch: Epoch) -> Result<(), String> {
        if epoch == self.epoch {
            return Ok(());
        }
        Err(format!("this is about {epoch}, but the stage is in {}", self.epoch))
    }

    fn check(&self, epoch: Epoch) -> Result<(), String> {
        self.check_epoch(epoch)?;
        if self.is_broken { Err(format!("the stage's chain is broken in {epoch}")) } else { Ok(()) }
    }
}
