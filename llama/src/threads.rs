//! Threads that compute graphs on the CPU, kept from graph to graph.
//!
//! Without such a pool ggml starts and joins threads for every graph (ggml-cpu.c, `ggml_graph_compute`), which costs a
//! chain of thin slices dearly.
//!
//! A pool of as many threads as there are processors keeps each of them on a processor of its own (on Linux). ggml's threads
//! spin at a barrier after every operation, so two on one processor while another idles wait for a whole time slice; and where
//! several stages of a host take turns, each finds its processors' caches as little disturbed as can be.

use std::ptr::NonNull;
#[cfg(target_os = "linux")]
use std::sync::OnceLock;

use llama_sys as sys;

use crate::Error;

/// ggml's own limit for one pool (ggml.h, `GGML_MAX_N_THREADS`).
pub(crate) const MAX_THREADS: u32 = 512;

/// A pool of ggml's threads, ended and joined on drop.
#[derive(Debug)]
pub(crate) struct ThreadPool(NonNull<sys::ggml_threadpool>);

impl ThreadPool {
    /// Starts `threads - 1` threads: the caller, who must be the one to compute, is the first, and is kept where they are.
    pub(crate) fn new(threads: u32) -> Result<Self, Error> {
        let count = i32::try_from(threads).unwrap_or(i32::MAX);
        // SAFETY: returns a struct by value (ggml.c).
        let mut params = unsafe { sys::ggml_threadpool_params_default(count) };
        // Waiting threads sleep. ggml's default is to spin for a while, which takes the cores from the other slices and
        // stages of this host that compute in between.
        params.poll = 0;
        place(&mut params, threads);
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

/// Says where the threads may run: each on one processor if there are just as many, else all on all.
#[cfg(target_os = "linux")]
fn place(params: &mut sys::ggml_threadpool_params, threads: u32) {
    let processors = processors();
    params.strict_cpu = processors.len() == threads as usize;
    // Without any the mask is empty, which leaves threads where the system puts them. With all, a thread that an earlier pool
    // kept on one processor is let go, and those that it starts are too.
    for processor in processors {
        if let Some(allowed) = params.cpumask.get_mut(*processor) {
            *allowed = true;
        }
    }
}

/// Other systems do not keep threads anywhere (ggml-cpu.c, `ggml_thread_apply_affinity`), or not by one number.
#[cfg(not(target_os = "linux"))]
fn place(_: &mut sys::ggml_threadpool_params, _: u32) {}

/// Those that this process may use. Asked for once: later a thread may be kept on one of them.
#[cfg(target_os = "linux")]
fn processors() -> &'static [usize] {
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    ALLOWED.get_or_init(|| {
        let set = rustix::thread::sched_getaffinity(None);
        set.map_or_else(
            |_| Vec::new(),
            |set| (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect(),
        )
    })
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        // SAFETY: contexts drop their llama_context before their pools, so nothing computes on it (ggml-cpu.c,
        // `ggml_threadpool_free`).
        unsafe { sys::ggml_threadpool_free(self.0.as_ptr()) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Processors of the calling thread.
    fn mine() -> u32 {
        rustix::thread::sched_getaffinity(None).map_or(0, |set| set.count())
    }

    #[test]
    fn a_pool_that_fills_the_processors_keeps_its_threads_apart_and_another_lets_them_go() {
        let all = mine();
        let pool = ThreadPool::new(all).unwrap();
        assert_eq!(mine(), 1, "the caller has one of {all} processors");
        drop(pool);
        let _pool = ThreadPool::new(all + 1).unwrap();
        assert_eq!(mine(), all);
    }
}
