//! A model on disk: one GGUF file, or the parts of a split one, found beside each other.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use cluster::ModelShape;
use gguf::{Gguf, Part};
use thiserror::Error;

/// Why a model cannot be opened.
#[derive(Debug, Error)]
pub enum ModelFileError {
    /// A file cannot be opened.
    #[error("opening {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The path leads to something that is not a file.
    #[error("{} is not a file: give the path of a .gguf file", .0.display())]
    NotAFile(PathBuf),
    /// Parts of a split model are not there.
    #[error(
        "{} is one of the {total} parts of a split model, and {} missing beside it: {}",
        given.display(), if missing.len() == 1 { "one is" } else { "some are" }, missing.join(", ")
    )]
    MissingParts {
        /// The part that was asked for.
        given: PathBuf,
        /// File names of those that are missing.
        missing: Vec<String>,
        /// How many there must be.
        total: usize,
    },
    /// A part under the name of another.
    #[error("{} holds part {holds} of the model, but its name is that of part {named}: was it renamed?", path.display())]
    Misnamed {
        /// The part.
        path: PathBuf,
        /// Its number by its contents.
        holds: usize,
        /// Its number by its name.
        named: usize,
    },
    /// The contents are not a model that Shoal can read; the message names the part.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
}

/// An opened and validated model.
pub struct ModelFile {
    parts: Vec<PathBuf>,
    gguf: Gguf,
    shape: ModelShape,
}

impl ModelFile {
    /// Opens the model that `path` is, or is any part of.
    pub fn open(path: &Path) -> Result<Self, ModelFileError> {
        let parts = part_paths(path)?;
        let opened = parts.iter().map(|part| open_part(part)).collect::<Result<Vec<Part>, _>>()?;
        let gguf = Gguf::read(opened)?;
        check_names(&parts, &gguf)?;
        let shape = gguf::model_shape(&gguf)?;
        Ok(Self { parts, gguf, shape })
    }

    /// The only or first file.
    pub fn path(&self) -> &Path {
        self.parts.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// All files, in order.
    pub fn parts(&self) -> &[PathBuf] {
        &self.parts
    }

    /// The contents.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// The model, described.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// A name for people and clients: the first file's, without its extension and part number.
    pub fn name(&self) -> String {
        let stem = self.path().file_stem().unwrap_or_default().to_string_lossy();
        match (self.parts.len(), stem.rfind("-00001-of-")) {
            (2.., Some(end)) => stem[..end].to_owned(),
            _ => stem.into_owned(),
        }
    }
}

fn part_paths(path: &Path) -> Result<Vec<PathBuf>, ModelFileError> {
    if path.exists() && !path.is_file() {
        return Err(ModelFileError::NotAFile(path.to_owned()));
    }
    let siblings = path.file_name().and_then(|name| name.to_str()).and_then(gguf::split::sibling_names);
    let Some(names) = siblings else { return Ok(vec![path.to_owned()]) };
    let parts: Vec<PathBuf> = names.iter().map(|name| path.with_file_name(name)).collect();
    let missing: Vec<String> =
        names.iter().zip(&parts).filter(|(_, part)| !part.is_file()).map(|(name, _)| name.clone()).collect();
    if missing.is_empty() {
        Ok(parts)
    } else {
        Err(ModelFileError::MissingParts { given: path.to_owned(), missing, total: names.len() })
    }
}

/// Parts under each other's names make one model, but llama.cpp, which goes by the names, could not load it.
fn check_names(parts: &[PathBuf], gguf: &Gguf) -> Result<(), ModelFileError> {
    let misnamed = parts.iter().enumerate().find_map(|(i, path)| {
        let holds = gguf.parts().iter().position(|part| part.name == path.display().to_string())?;
        (holds != i).then(|| ModelFileError::Misnamed { path: path.clone(), holds: holds + 1, named: i + 1 })
    });
    misnamed.map_or(Ok(()), Err)
}

fn open_part(path: &Path) -> Result<Part, ModelFileError> {
    let failed = |source| ModelFileError::Open { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    Ok(Part::new(path.display().to_string(), file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model;

    fn refusal(path: &Path) -> String {
        ModelFile::open(path).err().unwrap().to_string()
    }

    // Field case 14.
    #[test]
    fn any_part_of_a_split_model_opens_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        for part in test_model::write_split(folder.path()) {
            let model = ModelFile::open(&part).unwrap();
            assert_eq!(model.shape().n_layer(), test_model::N_LAYER);
            assert_eq!((model.parts().len(), model.name().as_str()), (2, "tiny"));
        }
    }

    // Field case 14.
    #[test]
    fn a_missing_part_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = test_model::write_split(folder.path());
        std::fs::remove_file(&first).unwrap();
        let error = refusal(&second);
        assert!(error.contains("one is missing beside it: tiny-00001-of-00002.gguf"), "{error}");
    }

    // Field case 14.
    #[test]
    fn a_truncated_part_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = test_model::write_split(folder.path());
        let bytes = std::fs::read(&second).unwrap();
        std::fs::write(&second, &bytes[..bytes.len() - 40]).unwrap();
        let error = refusal(&first);
        assert!(error.contains("tiny-00002-of-00002.gguf") && error.contains("truncated"), "{error}");
    }

    // Field case 14.
    #[test]
    fn parts_in_the_wrong_order_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = test_model::write_split(folder.path());
        let other = folder.path().join("other");
        std::fs::rename(&first, &other).unwrap();
        std::fs::rename(&second, &first).unwrap();
        std::fs::rename(&other, &second).unwrap();
        let error = refusal(&first);
        assert!(error.contains("tiny-00001-of-00002.gguf holds part 2"), "{error}");
    }

    #[test]
    fn what_is_no_model_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        assert!(refusal(folder.path()).contains("is not a file"));
        assert!(refusal(&folder.path().join("none.gguf")).contains("none.gguf"));
        let text = folder.path().join("text.gguf");
        std::fs::write(&text, b"hello, world").unwrap();
        assert!(refusal(&text).contains("text.gguf"));
    }
}
