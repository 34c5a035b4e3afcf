//! Runs a slice (or a whole model) on rows of several slots, and keeps the slots' KV caches.
//!
//! Rows go in as numbers, so a model's first slice is fed like any other; only whole models take tokens. Knows nothing
//! of requests, frames or other slices.

mod arrays;
mod params;
mod state;
mod tap;

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

use llama_sys as sys;

use crate::backend::with_errors;
use crate::batch::{Limits, Plan, Rows};
use crate::memory::MemoryBreakdown;
use crate::shim;
use crate::threads::ThreadPool;
use crate::{Error, Model};

use arrays::{BatchArrays, Marks};
use tap::Tap;

pub use params::{ContextParams, FlashAttention, KvLayout, KvType, Numerics, Output};

/// A model's state for a number of slots. Can move between threads, but is used by one at a time.
pub struct SliceContext {
    handle: NonNull<sys::llama_context>,
    memory: sys::llama_memory_t,
    params: ContextParams,
    limits: Limits,
    /// Boxed because llama.cpp holds a pointer to it, and raw because llama.cpp writes through that pointer during
    /// calls. `None` where llama.cpp's own input and output do.
    tap: Option<NonNull<Tap>>,
    plan: Plan,
    arrays: BatchArrays,
    results: Results,
    // Fields drop after `Drop::drop` has freed the context that uses them.
    _pools: Vec<ThreadPool>,
    model: Model,
}

/// What the last run gave.
#[derive(Debug, Default)]
struct Results {
    /// Hidden rows in the order they were given, if that is not the order they were computed in.
    rearranged: Option<Vec<f32>>,
    spare: Vec<f32>,
    n_vocab: usize,
    /// For each given row, where its logits are.
    logits: Vec<Option<LogitsAt>>,
    /// `[outputs, n_vocab]`, of a run that took several calls.
    copied: Vec<f32>,
}

/// Where a row's logits are.
#[derive(Debug, Clone, Copy)]
enum LogitsAt {
    /// In llama.cpp's own buffer, which the next call overwrites.
    InPlace(NonNull<f32>),
    /// A row of the copies.
    Copied(usize),
}

// SAFETY: a llama_context has no thread of its own and no thread-local state; its backends bind themselves to the
// calling thread at every call (ggml-cuda.cu, `ggml_cuda_set_device`; ggml-metal-context.m uses autorelease pools per call).
// The raw pointers belong to this struct alone.
unsafe impl Send for SliceContext {}

impl fmt::Debug for SliceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SliceContext")
            .field("model", &self.model)
            .field("params", &self.params)
            .finish_non_exhaustive()
    }
}

impl Drop for SliceContext {
    fn drop(&mut self) {
        // SAFETY: nothing uses the context any more; freeing it waits for its work (llama-context.cpp, `~llama_context`).
        unsafe { sys::llama_free(self.handle.as_ptr()) };
        if let Some(tap) = self.tap {
            // SAFETY: comes from `Box::leak`, and its only other user, the context, is gone.
            drop(unsafe { Box::from_raw(tap.as_ptr()) });
        }
    }
}

impl SliceContext {
    /// Reserves caches and compute buffers for `model`.
    pub fn new(model: &Model, params: &ContextParams) -> Result<Self, Error> {
        params.check()?;
        check_model(model)?;
        let n_embd = model.n_embd() as usize;
        let mut c_params = params.to_c(model);
        let tap = Tap::for_context(model, params.output).map(|tap| NonNull::from(Box::leak(Box::new(tap))));
        if let Some(tap) = tap {
            c_params.cb_eval = Some(tap::on_node);
            c_params.cb_eval_user_data = tap.as_ptr().cast::<c_void>();
        }
        // SAFETY: the model lives, and lives on in `self`; the tap outlives the context (see `drop`). Exceptions are
        // caught inside (llama-context.cpp, `llama_init_from_model`), and what it asserts was checked above.
        let (handle, reason) =
            with_errors(|| unsafe { sys::llama_init_from_model(model.as_ptr(), c_params) });
        let Some(handle) = NonNull::new(handle) else {
            if let Some(tap) = tap {
                // SAFETY: comes from `Box::leak` above, and llama.cpp has given up the context that knew it.
                drop(unsafe { Box::from_raw(tap.as_ptr()) });
            }
            let (n_slots, n_ctx_per_slot) = (params.n_slots, params.n_ctx_per_slot);
            return Err(Error::Context { n_slots, n_ctx_per_slot, reason });
        };
        // SAFETY: the context lives; both only read it (llama-context.cpp).
        let (memory, n_ubatch) =
            unsafe { (sys::llama_get_memory(handle.as_ptr()), sys::llama_n_ubatch(handle.as_ptr())) };
        let limits = Limits {
            n_embd,
            n_vocab: model.vocab().n_tokens() as usize,
            n_slots: params.n_slots,
            n_ctx_per_slot: params.n_ctx_per_slot,
            n_batch: params.n_batch,
            n_ubatch,
            max_outputs: (params.output == Output::Logits).then_some(params.max_outputs),
        };
        let mut context = Self {
            handle,
            memory,
            params: params.clone(),
            limits,
            tap,
            plan: Plan::default(),
            arrays: BatchArrays::new(n_embd, model.positions_per_row()),
            results: Results { n_vocab: model.vocab().n_tokens() as usize, ..Results::default() },
            _pools: Vec::new(),
            model: model.clone(),
        };
        if memory.is_null() {
            return Err(Error::Unsupported {
                reason: "it keeps no sequences, so it cannot generate".to_owned(),
            });
        }
        context.attach_threads()?;
        context.choose_kernels()?;
        Ok(context)
    }

