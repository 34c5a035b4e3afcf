//! A worker's ties to the agent that started it: the configuration and renewed certificates on stdin, whose end means that
//! the agent is gone, the hello on stdout, and signals that are the agent's to deal with.

use std::io::{self, BufRead, Read, Write};
use std::thread;
use std::time::Duration;

use protocol::certify::LiveIdentity;
use protocol::worker::{WorkerConfig, WorkerHello, WorkerRenewal};

use crate::worker::WorkerError;

/// Longest configuration line: certificates, some paths, and generous room.
const MAX_LINE: u64 = 1 << 20;

/// How long the process may take to run its exit handlers, some of which belong to GPU drivers.
const EXIT_GRACE: Duration = Duration::from_secs(2);

/// Reads the configuration line.
pub(crate) fn read_config() -> Result<WorkerConfig, WorkerError> {
    let mut line = String::new();
    let failed = |source| WorkerError::Stdio { doing: "reading the configuration from stdin", source };
    io::stdin().lock().take(MAX_LINE).read_line(&mut line).map_err(failed)?;
    Ok(WorkerConfig::from_line(&line)?)
}

/// Takes renewed certificates from stdin, and ends the process when that does. Nothing is tidied up: there is nobody left to
/// tidy up for.
pub(crate) fn follow_into_death(identity: LiveIdentity) -> Result<(), WorkerError> {
    let failed = |source| WorkerError::Stdio { doing: "starting a thread to watch stdin", source };
    thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(move || {
            let mut stdin = io::stdin().lock();
            let mut line = String::new();
            while stdin.by_ref().take(MAX_LINE).read_line(&mut line).is_ok_and(|n| n > 0) {
                match WorkerRenewal::from_line(&line) {
                    Ok(renewal) => identity.renew(renewal.tls),
                    Err(error) => tracing::warn!(%error, "the agent said something that is not understood"),
                }
                line.clear();
            }
            tracing::debug!("the agent has gone");
            thread::spawn(|| {
                thread::sleep(EXIT_GRACE);
                std::process::abort();
            });
            std::process::exit(0);
        })
        .map(|_| ())
        .map_err(failed)
}

/// Says where the worker listens.
pub(crate) fn greet(port: u16) -> Result<(), WorkerError> {
    let line = WorkerHello::new(port).to_line()?;
    let failed = |source| WorkerError::Stdio { doing: "writing the hello to stdout", source };
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(failed)
}

/// Swallows interrupts: Ctrl-C in a terminal reaches every process of the group, and the agent decides. It takes
/// effect before it returns, and lasts as long as the process: tokio never gives a signal back to the system.
pub(crate) fn ignore_interrupts() -> Result<(), WorkerError> {
    #[cfg(unix)]
    let listening = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt());
    #[cfg(windows)]
    let listening = tokio::signal::windows::ctrl_c();
    let failed = |source| WorkerError::Stdio { doing: "asking not to be ended by interrupts", source };
    listening.map(drop).map_err(failed)
}
