//! A running `shoal profile` of the smallest model, with a cache of its own.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tempfile::TempDir;
use tests::models::model_path;
use tests::process::{children_of, shoal_binary, signal};

/// Four blocks, 0.85 million parameters.
pub(crate) const MODEL: &str = "glassllm-F32.gguf";

/// How long anything here may take; generous, because test machines are busy.
const DEADLINE: Duration = Duration::from_secs(240);

/// A folder for what is kept.
pub(crate) struct Cache(TempDir);

/// What a run came to.
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    /// All that it said on the way.
    pub(crate) said: Vec<String>,
}

/// A run that is not over.
pub(crate) struct Running {
    child: Child,
    stderr: mpsc::Receiver<String>,
    stdout: thread::JoinHandle<String>,
    said: Vec<String>,
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    /// Where profiles are kept.
    pub(crate) fn profiles(&self) -> PathBuf {
        self.0.path().join("profiles")
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Starts `shoal profile ARGS` with little time for each measurement.
    pub(crate) fn start(&self, args: &[&str]) -> Result<Running> {
        let mut child = Command::new(shoal_binary()?)
            .arg("profile")
            .arg("-m")
            .arg(model_path(MODEL)?)
            .args(["--threads", "1", "--seconds", "1", "--json", "--progress-json"])
            .args(args)
            .env("SHOAL_CACHE", self.0.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting shoal profile")?;
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (send, lines) = mpsc::channel();
        thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        let stdout = thread::spawn(move || std::io::read_to_string(stdout).unwrap_or_default());
        Ok(Running { child, stderr: lines, stdout, said: Vec::new() })
    }

    /// Runs it to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Result<Finished> {
        self.start(args)?.finish()
    }
}

impl Running {
    /// Waits until it says that it measures `part`.
    pub(crate) fn wait_for(&mut self, part: &str) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            let Ok(line) = self.stderr.recv_timeout(Duration::from_secs(1)) else {
                if let Some(status) = self.child.try_wait()? {
                    bail!("ended with {status} before {part}: {:?}", self.said);
                }
                continue;
            };
            let is_it = line.contains(part);
            self.said.push(line);
            if is_it {
                return Ok(());
            }
        }
        bail!("{part} was not reached: {:?}", self.said)
    }

    /// The process that measures.
    pub(crate) fn worker(&self) -> Option<u32> {
        children_of(self.child.id()).into_iter().next_back()
    }

    /// Presses Ctrl-C.
    pub(crate) fn interrupt(&self) -> Result<()> {
        signal(self.child.id(), "INT")
    }

    pub(crate) fn finish(mut self) -> Result<Finished> {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if start.elapsed() > DEADLINE {
                let _ = self.child.kill();
                bail!("not finished within {DEADLINE:?}: {:?}", self.said);
            }
            self.said.extend(self.stderr.recv_timeout(Duration::from_millis(50)));
        };
        self.said.extend(self.stderr.iter());
        let stdout = self.stdout.join().unwrap_or_default();
        Ok(Finished { status, stdout, said: self.said })
    }
}

impl Finished {
    /// The only device of the profile; fails with what was said if there is none.
    pub(crate) fn profile(&self) -> Result<Value> {
        let text = || format!("{}\n{}", self.status, self.said.join("\n"));
        let file: Value = serde_json::from_str(&self.stdout).with_context(text)?;
        Ok(file["profiles"][0].clone())
    }

    /// Everything it said, as one text.
    pub(crate) fn words(&self) -> String {
        self.said.join("\n")
    }
}
