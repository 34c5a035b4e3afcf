//! From what a user calls a model to its file.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a name means no model.
#[derive(Debug, Error)]
pub enum ResolveError {
    /// A path that leads nowhere.
    #[error("there is no model file {}", .0.display())]
    NoFile(PathBuf),
    /// A name that no file starts with.
    #[error(
        "no model named {name:?}: it is neither a file nor the start of the name of a .gguf file in {} (there: {})",
        folder.display(), list(there)
    )]
    Unknown {
        /// What was asked for.
        name: String,
        /// Where it was looked for.
        folder: PathBuf,
        /// The models there.
        there: Vec<String>,
    },
    /// A name that several files start with.
    #[error("the model name {name:?} is ambiguous: it could be {}", list(matches))]
    Ambiguous {
        /// What was asked for.
        name: String,
        /// The models it could mean.
        matches: Vec<String>,
    },
    /// The folder cannot be read.
    #[error("listing the models in {}: {source}", folder.display())]
    Folder {
        /// Where models are looked for.
        folder: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

/// The file of a model: `name` itself if it is a path of a file, else the only file in the folder `models` whose
/// name starts with `name`, in any case. Of a split model only the first part counts.
pub fn resolve_model(name: &str, models: &Path) -> Result<PathBuf, ResolveError> {
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_owned());
    }
    find_model(name, models)
}

/// The only file in the folder `models` whose name starts with `name`, in any case; never a file elsewhere.
pub(crate) fn find_model(name: &str, models: &Path) -> Result<PathBuf, ResolveError> {
    let path = Path::new(name);
    if path.components().count() > 1 || path.is_absolute() {
        return Err(ResolveError::NoFile(path.to_owned()));
    }
    let there = model_names(models)?;
    let wanted = name.to_lowercase();
    let matches: Vec<&String> =
        there.iter().filter(|file| file.to_lowercase().starts_with(&wanted)).collect();
    let exact = matches.iter().find(|file| {
        let file = file.to_lowercase();
        file == wanted || file.strip_suffix(".gguf") == Some(wanted.as_str())
    });
    match (exact, matches.as_slice()) {
        (Some(file), _) => Ok(models.join(file)),
        (None, [file]) => Ok(models.join(file)),
        (None, []) => Err(ResolveError::Unknown { name: name.to_owned(), folder: models.to_owned(), there }),
        (None, several) => Err(ResolveError::Ambiguous {
            name: name.to_owned(),
            matches: several.iter().map(|&file| file.clone()).collect(),
        }),
    }
}

fn model_names(folder: &Path) -> Result<Vec<String>, ResolveError> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ResolveError::Folder { folder: folder.to_owned(), source }),
    };
    let mut names: Vec<String> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.path().extension() == Some(OsStr::new("gguf")))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| is_first_part(name))
        .collect();
    names.sort();
    Ok(names)
}

fn is_first_part(file_name: &str) -> bool {
    gguf::split::sibling_names(file_name)
        .is_none_or(|parts| parts.first().is_some_and(|first| first == file_name))
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        folder
    }

    #[test]
    fn a_model_is_found_by_the_start_of_its_name_in_any_case() {
        let folder = folder_with(&["SmolLM2-135M.Q4_1.gguf", "notes.txt"]);
        let found = resolve_model("smollm2", folder.path()).unwrap();
        assert_eq!(found, folder.path().join("SmolLM2-135M.Q4_1.gguf"));
    }

    #[test]
    fn an_ambiguous_name_lists_what_it_could_mean() {
        let folder = folder_with(&["qwen-a.gguf", "qwen-b.gguf", "other.gguf"]);
        let error = resolve_model("qwen", folder.path()).unwrap_err().to_string();
        assert!(error.contains("qwen-a.gguf, qwen-b.gguf") && !error.contains("other"), "{error}");
    }

    #[test]
    fn a_full_name_wins_over_longer_names_that_start_with_it() {
        let folder = folder_with(&["m.gguf", "m-large.gguf"]);
        assert_eq!(resolve_model("m", folder.path()).unwrap(), folder.path().join("m.gguf"));
    }

    #[test]
    fn an_unknown_name_says_what_there_is() {
        let folder = folder_with(&["a.gguf"]);
        let error = resolve_model("b", folder.path()).unwrap_err().to_string();
        assert!(error.contains("\"b\"") && error.contains("a.gguf"), "{error}");
        let nowhere = folder.path().join("missing");
        assert!(resolve_model("b", &nowhere).unwrap_err().to_string().contains("nothing"));
    }

    #[test]
    fn a_path_is_never_searched_for_by_name() {
        let folder = folder_with(&["a.gguf"]);
        let error = resolve_model("./x/a", folder.path()).unwrap_err();
        assert!(matches!(error, ResolveError::NoFile(_)), "{error}");
    }

    #[test]
    fn a_split_model_counts_once() {
        let folder = folder_with(&["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
        assert_eq!(resolve_model("m", folder.path()).unwrap(), folder.path().join("m-00001-of-00002.gguf"));
    }
}
