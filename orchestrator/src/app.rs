//! What every route shares: the served model, the replicas, and how many requests are open.
//!
//! Knows nothing of HTTP or of OpenAI's bodies.

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use deploy::Deployment;
use registry::Registry;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::config::{Limits, OrchestratorConfig};
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::model::TextModel;
use crate::openai::ApiError;

/// The state behind the routes.
pub(crate) struct App {
    /// The id under which the model is listed.
    pub(crate) model_name: Arc<str>,
    aliases: Vec<String>,
    /// Tokens a slot holds.
    pub(crate) n_ctx: u32,
    /// Seconds since 1970 at which serving began.
    pub(crate) created: u64,
    /// Bounds on what clients may ask for.
    pub(crate) limits: Limits,
    /// The replicas.
    pub(crate) fleet: Fleet,
    /// Whose members may be decided about, if any.
    pub(crate) cluster: Option<Registry>,
    /// What is to run on it, if that can be decided.
    pub(crate) deployment: Option<Deployment>,
    /// What is counted.
    pub(crate) metrics: Arc<Metrics>,
    text_model: OnceLock<Arc<TextModel>>,
    open: Arc<Semaphore>,
    closing: CancellationToken,
}

/// A place among the open requests, given back when dropped.
pub(crate) type Admission = OwnedSemaphorePermit;

impl App {
    /// Nothing is loaded yet.
    pub(crate) fn new(config: OrchestratorConfig) -> Self {
        Self {
            model_name: config.model_name.into(),
            aliases: config.aliases,
            n_ctx: config.n_ctx,
            created: unix_seconds(),
            open: Arc::new(Semaphore::new(config.limits.max_open_requests)),
            fleet: config.fleet,
            limits: config.limits,
            cluster: config.cluster,
            deployment: config.deployment,
            metrics: Arc::default(),
            text_model: OnceLock::new(),
            closing: CancellationToken::new(),
        }
    }

    /// From now on requests can be rendered and tokenised.
    pub(crate) fn set_text_model(&self, model: TextModel) {
        if self.text_model.set(Arc::new(model)).is_err() {
            tracing::warn!("the vocabulary was loaded twice");
        }
    }

    /// The vocabulary, once it is loaded.
    pub(crate) fn text_model(&self) -> Result<Arc<TextModel>, ApiError> {
        let loading = || ApiError::NotReady { reason: "the vocabulary is being loaded".into() };
        self.text_model.get().cloned().ok_or_else(loading)
    }

    /// Whether a request would be answered now.
    pub(crate) fn readiness(&self) -> Result<(), ApiError> {
        self.fleet.readiness()?;
        self.text_model().map(drop)
    }

    /// A place for one more request.
    pub(crate) fn admit(&self) -> Result<Admission, ApiError> {
        let full = |_| ApiError::TooManyOpen { limit: self.limits.max_open_requests };
        Arc::clone(&self.open).try_acquire_owned().map_err(full)
    }

    /// Requests that have a place.
    pub(crate) fn open_requests(&self) -> usize {
        self.limits.max_open_requests.saturating_sub(self.open.available_permits())
    }

    /// Whether `name` is the served model; no name means it.
    pub(crate) fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(asked) if *asked != *self.model_name && !self.aliases.iter().any(|alias| alias == asked) => {
                let asked = crate::openai::quoted(asked);
                Err(ApiError::ModelNotFound { asked, served: self.model_name.to_string() })
            }
            _ => Ok(()),
        }
    }

    /// Ends every answer that is still under way.
    pub(crate) fn close(&self) {
        self.closing.cancel();
    }

    /// Cancelled when answers must end.
    pub(crate) fn closing(&self) -> CancellationToken {
        self.closing.clone()
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    // A clock before 1970 gives 0: the field is for display.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
