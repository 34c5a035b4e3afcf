//! What clients talk to: the OpenAI-compatible HTTP API over one or more replicas.
//!
//! A request is checked, rendered with the model's chat template and tokenised here; token ids go to the
//! master of a replica and come back; here they become text again. No model is run in this process (only its vocabulary is
//! loaded), no worker is supervised, and nothing of a prompt is logged.
#![forbid(unsafe_code)]

mod admin;
mod app;
mod config;
mod demand;
pub mod desk;
mod dispatch;
mod fleet;
mod generation;
mod http;
mod metrics;
mod model;
mod openai;
mod replay;
mod replica;
pub mod router;
mod source;
mod sse;
mod text;

use std::future::{Future, IntoFuture};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use config::{Limits, OrchestratorConfig, ReplicaFeed};
pub use demand::{Adaptation, Enough};
pub use fleet::{Fleet, Lines, ReplicaLoad};
pub use model::TextModelError;

use app::App;
use model::TextModel;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

/// How long connections may take to close once every stream has ended.
const CLOSE_DEADLINE: Duration = Duration::from_secs(2);

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The model file has no vocabulary or chat template that can be used.
    #[error("cannot serve {path}")]
    Model {
        /// The model file.
        path: String,
        /// What is wrong with it.
        #[source]
        source: TextModelError,
    },
    /// The listener failed.
    #[error("the HTTP server failed")]
    Http(#[source] io::Error),
    /// A task of the server panicked.
    #[error("a task of the HTTP server panicked")]
    Panicked(#[source] tokio::task::JoinError),
}

/// Serves the API on `listener` until `shutdown` is cancelled; then answers that are under way get
/// [`Limits::drain`] to finish, and end with an error event after it.
///
/// Answers `/health` from the first moment; everything that needs the model says "not ready" until its vocabulary is
/// read and a replica is ready.
pub async fn serve(
    listener: TcpListener,
    config: OrchestratorConfig,
    shutdown: CancellationToken,
) -> Result<(), ServeError> {
    let (path, template) = (config.model_path.clone(), config.chat_template.clone());
    let drain = config.limits.drain;
    let app = Arc::new(App::new(config));
    // Tokens are small and must leave at once.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
    });
    let server = axum::serve(listener, http::router(Arc::clone(&app)))
        .with_graceful_shutdown(shutdown.clone().cancelled_owned())
        .into_future();
    let load = async {
        let name = path.display().to_string();
        let load = move || TextModel::load(&path, template.as_deref());
        let loaded = tokio::task::spawn_blocking(load).await.map_err(ServeError::Panicked)?;
        app.set_text_model(loaded.map_err(|source| ServeError::Model { path: name, source })?);
        llama::release_freed_memory();
        Ok(())
    };
    let closed = async {
        shutdown.cancelled().await;
        tokio::time::sleep(drain).await;
        app.close();
        tokio::time::sleep(CLOSE_DEADLINE).await;
    };
    run(server, load, closed).await
}

/// Runs the server until it ends, the vocabulary cannot be loaded, or its time is up.
async fn run(
    server: impl Future<Output = io::Result<()>>,
    load: impl Future<Output = Result<(), ServeError>>,
    closed: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let load_failed = async {
        match load.await {
            Ok(()) => std::future::pending().await,
            Err(error) => error,
        }
    };
    tokio::select! {
        served = server => served.map_err(ServeError::Http),
        error = load_failed => Err(error),
        () = closed => {
            tracing::warn!("connections were still open at the end of the shutdown");
            Ok(())
        }
    }
}
