//! `shoal profile --node`: a profile measured by a node, on its own processors, of its own copy of the model.

use anyhow::{Context, Result};
use protocol::plan_files::ProfilesFile;
use protocol::v1::ProfileRequest;

use super::ProfileArgs;
use crate::commands::nodes::{connect, read_identity};
use crate::interrupt::{self, stop_asked};
use crate::output;

/// Lets the node measure, and shows what it says.
pub(super) fn measure(args: &ProfileArgs) -> Result<Option<ProfilesFile>> {
    // clap has seen to it that there is an identity where there is a node.
    let (Some(address), Some(identity)) = (&args.node, &args.identity) else { return Ok(None) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("starting the async runtime")?.block_on(async {
        let node = connect(address, &read_identity(identity)?).await?;
        let mut said = |line: &str| {
            // Progress that cannot be written is not worth a failure.
            let _ = output::note(&format!("{}: {line}", node.name()));
        };
        let (model, device) = (args.model.name().to_owned(), args.device.join(","));
        let measured = node.profile(ProfileRequest { model, device, seconds: args.seconds }, &mut said);
        tokio::select! {
            profile = measured => Ok(Some(profile?)),
            // The node notices, and keeps what it has measured.
            () = stop_asked() => std::process::exit(interrupt::EXIT_CODE),
        }
    })
}
