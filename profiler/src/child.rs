//! A worker process as the driver sees it: started, asked, and, when it dies, said how.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use node::agent::WorkerCommand;
use thiserror::Error;

use crate::wire;

/// A command takes milliseconds, loading a large slice from a slow disk minutes. What takes longer is hung.
const DEADLINE: Duration = Duration::from_secs(600);

/// Until the end of a process that is dying has reached this one.
const REAP_DEADLINE: Duration = Duration::from_secs(2);

/// Why a worker gave no answer.
#[derive(Debug, Error)]
pub(crate) enum ChildError {
    #[error("starting {program}: {source}")]
    Spawn { program: String, source: std::io::Error },
    #[error("the measuring process {0}")]
    Died(String),
    #[error("the measuring process gave no answer within {} s", DEADLINE.as_secs())]
    Silent,
    #[error("the measuring process gave an answer that is none: {0}")]
    Garbled(#[from] serde_json::Error),
}

/// A running worker, killed when dropped.
pub(crate) struct Worker {
    child: Child,
    stdin: ChildStdin,
    replies: mpsc::Receiver<String>,
    last_words: Arc<Mutex<String>>,
}

impl Worker {
    /// Starts it.
    pub(crate) fn start(command: &WorkerCommand, setup: &wire::Setup) -> Result<Self, ChildError> {
        let spawn = |source| ChildError::Spawn { program: command.program.display().to_string(), source };
        let mut child = process(command).spawn().map_err(spawn)?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            return Err(spawn(std::io::Error::other("a pipe is missing")));
        };
        let (send, replies) = mpsc::channel();
        // Both threads end with the process, whose end closes the pipes.
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let last_words = Arc::new(Mutex::new(String::new()));
        let heard = Arc::clone(&last_words);
        thread::spawn(move || {
            for line in
                BufReader::new(stderr).lines().map_while(Result::ok).filter(|line| !line.trim().is_empty())
            {
                tracing::debug!(target: "shoal::profile_worker", "{line}");
                if let Ok(mut heard) = heard.lock() {
                    *heard = line;
                }
            }
        });
        let mut worker = Self { child, stdin, replies, last_words };
        worker.write(setup)?;
        Ok(worker)
    }

    /// The process's id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives an order and waits for the answer.
    pub(crate) fn ask(&mut self, command: &wire::Command) -> Result<wire::Reply, ChildError> {
        self.write(command)?;
        match self.replies.recv_timeout(DEADLINE) {
            Ok(line) => Ok(serde_json::from_str(&line)?),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(ChildError::Silent),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(self.how_it_died()),
        }
    }

    fn write(&mut self, line: &impl serde::Serialize) -> Result<(), ChildError> {
        let line = serde_json::to_string(line)? + "\n";
        let written = self.stdin.write_all(line.as_bytes()).and_then(|()| self.stdin.flush());
        written.map_err(|_| self.how_it_died())
    }

    fn how_it_died(&mut self) -> ChildError {
        let start = std::time::Instant::now();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break describe(status),
                Ok(None) if start.elapsed() < REAP_DEADLINE => thread::sleep(Duration::from_millis(10)),
                Ok(None) => break "closed its output".to_owned(),
                Err(error) => break format!("cannot be waited for: {error}"),
            }
        };
        let words = self.last_words.lock().map(|words| words.clone()).unwrap_or_default();
        ChildError::Died(if words.is_empty() { status } else { format!("{status}; it said last: {words}") })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // An error says that it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn process(command: &WorkerCommand) -> Command {
    let mut process = Command::new(&command.program);
    process
        .args(&command.args)
        .envs(command.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // Ctrl-C goes to the whole foreground group: the driver decides when workers stop.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut process, 0);
    process
}

#[cfg(unix)]
fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(9), _) => "was killed (signal 9), as a system that runs out of memory does".to_owned(),
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

#[cfg(not(unix))]
fn describe(status: ExitStatus) -> String {
    format!("ended with {status}")
}
