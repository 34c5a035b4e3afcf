//! The documents that are generated from code, so that they cannot say something else than the code does.

use anyhow::{Context, Result};
use protocol::plan_files;

use crate::repository::root;

/// A generated document.
pub struct Document {
    /// Its path from the root of the checkout.
    pub path: String,
    /// The whole of its text.
    pub text: String,
}

/// Every generated document, as the code now has it.
pub fn all() -> Vec<Document> {
    let architectures =
        Document { path: "docs/architectures.md".to_owned(), text: gguf::architectures::markdown() };
    let schemas = plan_files::schemas().into_iter().map(|(name, schema)| Document {
        path: format!("docs/schema/{name}.schema.json"),
        text: format!("{:#}\n", schema.as_value()),
    });
    std::iter::once(architectures).chain(schemas).collect()
}

/// Writes every generated document to its place.
pub fn write_all() -> Result<()> {
    for document in all() {
        let path = root().join(&document.path);
        std::fs::write(&path, document.text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}
