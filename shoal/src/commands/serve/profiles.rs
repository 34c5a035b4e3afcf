//! The profiles that a user gives `serve`: those of the served model, out of a file that may hold others.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use cluster::DeviceProfile;
use node::{Folders, ModelFile, model_hash};
use protocol::plan_files::{PlannerFile, ProfilesFile};

/// Reads a file, and keeps the profiles of the model: they name it by its hash, or by its name.
pub(super) fn read(path: &Path, model: &ModelFile, folders: &Folders) -> Result<Vec<DeviceProfile>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading the profiles {}", path.display()))?;
    let in_file = || format!("in {}", path.display());
    let all = ProfilesFile::from_json(&text).and_then(|file| file.profiles()).with_context(in_file)?;
    let hash = model_hash(model.parts(), &folders.model_hashes(), &mut |_| ControlFlow::Continue(()))?;
    let names = [Some(hash.to_string()), Some(model.name()), model.shape().name.clone()];
    let (ours, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|profile| names.iter().flatten().any(|name| *name == profile.model));
    let others: Vec<String> = others.into_iter().map(|profile| profile.model).collect();
    ensure!(
        !ours.is_empty(),
        "{} has no profile of {}: its profiles are of {}",
        path.display(),
        model.name(),
        if others.is_empty() { "nothing".to_owned() } else { others.join(", ") }
    );
    Ok(ours)
}
