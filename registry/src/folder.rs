//! Where the state of a host is kept that cannot be made again: as an orchestrator's, and as a node's.

use std::path::PathBuf;

use crate::error::RegistryError;

/// A host's state folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateFolder(PathBuf);

impl StateFolder {
    /// The given one, or `$XDG_DATA_HOME/shoal` (else `~/.local/share/shoal`).
    pub fn new(given: Option<PathBuf>) -> Result<Self, RegistryError> {
        let default = || user_data().map(|data| data.join("shoal"));
        given.or_else(default).map(Self).ok_or(RegistryError::NoHome)
    }

    /// What the orchestrator keeps.
    pub fn cluster(&self) -> PathBuf {
        self.0.join("cluster")
    }

    /// What the node keeps.
    pub fn node(&self) -> PathBuf {
        self.0.join("node")
    }
}

fn user_data() -> Option<PathBuf> {
    // The XDG specification tells to ignore a relative path.
    let xdg = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    xdg.or_else(|| std::env::home_dir().map(|home| home.join(".local/share")))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_host_may_be_both_orchestrator_and_node() {
        let state = StateFolder::new(Some("/s".into())).unwrap();
        assert_eq!(state.cluster(), Path::new("/s/cluster"));
        assert_eq!(state.node(), Path::new("/s/node"));
    }
}