    fn choose_kernels(&mut self) -> Result<(), Error> {
        if self.params.numerics == Numerics::Fast {
            return Ok(());
        }
        // SAFETY: the context lives and computes nothing (shim/core.cpp).
        shim::call(|error| unsafe { sys::shoal_use_reference_kernels(self.handle.as_ptr(), error) })
            .map_err(Error::exception("choosing kernels"))
    }

    fn attach_threads(&mut self) -> Result<(), Error> {
        let (one, many) = (self.params.threads, self.params.threads_batch);
        let mut pools = vec![ThreadPool::new(one)?];
        if many != one {
            pools.push(ThreadPool::new(many)?);
        }
        let (for_one, for_many) = (pools[0].as_ptr(), pools[pools.len() - 1].as_ptr());
        // SAFETY: the pools are dropped after the context, and have as many threads as the context was told
        // (llama-context.cpp, `attach_threadpool`, `graph_compute`).
        unsafe { sys::llama_attach_threadpool(self.handle.as_ptr(), for_one, for_many) };
        self._pools = pools;
        Ok(())
    }

    /// The model it runs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How it was set up.
    pub fn params(&self) -> &ContextParams {
        &self.params
    }

    /// Computes `rows` and appends them to their slots. [`hidden`](Self::hidden) and [`logits`](Self::logits) then give
    /// the results.
    ///
    /// On an error of the rows nothing has changed. On any other error the slots of `rows` are cut back to what they
    /// were, or, where that is not possible (recurrent models), emptied: see [`next_position`](Self::next_position).
    pub fn run(&mut self, rows: &Rows<'_>) -> Result<(), Error> {
        self.forget_results(rows.slots.len());
        let memory = self.memory;
        self.plan.prepare(rows, &self.limits, |slot| next_position(memory, slot))?;
        for call in 0..self.plan.calls().len() {
            if let Err(error) = self.decode(rows, call) {
                self.forget_results(0);
                self.roll_back();
                return Err(error);
            }
        }
        self.arrange_hidden();
        Ok(())
    }

    /// Hidden rows of the last run, `[n, n_embd]` in the order the rows were given; empty for [`Output::Logits`].
    pub fn hidden(&self) -> &[f32] {
        match (&self.results.rearranged, self.tap) {
            (Some(rows), _) => rows,
            // SAFETY: llama.cpp writes to the tap only inside of `run`, which needs `&mut self`.
            (None, Some(tap)) => unsafe { tap.as_ref() }.rows(),
            (None, None) => &[],
        }
    }

