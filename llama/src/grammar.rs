//! Grammars that constrain what is generated: where they come from, and whether llama.cpp can use them.
//!
//! [`Grammar`] is plain data that can cross the wire; a [`Sampler`](crate::sampler::Sampler) is made from it where
//! tokens are chosen. Nothing here knows probabilities.

mod constraint;
mod schema;
mod state;

use llama_sys as sys;
use serde::{Deserialize, Serialize};

use crate::shim::{self, ShimError, ShimErrorKind};
use crate::{Token, Vocab};

use state::GrammarState;

pub(crate) use constraint::Constraint;
pub use schema::SchemaError;
pub(crate) use schema::prepare as prepare_schema;

/// Longest grammar in bytes. Parsing takes time in proportion to it, at best.
pub const MAX_GBNF: usize = 1 << 20;

/// A grammar in llama.cpp's GBNF (start symbol `root`), and when it binds.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Grammar {
    /// The rules.
    pub gbnf: String,
    /// Bind only after a trigger.
    pub lazy: bool,
    /// Regular expressions (ECMAScript) over the generated text; the grammar covers the text from the first group on
    /// that matched something, or else from the match on. One that starts with `^` and ends with `$` is also
    /// matched against the whole text.
    pub trigger_patterns: Vec<String>,
    /// Tokens that trigger; the grammar covers them.
    pub trigger_tokens: Vec<Token>,
    /// The end of the prompt, which a grammar that is not lazy covers too: what the template puts before the answer.
    pub prefill: String,
    /// Text in which a lazy grammar is not triggered.
    pub thinking: Option<ThinkingTags>,
}

/// What a model puts around its reasoning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThinkingTags {
    /// Begins it.
    pub start: String,
    /// Each of these ends it.
    pub ends: Vec<String>,
}

/// Why there is no grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The schema is not JSON.
    #[error("the JSON schema is not JSON: {reason}")]
    NotJson {
        /// What the JSON parser says.
        reason: String,
    },
    /// The schema is beyond what is converted safely.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The schema or the grammar is wrong, in llama.cpp's words.
    #[error("{reason}")]
    Refused {
        /// What is wrong.
        reason: String,
    },
    /// The grammar is too long.
    #[error("the grammar has {got} bytes, more than {MAX_GBNF}")]
    Bytes {
        /// Its length.
        got: usize,
    },
    /// No trigger could ever make the grammar bind.
    #[error("a lazy grammar without triggers would never bind")]
    NoTrigger,
    /// No memory for it.
    #[error("no memory for a grammar of {bytes} bytes")]
    OutOfMemory {
        /// Length of the grammar or schema.
        bytes: usize,
    },
}

impl GrammarError {
    fn from_shim(error: ShimError, bytes: usize) -> Self {
        match error.kind {
            ShimErrorKind::OutOfMemory => Self::OutOfMemory { bytes },
            ShimErrorKind::Refused => Self::Refused { reason: error.message },
        }
    }
}

impl Grammar {
    /// A grammar that binds from the first token.
    #[must_use]
    pub fn new(gbnf: impl Into<String>) -> Self {
        Self { gbnf: gbnf.into(), ..Self::default() }
    }

    /// Checks that llama.cpp can use the grammar with this vocabulary, which it may name tokens of, and that it allows
    /// its own [`prefill`](Self::prefill).
    pub fn check(&self, vocab: &Vocab) -> Result<(), GrammarError> {
        Constraint::new(vocab, self).map(|_| ())
    }
}

/// The grammar of all JSON texts that follow the JSON schema `schema`, as llama.cpp converts it
/// (common/json-schema-to-grammar.cpp).
///
/// Refused are schemas that are no JSON, that llama.cpp cannot convert, and those that would take it too much time or
/// stack. Needs about 100 KiB of stack.
pub fn json_schema_to_gbnf(schema: &str) -> Result<String, GrammarError> {
    let schema =
        serde_json::from_str(schema).map_err(|error| GrammarError::NotJson { reason: error.to_string() })?;
    let schema = prepare_schema(schema)?.to_string();
    // SAFETY: the shim reads `schema` during the call and catches every exception (shim/grammar.cpp).
    let gbnf = shim::call_for_text(|out, error| unsafe {
        sys::shoal_json_schema_to_gbnf(shim::borrow(&schema), out, error)
    })
    .map_err(|error| GrammarError::from_shim(error, schema.len()))?;
    if gbnf.len() > MAX_GBNF {
        return Err(GrammarError::Bytes { got: gbnf.len() });
    }
    Ok(gbnf)
}
