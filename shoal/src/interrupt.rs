//! Ctrl-C: the first asks the work to stop and to leave nothing half done, the second ends the process. [`Interrupt`] is
//! for commands that work without an async runtime, [`stop_asked`] for those within one.

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

/// Waits for Ctrl-C or a polite kill.
#[cfg(unix)]
pub(crate) async fn stop_asked() {
    use tokio::signal::unix::{SignalKind, signal};
    // Without a handler, the signal ends the process at once; workers end with it.
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return std::future::pending().await };
    tokio::select! {
        _ = terminate.recv() => {}
        pressed = tokio::signal::ctrl_c() => if pressed.is_err() { std::future::pending().await },
    }
}

/// Waits for Ctrl-C.
#[cfg(not(unix))]
pub(crate) async fn stop_asked() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

/// Ends the process at the next request to stop.
pub(crate) async fn exit_at_second_request() {
    stop_asked().await;
    // Workers end by themselves when this process does.
    std::process::exit(EXIT_CODE);
}
