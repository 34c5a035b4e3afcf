//! Threads that compute graphs on the CPU, kept from graph to graph.
//!
//! Without such a pool ggml starts and joins threads for every graph (ggml-cpu.c, `ggml_graph_compute`), which costs a
//! chain of thin slices dearly.

use std::ptr::NonNull;

use llama_sys as sys;

use crate::Error;

/// ggml's own limit for one pool (ggml.h, `GGML_MAX_N_THREADS`).
pub(crate) const MAX_THREADS: u32 = 512;

/// A pool of ggml's threads, ended and joined on drop.
#[derive(Debug)]
pub(crate) struct ThreadPool(NonNull<sys::ggml_threadpool>);

impl ThreadPool {
    /// Starts `threads - 1` threads: the caller of a computation is the first.
    pub(crate) fn new(threads: u32) -> Result<Self, Error> {
        let count = i32::try_from(threads).unwrap_or(i32::MAX);
        // SAFETY: returns a struct by value (ggml.c).
        let mut params = unsafe { sys::ggml_threadpool_params_default(count) };
        // Waiting threads sleep. ggml's default is to spin for a while, which takes the cores from the other slices and
        // stages of this host that compute in between.
        params.poll = 0;
        // SAFETY: the parameters live during the call; a null pointer is checked (ggml-cpu.c, `ggml_threadpool_new`).
        let pool = unsafe { sys::ggml_threadpool_new(&raw mut params) };
        NonNull::new(pool).map(Self).ok_or(Error::Parameter {
            parameter: "threads",
            value: u64::from(threads),
            allowed: "as many as the system can start".to_owned(),
        })
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ggml_threadpool {
        self.0.as_ptr()
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        // SAFETY: contexts drop their llama_context before their pools, so nothing computes on it (ggml-cpu.c,
        // `ggml_threadpool_free`).
        unsafe { sys::ggml_threadpool_free(self.0.as_ptr()) };
    }
}
