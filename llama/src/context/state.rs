//! A slot's keys and values in and out of a context, in llama.cpp's form (`llama_state_seq_get_data`), which `kv_blob` reads
//! and re-cuts.

use kv_blob::{Blob, CacheCount, CacheKind, CellForm, Form, Place, Prepared, ValueForm};
use llama_sys as sys;

use crate::backend::with_errors;
use crate::shim;
use crate::{Error, KvLayout};

use super::{SliceContext, remove, seq_id};

impl SliceContext {
    /// The form of this context's blobs.
    ///
    /// # Errors
    /// When its state is not one of keys and values by position: recurrent models, and caches beside keys and values.
    pub fn kv_form(&self) -> Result<Form, Error> {
        let refuse = |reason: String| Error::Unsupported { reason };
        if self.model.is_recurrent() {
            return Err(refuse(
                "it keeps a recurrent state, which is not cut by position and layer".to_owned(),
            ));
        }
        let mut form = sys::shoal_kv_form { windowed: false, extended: false, values: false };
        let mut windows = vec![0; self.model.n_layer() as usize];
        // SAFETY: the context lives and computes nothing; `windows` has room for all layers (shim/kv.cpp).
        shim::call(|error| unsafe {
            let (windows, layers) = (windows.as_mut_ptr(), self.model.n_layer());
            sys::shoal_context_kv_form(self.handle.as_ptr(), &raw mut form, windows, layers, error)
        })
        .map_err(|error| refuse(error.message))?;
        let kind = |window: &u8| if *window == 0 { CacheKind::Full } else { CacheKind::Window };
        Ok(Form {
            layers: windows.iter().map(kind).collect(),
            caches: if form.windowed { CacheCount::Two } else { CacheCount::One },
            cells: if form.extended { CellForm::Extended } else { CellForm::Plain },
            values: if form.values { ValueForm::Present } else { ValueForm::Absent },
        })
    }

    /// What a blob is written for, to be imported into `slot`.
    pub const fn place(&self, slot: u32) -> Place {
        let streams = match self.params.layout {
            KvLayout::PerSlot => self.params.n_slots,
            KvLayout::Unified => 1,
        };
        Place { slot, streams }
    }

    /// A copy of the slot's keys and values.
    ///
    /// # Errors
    /// When there is no such slot, when [`kv_form`](Self::kv_form) has none, and when llama.cpp fails.
    pub fn export_slot(&mut self, slot: u32) -> Result<Blob, Error> {
        self.check_slot(slot)?;
        let form = self.kv_form()?;
        let (context, sequence) = (self.handle.as_ptr(), seq_id(slot));
        let ((bytes, written), reason) = with_errors(|| {
            // SAFETY: the slot exists. Both catch exceptions and return 0 (llama-context.cpp, `state_seq_get_size`,
            // `state_seq_get_data`); the second writes no more than the buffer's size, and has written all when it returns.
            unsafe {
                let mut bytes = vec![0_u8; sys::llama_state_seq_get_size(context, sequence)];
                let written =
                    sys::llama_state_seq_get_data(context, bytes.as_mut_ptr(), bytes.len(), sequence);
                (bytes, written)
            }
        });
        if bytes.is_empty() || written != bytes.len() {
            return Err(Error::Export { slot, written, bytes: bytes.len(), reason });
        }
        Ok(Blob::read(bytes.into(), &form)?)
    }

    /// Replaces the slot's sequence. On an error of the blob nothing has changed; on any other error the slot is empty.
    ///
    /// # Errors
    /// When the blob was prepared for another [place](Self::place), is longer than a slot, or is not of these layers.
    pub fn import_slot(&mut self, slot: u32, blob: &Prepared) -> Result<(), Error> {
        self.check_slot(slot)?;
        if blob.place() != self.place(slot) {
            let Place { slot: meant, streams } = blob.place();
            return Err(Error::Misplaced { meant, streams, slot, own_streams: self.place(slot).streams });
        }
        let (tokens, n_ctx) = (blob.tokens(), self.params.n_ctx_per_slot);
        if tokens > n_ctx {
            return Err(Error::Parameter {
                parameter: "tokens of the blob",
                value: u64::from(tokens),
                allowed: format!("at most {n_ctx}"),
            });
        }
        let (context, bytes) = (self.handle.as_ptr(), blob.bytes());
        let (read, reason) = with_errors(|| {
            // SAFETY: the slot exists, and the bytes live during the call, which copies them. It reads no further than their
            // end, catches exceptions and returns 0 then (llama-context.cpp, `state_seq_set_data`). What it asserts is that
            // positions are not negative and differ, which a `Prepared`'s do (llama-kv-cells.h).
            unsafe { sys::llama_state_seq_set_data(context, bytes.as_ptr(), bytes.len(), seq_id(slot)) }
        });
        if read == bytes.len() && self.next_position(slot) == tokens {
            return Ok(());
        }
        remove(self.memory, slot, 0);
        Err(Error::Import { slot, read, bytes: bytes.len(), reason })
    }
}