    /// Logits of the given row of the last run, `[n_vocab]`, if it wanted them.
    pub fn logits(&self, row: usize) -> Option<&[f32]> {
        let n_vocab = self.results.n_vocab;
        match (*self.results.logits.get(row)?)? {
            // SAFETY: `n_vocab` numbers that llama.cpp leaves alone until the next call (llama-context.cpp,
            // `get_logits_ith`), which needs `&mut self` and forgets the pointer first.
            LogitsAt::InPlace(start) => Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), n_vocab) }),
            LogitsAt::Copied(index) => self.results.copied.get(index * n_vocab..(index + 1) * n_vocab),
        }
    }

    /// Position at which `slot` continues: the number of tokens it holds. 0 for a slot that does not exist.
    pub fn next_position(&self, slot: u32) -> u32 {
        if slot < self.params.n_slots { next_position(self.memory, slot) } else { 0 }
    }

    /// Cuts `slot` back to the positions before `from`. False, and nothing changed, if the state at `from` is not kept
    /// any more: in recurrent models, and beyond the window of sliding-window layers. `from` 0 always works.
    pub fn remove_from(&mut self, slot: u32, from: u32) -> Result<bool, Error> {
        self.check_slot(slot)?;
        if from >= self.next_position(slot) {
            return Ok(true);
        }
        if from > 0 && !self.window_is_kept(slot, from) {
            return Ok(false);
        }
        Ok(remove(self.memory, slot, from))
    }

    /// Makes slot `to` a copy of slot `from`.
    pub fn copy(&mut self, from: u32, to: u32) -> Result<(), Error> {
        self.check_slot(from)?;
        self.check_slot(to)?;
        if from == to {
            return Ok(());
        }
        remove(self.memory, to, 0);
        // SAFETY: both slots exist, and the whole sequence is copied, which is all that caches per slot allow
        // (llama-kv-cache.cpp, `seq_cp`).
        unsafe { sys::llama_memory_seq_cp(self.memory, seq_id(from), seq_id(to), -1, -1) };
        Ok(())
    }

    /// Empties all slots but one.
    pub fn keep_only(&mut self, slot: u32) -> Result<(), Error> {
        self.check_slot(slot)?;
        // Not `llama_memory_seq_keep`: with a cache per slot it leaves the other slots alone (llama-kv-cache.cpp).
        for other in (0..self.params.n_slots).filter(|other| *other != slot) {
            remove(self.memory, other, 0);
        }
        Ok(())
    }

    /// Empties all slots.
    pub fn clear(&mut self) {
        // SAFETY: the memory lives as long as the context. The data is left as it is: empty cells are masked, and
        // recurrent states are zeroed when a sequence begins (llama-kv-cache.cpp, llama-memory-recurrent.cpp).
        unsafe { sys::llama_memory_clear(self.memory, false) };
    }

    /// Memory of the model and of this context.
    pub fn memory(&self) -> Result<MemoryBreakdown, Error> {
        // SAFETY: the context lives, and `run` needs `&mut self`.
        unsafe { MemoryBreakdown::of(self.handle.as_ptr()) }
    }

    fn decode(&mut self, rows: &Rows<'_>, call: usize) -> Result<(), Error> {
        let range = self.plan.calls()[call].clone();
        let order = &self.plan.order()[range.clone()];
        let marks = match self.params.output {
            Output::Hidden => Marks::All,
            Output::Logits => Marks::AsGiven,
        };
        let batch = self.arrays.fill(rows, order, marks);
        if let Some(mut tap) = self.tap {
            // SAFETY: llama.cpp is not computing, so nothing else touches the tap.
            unsafe { tap.as_mut() }.begin(rows, order);
        }
        let mut code = 0;
        let (result, reason) = with_errors(|| {
            // SAFETY: every array of the batch has `n_tokens` entries and lives during the call; slots and positions
            // are checked, and the call has no more rows than llama.cpp asserts (llama-context.cpp, `decode`).
            shim::call(|error| unsafe {
                sys::shoal_decode(self.handle.as_ptr(), batch, &raw mut code, error)
            })
        });
        result.map_err(Error::exception("decoding"))?;
        match code {
            0 => {}
            // llama.h, `llama_decode`: could not find a KV slot for the batch.
            1 => return Err(Error::CacheFull { rows: order.len() }),
            _ => return Err(Error::Decode { rows: order.len(), code, reason }),
        }
        if let Some(mut tap) = self.tap {
            // SAFETY: as above.
            unsafe { tap.as_mut() }.check(range.end)?;
        }
        match self.params.output {
            Output::Hidden => Ok(()),
            Output::Logits => {
                let order = &self.plan.order()[range];
                self.results.find_logits(self.handle, rows, order)?;
                if self.plan.calls().len() > 1 {
                    self.results.copy_logits(order);
                }
                Ok(())
            }
        }
    }

    fn forget_results(&mut self, rows: usize) {
        if let Some(mut tap) = self.tap {
            // SAFETY: llama.cpp is not computing, so nothing else touches the tap.
            unsafe { tap.as_mut() }.clear();
        }
        self.results.forget(rows);
    }

    fn arrange_hidden(&mut self) {
        let rearranges = self.params.output == Output::Hidden && !self.plan.in_given_order();
        let Some(tap) = self.tap.filter(|_| rearranges) else { return };
        // SAFETY: llama.cpp is not computing, so nothing else touches the tap.
        let computed = unsafe { tap.as_ref() }.rows();
        let width = self.limits.n_embd;
        let mut rows = std::mem::take(&mut self.results.spare);
        rows.resize(computed.len(), 0.0);
        for (row, place) in self.plan.order().iter().zip(computed.chunks_exact(width)) {
            rows[row * width..(row + 1) * width].copy_from_slice(place);
        }
        self.results.rearranged = Some(rows);
    }

    /// Takes what a failed run has added out of its slots again.
    fn roll_back(&mut self) {
        for run in self.plan.runs() {
            if next_position(self.memory, run.slot) <= run.first_position {
                continue;
            }
            if !remove(self.memory, run.slot, run.first_position) {
                remove(self.memory, run.slot, 0);
            }
        }
    }

    fn check_slot(&self, slot: u32) -> Result<(), Error> {
        let n_slots = self.params.n_slots;
        if slot < n_slots { Ok(()) } else { Err(Error::Slot { slot, n_slots }) }
    }

    /// Whether sliding-window layers still have what a row at `from` looks back on. The oldest cell can be missing
    /// while the newest is there (llama-kv-cache-iswa.cpp, `seq_pos_min`); llama-server asks the same question.
    fn window_is_kept(&self, slot: u32, from: u32) -> bool {
        let window = self.model.sliding_window();
        // SAFETY: the slot exists (llama-context.cpp, `llama_memory_seq_pos_min`).
        let oldest = unsafe { sys::llama_memory_seq_pos_min(self.memory, seq_id(slot)) };
        window == 0 || i64::from(oldest) <= i64::from(from.saturating_sub(window))
    }
}

