//! What the orchestrator is told by whoever starts it. Knows nothing of where the values come from.

use std::path::PathBuf;
use std::time::Duration;

use cluster::{Bytes, ForetoldHops, ReplicaState, StageObservation};
use deploy::Deployment;
use registry::Registry;
use tokio::sync::watch;

use crate::desk::PredictedRates;
use crate::fleet::Fleet;

/// What is served, and where the replicas are.
#[derive(Debug)]
pub struct OrchestratorConfig {
    /// The id under which the model is listed.
    pub model_name: String,
    /// Other names a request may use for it.
    pub aliases: Vec<String>,
    /// The whole model, of which only the vocabulary and the chat template are read.
    pub model_path: PathBuf,
    /// The source of a chat template to use in place of the model's own.
    pub chat_template: Option<String>,
    /// The replicas; whoever has a handle of it adds some, and takes them away.
    pub fleet: Fleet,
    /// Whose members may be looked at and decided about, where this process is a cluster's orchestrator.
    pub cluster: Option<Registry>,
    /// What is to run on that cluster, where plans are carried out.
    pub deployment: Option<Deployment>,
    /// Tokens a slot holds.
    pub n_ctx: u32,
    /// Bounds on what clients may ask for.
    pub limits: Limits,
}

/// What is known of one replica.
#[derive(Debug)]
pub struct ReplicaFeed {
    /// The agent's word on it.
    pub state: watch::Receiver<ReplicaState>,
    /// What the agent sees of its stages.
    pub observations: watch::Receiver<Vec<StageObservation>>,
    /// What its links foretell, where they are watched.
    pub hops: watch::Receiver<Option<ForetoldHops>>,
    /// Requests that it generates at once. It is never sent more.
    pub slots: u32,
    /// How fast its plan says it is, where it has one.
    pub predicted: Option<PredictedRates>,
}

/// Bounds on what clients may ask for.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Largest request body.
    pub max_body: Bytes,
    /// Requests for a generation that may be open at once, running and queued together.
    pub max_open_requests: usize,
    /// Requests that may wait for a slot, of all replicas together.
    pub queue: usize,
    /// How long one of them may.
    pub queue_timeout: Duration,
    /// How long a request may wait for a replica to serve while none does: one that lost its replica, or one that waits.
    pub replay_timeout: Duration,
    /// How long a request body may take to arrive.
    pub body_deadline: Duration,
    /// How often a comment is sent on a stream that has nothing else to send.
    pub keep_alive: Duration,
    /// How long answers under way may go on after a shutdown began.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Two million words of text: more than any context holds.
            max_body: Bytes::from_mib(10),
            // The queue is the limit that is met in practice; this one bounds memory, and is the bound on bodies that
            // are being read: 256 × 10 MiB at worst.
            max_open_requests: 256,
            // More than anyone waits for: 64 answers of half a minute over four slots are eight minutes.
            queue: 64,
            // OpenAI's own clients give up after ten minutes.
            queue_timeout: Duration::from_secs(600),
            // A stage is restarted and loaded again: seconds for a small model, a minute for a large one from a disk.
            replay_timeout: Duration::from_secs(60),
            // 10 MiB at 1.4 Mbit/s.
            body_deadline: Duration::from_secs(60),
            // Proxies commonly give a silent connection up after 30 to 60 s.
            keep_alive: Duration::from_secs(10),
            // Whoever presses Ctrl-C wants an end; a short answer may still finish.
            drain: Duration::from_secs(2),
        }
    }
}
