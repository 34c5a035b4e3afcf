//! The vocabulary of the test model, loaded once per process.

use std::path::PathBuf;
use std::sync::OnceLock;

use llama::{Model, ModelParams};

/// Where `scripts/fetch-models.sh` puts models.
fn models_folder() -> PathBuf {
    let under =
        |variable: &str, rest: &str| std::env::var_os(variable).map(|base| PathBuf::from(base).join(rest));
    std::env::var_os("SHOAL_MODELS")
        .map(PathBuf::from)
        .or_else(|| under("XDG_CACHE_HOME", "shoal/models"))
        .or_else(|| under("HOME", ".cache/shoal/models"))
        .expect("HOME is set")
}

/// SmolLM2-135M-Instruct without its weights.
pub(crate) fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = models_folder().join("SmolLM2-135M-Instruct.Q4_1.gguf");
        Model::load(&path, ModelParams::vocabulary_only()).expect("scripts/fetch-models.sh fetches it")
    })
}