impl Results {
    fn forget(&mut self, rows: usize) {
        if let Some(rows) = self.rearranged.take() {
            self.spare = rows;
        }
        self.copied.clear();
        self.logits.clear();
        self.logits.resize(rows, None);
    }

    /// Notes where the logits of a call's rows are.
    fn find_logits(
        &mut self,
        context: NonNull<sys::llama_context>,
        rows: &Rows<'_>,
        order: &[usize],
    ) -> Result<(), Error> {
        for (index, row) in (0..).zip(order).filter(|(_, row)| rows.outputs[**row]) {
            // SAFETY: the context lives; null for a row without logits (llama-context.cpp, `get_logits_ith`).
            let start = NonNull::new(unsafe { sys::llama_get_logits_ith(context.as_ptr(), index) });
            self.logits[*row] = Some(LogitsAt::InPlace(start.ok_or(Error::NoLogits { row: *row })?));
        }
        Ok(())
    }

    /// Copies a call's logits out of llama.cpp's buffer before the next call overwrites them.
    fn copy_logits(&mut self, order: &[usize]) {
        for row in order {
            if let Some(LogitsAt::InPlace(start)) = self.logits[*row] {
                // SAFETY: `n_vocab` numbers of the call that has just ended, see `SliceContext::logits`.
                let logits = unsafe { std::slice::from_raw_parts(start.as_ptr(), self.n_vocab) };
                self.logits[*row] = Some(LogitsAt::Copied(self.copied.len() / self.n_vocab));
                self.copied.extend_from_slice(logits);
            }
        }
    }
}

fn check_model(model: &Model) -> Result<(), Error> {
    let refuse = |reason: String| Err(Error::Unsupported { reason });
    if *model.content() == crate::Content::VocabularyOnly {
        return refuse("only its vocabulary is loaded".to_owned());
    }
    if model.has_encoder() {
        return refuse("it has an encoder, and slices are decoders".to_owned());
    }
    let (n_embd, input) = (model.n_embd(), model.n_embd_input());
    if n_embd == 0 || n_embd != input {
        return refuse(format!("its input rows have {input} numbers, but its hidden rows {n_embd}"));
    }
    Ok(())
}

fn next_position(memory: sys::llama_memory_t, slot: u32) -> u32 {
    // SAFETY: callers check the slot; an empty one gives -1 (llama-context.cpp, `llama_memory_seq_pos_max`).
    let last = unsafe { sys::llama_memory_seq_pos_max(memory, seq_id(slot)) };
    u32::try_from(last + 1).unwrap_or(0)
}

fn remove(memory: sys::llama_memory_t, slot: u32, from: u32) -> bool {
    // SAFETY: callers check the slot; -1 is the end (llama-kv-cache.cpp and llama-memory-recurrent.cpp, `seq_rm`).
    unsafe { sys::llama_memory_seq_rm(memory, seq_id(slot), seq_id(from), -1) }
}

/// Slots and positions are below 2^31, as `ContextParams::check` sees to; larger ones match nothing.
fn seq_id(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
