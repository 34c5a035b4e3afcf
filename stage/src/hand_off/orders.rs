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
    /// To the master: end a hold.
    Release { epoch: Epoch, slot: SlotId, hold: RequestKey, reply: oneshot::Sender<bool> },
    /// To the master: a transfer that it began has ended.
    Transferred { epoch: Epoch, key: RequestKey, end: TransferEnd },
}

/// What orders are about.
pub(crate) struct Parties<'a> {
    pub(crate) epoch: Epoch,
    /// The epoch's chain is broken: its sequences are lost.
    pub(crate) is_broken: bool,
    pub(crate) chain: &'a mut dyn Chain,
    pub(crate) master: Option<&'a mut Master>,
}

impl Parties<'_> {
    /// Obeys. Whoever does not wait for an answer any more gets none.
    pub(crate) fn obey(&mut self, order: Order) {
        match order {
            Order::Export { epoch, slot, reply } => {
                let blob = self
                    .check(epoch)
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
            Order::Release { epoch, slot, hold, reply } => {
                let is_current = self.check(epoch).is_ok();
                let master = self.master.as_deref_mut().filter(|_| is_current);
                let _ = reply.send(master.is_some_and(|master| master.release_held(slot, hold)));
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
    fn check(&self, epoch: Epoch) -> Result<(), String> {
        if epoch != self.epoch || self.is_broken {
            let state = if self.is_broken { ", which is broken" } else { "" };
            return Err(format!("this is about {epoch}, but the stage is in {}{state}", self.epoch));
        }
        Ok(())
    }
}
