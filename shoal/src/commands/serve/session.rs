//! One run of `shoal serve`, from its first bind to the end of its last child: what answers, beside who runs the replicas.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use cluster::DeviceProfile;
use node::{Folders, ModelFile};
use orchestrator::{Fleet, Limits, OrchestratorConfig};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::cluster::OwnCluster;
use super::report::Facts;
use super::{ServeArgs, deployment, fixed, profiles};
use crate::cli::Globals;
use crate::commands::model;
use crate::interrupt::{exit_at_second_request, stop_asked};

/// After a stop was asked for, HTTP has its own deadline for answers under way; this is for the unforeseen.
const HTTP_DEADLINE: Duration = Duration::from_secs(6);

/// What every run begins with.
pub(super) struct Opened<'a> {
    pub(super) args: &'a ServeArgs,
    pub(super) globals: &'a Globals,
    pub(super) folders: Folders,
    pub(super) model: ModelFile,
    /// Of the stages' devices for the model.
    pub(super) profiles: Vec<DeviceProfile>,
    pub(super) listener: TcpListener,
    /// Of the API.
    pub(super) address: SocketAddr,
}

/// Serves until it is told to stop, or cannot go on.
pub(super) async fn serve(args: &ServeArgs, globals: &Globals) -> Result<()> {
    // First, so that a port in use is told before minutes of cutting.
    let listener = bind(&args.listen).await?;
    let address = listener.local_addr().context("asking for the address of the API")?;
    let folders = model::folders(globals)?;
    let model = model::open(&args.model, &folders)?;
    let profiles =
        args.profiles.as_deref().map_or(Ok(Vec::new()), |path| profiles::read(path, &model, &folders))?;
    let opened = Opened { args, globals, folders, model, profiles, listener, address };
    match args.cluster.open(globals).await? {
        Some(cluster) if args.cluster.on_its_nodes() => Box::pin(deployment::serve(opened, cluster)).await,
        cluster => Box::pin(fixed::serve(opened, cluster)).await,
    }
}

/// What answers.
pub(super) struct Servers {
    pub(super) listener: TcpListener,
    pub(super) config: OrchestratorConfig,
    /// At whose port nodes join.
    pub(super) cluster: Option<OwnCluster>,
}

impl Servers {
    /// Answers while `work` is done, which ends only with an error; until a stop is asked for, or one of them ends.
    pub(super) async fn beside(
        self,
        work: impl Future<Output = Result<()>>,
        stop: &CancellationToken,
    ) -> Result<()> {
        let mut http = tokio::spawn(orchestrator::serve(self.listener, self.config, stop.clone()));
        let joining = async {
            match self.cluster {
                Some(cluster) => cluster.serve(stop.clone()).await,
                None => std::future::pending().await,
            }
        };
        let outcome = tokio::select! {
            outcome = work => outcome,
            ended = &mut http => match ended {
                Ok(Ok(())) => Err(anyhow!("the HTTP server ended by itself")),
                Ok(Err(e)) => Err(e.into()),
                Err(e) => Err(e.into()),
            },
            ended = joining => match ended {
                Ok(()) => Err(anyhow!("the cluster port ended by itself")),
                Err(e) => Err(e.into()),
            },
            () = stop_asked() => {
                tokio::spawn(exit_at_second_request());
                Ok(())
            }
        };
        stop.cancel();
        if !http.is_finished() && tokio::time::timeout(HTTP_DEADLINE, &mut http).await.is_err() {
            http.abort();
        }
        outcome
    }
}

/// The orchestrator of a model, which knows of no cluster.
pub(super) fn orchestrator_config(
    (args, model): (&ServeArgs, &ModelFile),
    facts: &Facts,
    n_ctx: u32,
    (fleet, limits): (Fleet, Limits),
) -> Result<OrchestratorConfig> {
    let chat_template = args.chat_template_file.as_ref().map(|path| {
        std::fs::read_to_string(path).with_context(|| format!("reading the chat template {}", path.display()))
    });
    let aliases = [Some(args.model.clone()), model.shape().name.clone()];
    Ok(OrchestratorConfig {
        model_name: facts.model.clone(),
        aliases: aliases.into_iter().flatten().filter(|alias| *alias != facts.model).collect(),
        model_path: model.path().to_owned(),
        chat_template: chat_template.transpose()?,
        fleet,
        cluster: None,
        deployment: None,
        n_ctx,
        limits,
    })
}

async fn bind(address: &str) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => anyhow!(
            "listening on {address}: the port is in use by another program; choose another with --listen, \
             such as --listen 127.0.0.1:8081"
        ),
        io::ErrorKind::InvalidInput => {
            anyhow!(
                "listening on {address}: {e}; give a host and a port, such as 127.0.0.1:8080 or [::1]:8080"
            )
        }
        _ => anyhow!("listening on {address}: {e}"),
    })
}
