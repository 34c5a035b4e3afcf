//! Where the commands keep what cannot be made again.

use anyhow::Result;
use registry::StateFolder;

use crate::cli::Globals;

/// The state folder.
pub(crate) fn folder(globals: &Globals) -> Result<StateFolder> {
    Ok(StateFolder::new(globals.state.clone())?)
}
