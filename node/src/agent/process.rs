//! One worker process: started, watched, ended. It knows nothing of gRPC or of other stages.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use cluster::{Bytes, StageIndex};
use protocol::tls::{TlsIdentity, root_cause};
use protocol::worker::{WorkerConfig, WorkerHello, WorkerLineError, WorkerRenewal};
use thiserror::Error;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::logs::{LastWords, pump};
use crate::host::available_memory;

/// From its start until a worker listens; it loads nothing before.
const HELLO_DEADLINE: Duration = Duration::from_secs(20);

/// A greeting is one short line.
const LONGEST_HELLO: u64 = 4096;

/// Until the end of a process that is dying, and of its output, has reached this one.
const REAP_DEADLINE: Duration = Duration::from_millis(200);

/// How a worker is started.
#[derive(Debug, Clone)]
pub struct WorkerCommand {
    /// The executable.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Added to the environment.
    pub env: Vec<(OsString, OsString)>,
}

/// Why a worker did not start.
#[derive(Debug, Error)]
pub(crate) enum WorkerError {
    #[error("starting {}: {source}", program.display())]
    Spawn { program: PathBuf, source: io::Error },
    #[error("talking to the worker: {0}")]
    Pipe(#[from] io::Error),
    #[error("the worker did not say that it listens within {} s", HELLO_DEADLINE.as_secs())]
    Silent,
    #[error("the worker did not greet as it must: {}", with_cause(.0))]
    Greeting(#[from] WorkerLineError),
    #[error("the worker {0}")]
    Ended(String),
}

fn with_cause(error: &WorkerLineError) -> String {
    let (text, cause) = (error.to_string(), root_cause(error));
    if text == cause { text } else { format!("{text}: {cause}") }
}

/// A running worker that listens. It is killed when dropped.
pub(crate) struct WorkerProcess {
    child: Child,
    // Its end tells the worker that the agent is gone.
    stdin: ChildStdin,
    last_words: LastWords,
    output: JoinHandle<()>,
    /// The process's id.
    pub(crate) pid: u32,
    /// Where it listens.
    pub(crate) port: u16,
}

impl WorkerProcess {
    /// Starts a worker and waits until it listens.
    pub(crate) async fn start(
        command: &WorkerCommand,
        config: &WorkerConfig,
        stopping: &CancellationToken,
    ) -> Result<Self, WorkerError> {
        let mut child = spawn(command)?;
        let (Some(mut stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(io::Error::other("a pipe is missing").into());
        };
        let last_words = LastWords::default();
        let stage = StageIndex(config.stage);
        let output = tokio::spawn(pump(stage, stderr, last_words.clone(), stopping.clone()));
        let greeting = async {
            let line = config.to_line()? + "\n";
            stdin.write_all(line.as_bytes()).await?;
            stdin.flush().await?;
            read_hello(stdout).await
        };
        let greeting =
            tokio::time::timeout(HELLO_DEADLINE, greeting).await.unwrap_or(Err(WorkerError::Silent));
        match greeting {
            Ok(hello) => {
                let pid = child.id().unwrap_or(0);
                Ok(Self { child, stdin, last_words, output, pid, port: hello.port })
            }
            Err(error) => Err(explain(error, child, output, &last_words).await),
        }
    }

    /// Waits for the end of the process.
    pub(crate) async fn ended(&mut self) {
        // How it came is asked again by `kill`.
        let _ = self.child.wait().await;
    }

    /// Gives it a new certificate, which it uses for connections from now on.
    pub(crate) async fn renew(&mut self, identity: TlsIdentity) -> Result<(), WorkerError> {
        let line = WorkerRenewal::new(identity).to_line()? + "\n";
        self.stdin.write_all(line.as_bytes()).await?;
        Ok(self.stdin.flush().await?)
    }

    /// Asks the worker to go by closing its stdin, and kills it if it has not gone after `grace`.
    pub(crate) async fn stop(self, grace: Duration) {
        let Self { mut child, stdin, .. } = self;
        drop(stdin);
        if tokio::time::timeout(grace, child.wait()).await.is_err() {
            tracing::warn!(pid = child.id(), "the worker did not stop when asked to and is killed");
            kill(child).await;
        }
    }

    /// Ends the worker at once. Says how it had ended by itself, if it had.
    pub(crate) async fn kill(mut self) -> Option<Ended> {
        // A broken connection is noticed somewhat before the end of the process that caused it.
        let Ok(status) = tokio::time::timeout(REAP_DEADLINE, self.child.wait()).await else {
            kill(self.child).await;
            return None;
        };
        // The pipe ends with the process, unless a child of it lives on; then what was read so far must do.
        let _ = tokio::time::timeout(REAP_DEADLINE, &mut self.output).await;
        Some(describe(status, &self.last_words))
    }
}

/// How a process ended, for people.
pub(crate) struct Ended {
    /// "was ended by signal 9", "exited with code 1", with what it printed last.
    how: String,
    /// Whether it was killed outright, as a system that runs out of memory does.
    was_killed: bool,
}

impl Ended {
    /// In words; of one that needs `needed`, also whether this host's memory was short.
    pub(crate) fn explain(&self, needed: Bytes) -> String {
        let short = if self.was_killed { shortage(needed, available_memory()) } else { String::new() };
        format!("{}{short}", self.how)
    }
}

/// The numbers, where memory is likely to be what was missing.
pub(super) fn shortage(needed: Bytes, available: Bytes) -> String {
    if available < needed {
        format!("; probably out of memory: it needs {needed} and {available} are available")
    } else {
        String::new()
    }
}

async fn kill(mut child: Child) {
    // An error says that it is gone already.
    let _ = child.kill().await;
}

fn spawn(command: &WorkerCommand) -> Result<Child, WorkerError> {
    let mut process = Command::new(&command.program);
    process
        .args(&command.args)
        .envs(command.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    // Ctrl-C goes to the whole foreground group: the agent alone decides when workers stop.
    #[cfg(unix)]
    process.process_group(0);
    process.spawn().map_err(|source| WorkerError::Spawn { program: command.program.clone(), source })
}

async fn read_hello(stdout: ChildStdout) -> Result<WorkerHello, WorkerError> {
    let mut line = String::new();
    let mut reader = BufReader::new(stdout.take(LONGEST_HELLO));
    reader.read_line(&mut line).await?;
    Ok(WorkerHello::from_line(&line)?)
}

/// A worker that ended before it listened says why better than a broken pipe does.
async fn explain(
    error: WorkerError,
    mut child: Child,
    output: JoinHandle<()>,
    words: &LastWords,
) -> WorkerError {
    let Ok(status) = tokio::time::timeout(Duration::from_millis(500), child.wait()).await else {
        kill(child).await;
        return error;
    };
    let _ = tokio::time::timeout(REAP_DEADLINE, output).await;
    WorkerError::Ended(describe(status, words).how)
}

fn describe(status: io::Result<ExitStatus>, last_words: &LastWords) -> Ended {
    let (how, was_killed) = match status {
        Ok(status) => describe_status(status),
        Err(e) => (format!("cannot be waited for: {e}"), false),
    };
    // A process that is killed does not know why.
    let how = match last_words.likely_cause().filter(|_| !was_killed) {
        Some(cause) => format!("{how}; it said: {cause}"),
        None => how,
    };
    Ended { how, was_killed }
}

#[cfg(unix)]
fn describe_status(status: ExitStatus) -> (String, bool) {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => (format!("was ended by signal {signal}"), signal == 9),
        (None, Some(code)) => (format!("exited with code {code}"), false),
        (None, None) => ("ended".to_owned(), false),
    }
}

#[cfg(not(unix))]
fn describe_status(status: ExitStatus) -> (String, bool) {
    (format!("ended with {status}"), false)
}
