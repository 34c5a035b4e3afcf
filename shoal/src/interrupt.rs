//! Ctrl-C for commands that work without an async runtime: the first asks the work to stop and to leave nothing half
//! done, the second ends the process.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

/// What a shell gives a process that Ctrl-C ended: 128 + SIGINT.
pub(crate) const EXIT_CODE: i32 = 130;

/// Whether the user wants the work to stop.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Begins to listen.
    pub(crate) fn listen() -> Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("starting to listen for Ctrl-C")?;
        let flag = Arc::clone(&asked);
        // It ends with the process; there is nothing to join it for.
        std::thread::spawn(move || {
            runtime.block_on(async {
                if tokio::signal::ctrl_c().await.is_ok() {
                    flag.store(true, Ordering::Relaxed);
                    if tokio::signal::ctrl_c().await.is_ok() {
                        std::process::exit(EXIT_CODE);
                    }
                }
            });
        });
        Ok(Self(asked))
    }

    /// `Break` once the user has pressed Ctrl-C.
    pub(crate) fn check(&self) -> ControlFlow<()> {
        if self.0.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}
