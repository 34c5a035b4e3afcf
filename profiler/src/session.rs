//! A worker with its slices and contexts, started when first asked, and started anew after it died.

use std::path::PathBuf;

use node::agent::WorkerCommand;
use thiserror::Error;

use crate::child::{ChildError, Worker};
use crate::wire::{Command, ContextSpec, Outcome, Reply, Setup};

/// What a worker holds while it measures.
#[derive(Debug, Clone)]
pub(crate) struct SessionSpec {
    pub(crate) setup: Setup,
    pub(crate) slices: Vec<PathBuf>,
    pub(crate) contexts: Vec<ContextSpec>,
}

/// Why a command of a session gave nothing.
#[derive(Debug, Error)]
pub(crate) enum SessionError {
    /// The worker cannot be brought to where it could measure: nothing of this session can be had.
    #[error("{0}")]
    Unable(String),
    /// This command failed; others may succeed, in a new process if need be.
    #[error("{0}")]
    Failed(String),
}

/// A session.
pub(crate) struct Session<'a> {
    command: &'a WorkerCommand,
    spec: SessionSpec,
    worker: Option<Worker>,
    peak: u64,
}

impl<'a> Session<'a> {
    pub(crate) fn new(command: &'a WorkerCommand, spec: SessionSpec) -> Self {
        Self { command, spec, worker: None, peak: 0 }
    }

    /// The most memory that any process of this session held, as far as it lived to tell.
    pub(crate) fn peak(&self) -> u64 {
        self.peak
    }

    /// Carries a command out.
    pub(crate) fn ask(&mut self, command: &Command) -> Result<Reply, SessionError> {
        if self.worker.is_none() {
            self.prepare()?;
        }
        self.tell(command)
    }

    /// Starts a process and brings it to where it can measure.
    fn prepare(&mut self) -> Result<(), SessionError> {
        let unable = |error: &dyn std::fmt::Display| SessionError::Unable(error.to_string());
        let worker = Worker::start(self.command, &self.spec.setup).map_err(|error| unable(&error))?;
        tracing::debug!(pid = worker.pid(), "started a measuring process");
        self.worker = Some(worker);
        let loads = self.spec.slices.clone().into_iter().map(|path| Command::Load { path });
        let makes = self.spec.contexts.clone().into_iter().map(Command::Context);
        for command in loads.chain(makes) {
            if let Err(error) = self.tell(&command) {
                self.worker = None;
                return Err(unable(&error));
            }
        }
        Ok(())
    }

    fn tell(&mut self, command: &Command) -> Result<Reply, SessionError> {
        let Some(worker) = &mut self.worker else {
            return Err(SessionError::Unable("the measuring process is gone".to_owned()));
        };
        match worker.ask(command) {
            Ok(Reply { outcome: Outcome::Failed { reason }, .. }) => Err(SessionError::Failed(reason)),
            Ok(reply) => {
                self.peak = self.peak.max(reply.peak_bytes);
                Ok(reply)
            }
            Err(error @ (ChildError::Spawn { .. } | ChildError::Garbled(_))) => {
                self.worker = None;
                Err(SessionError::Unable(error.to_string()))
            }
            Err(error @ (ChildError::Died(_) | ChildError::Silent)) => {
                tracing::warn!(%error, "a measuring process was lost");
                self.worker = None;
                Err(SessionError::Failed(error.to_string()))
            }
        }
    }
}
