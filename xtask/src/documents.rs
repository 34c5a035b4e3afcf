//! The documents that are generated from code, so that they cannot say something else than the code does.

use anyhow::{Context, Result};

use crate::repository::root;

/// A generated document.
pub struct Document {
    /// Its path from the root of the checkout.
    pub path: &'static str,
    /// The whole of its text.
    pub text: String,
}

/// Every generated document, as the code now has it.
pub fn all() -> Vec<Document> {
    vec![Document { path: "docs/architectures.md", text: gguf::architectures::markdown() }]
}

/// Writes every generated document to its place.
pub fn write_all() -> Result<()> {
    for document in all() {
        let path = root().join(document.path);
        std::fs::write(&path, document.text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}
