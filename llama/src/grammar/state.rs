//! A grammar at work: which tokens it allows next. Owns the shim's handle; knows nothing of probabilities.

use std::ptr::NonNull;

use llama_sys as sys;

use super::{Grammar, GrammarError, MAX_GBNF};
use crate::shim::{self, ShimError};
use crate::{Token, Vocab};

/// How far a grammar has been read.
pub(crate) struct GrammarState {
    handle: NonNull<sys::shoal_grammar>,
    /// The handle points into it.
    _vocab: Vocab,
}

// SAFETY: a shoal_grammar is plain memory that only its owner uses, with no thread's state (shim/grammar.cpp,
// src/llama-grammar.cpp); the vocabulary it points to is immutable once loaded (src/llama-vocab.cpp).
unsafe impl Send for GrammarState {}

impl std::fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarState").field("is_binding", &self.is_binding()).finish_non_exhaustive()
    }
}

impl GrammarState {
    pub(crate) fn new(vocab: &Vocab, grammar: &Grammar) -> Result<Self, GrammarError> {
        let bytes = grammar.gbnf.len();
        if bytes > MAX_GBNF {
            return Err(GrammarError::Bytes { got: bytes });
        }
        if grammar.lazy && grammar.trigger_patterns.is_empty() && grammar.trigger_tokens.is_empty() {
            return Err(GrammarError::NoTrigger);
        }
        let patterns: Vec<_> = grammar.trigger_patterns.iter().map(|pattern| shim::borrow(pattern)).collect();
        let tokens: Vec<i32> = grammar.trigger_tokens.iter().map(|token| token.0).collect();
        let config = sys::shoal_grammar_config {
            gbnf: shim::borrow(&grammar.gbnf),
            lazy: grammar.lazy,
            trigger_patterns: patterns.as_ptr(),
            n_trigger_patterns: patterns.len(),
            trigger_tokens: tokens.as_ptr(),
            n_trigger_tokens: tokens.len(),
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: `config` and all it points to outlive the call, which copies them; the vocabulary is kept below;
        // every exception is caught (shim/grammar.cpp).
        shim::call(|error| unsafe {
            sys::shoal_grammar_new(vocab.as_ptr(), &raw const config, &raw mut handle, error)
        })
        .map_err(|error| GrammarError::from_shim(error, bytes))?;
        match NonNull::new(handle) {
            Some(handle) => Ok(Self { handle, _vocab: vocab.clone() }),
            None => Err(GrammarError::OutOfMemory { bytes }),
        }
    }

    /// False while a lazy grammar waits for its trigger.
    fn is_binding(&self) -> bool {
        // SAFETY: the handle is valid until drop.
        unsafe { sys::shoal_grammar_is_binding(self.handle.as_ptr()) }
    }

    /// Sets the logits of candidates that are not allowed next to −∞.
    ///
    /// Each candidate's id must be a token of the vocabulary.
    pub(crate) fn mask(&self, candidates: &mut [sys::llama_token_data]) -> Result<(), ShimError> {
        let mut array = sys::llama_token_data_array {
            data: candidates.as_mut_ptr(),
            size: candidates.len(),
            selected: -1,
            sorted: false,
        };
        // SAFETY: `array` describes the slice, whose elements are only written to, in place
        // (src/llama-grammar.cpp, llama_grammar_apply_impl).
        shim::call(|error| unsafe { sys::shoal_grammar_apply(self.handle.as_ptr(), &raw mut array, error) })
    }

    pub(crate) fn allows(&self, token: Token) -> Result<bool, ShimError> {
        let mut one = [sys::llama_token_data { id: token.0, logit: 0.0, p: 0.0 }];
        self.mask(&mut one)?;
        Ok(one[0].logit.is_finite())
    }

    /// Moves on by `token`, a token of the vocabulary; an error, and no change, if it is not allowed.
    pub(crate) fn accept(&mut self, token: Token) -> Result<(), ShimError> {
        // SAFETY: the handle is valid until drop, and `&mut self` makes this the only use of it.
        shim::call(|error| unsafe { sys::shoal_grammar_accept(self.handle.as_ptr(), token.0, error) })
    }
}

impl Drop for GrammarState {
    fn drop(&mut self) {
        // SAFETY: made by shoal_grammar_new, freed once.
        unsafe { sys::shoal_grammar_free(self.handle.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::path::PathBuf;

    use super::*;
    use crate::{AddSpecial, Model, ModelParams, Special};

    fn vocab() -> Vocab {
        let under = |variable: &str, rest: &str| {
            std::env::var_os(variable).map(|base| PathBuf::from(base).join(rest))
        };
        let folder = std::env::var_os("SHOAL_MODELS")
            .map(PathBuf::from)
            .or_else(|| under("XDG_CACHE_HOME", "shoal/models"))
            .or_else(|| under("HOME", ".cache/shoal/models"))
            .unwrap();
        let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
        Model::load(&path, ModelParams::vocabulary_only()).unwrap().vocab()
    }

    fn all_tokens(vocab: &Vocab) -> Vec<sys::llama_token_data> {
        let n = i32::try_from(vocab.n_tokens()).unwrap();
        (0..n).map(|id| sys::llama_token_data { id, logit: 1.0, p: 0.0 }).collect()
    }

    /// llama.cpp's own grammar sampler.
    struct Reference(*mut sys::llama_sampler);

    impl Reference {
        fn new(vocab: &Vocab, gbnf: &str) -> Self {
            let gbnf = CString::new(gbnf).unwrap();
            // SAFETY: the strings end in NUL and are copied (src/llama-sampler.cpp).
            Self(unsafe { sys::llama_sampler_init_grammar(vocab.as_ptr(), gbnf.as_ptr(), c"root".as_ptr()) })
        }

        fn mask(&self, candidates: &mut [sys::llama_token_data]) {
            let (data, size) = (candidates.as_mut_ptr(), candidates.len());
            let mut array = sys::llama_token_data_array { data, size, selected: -1, sorted: false };
            // SAFETY: `array` describes the slice (src/llama-sampler.cpp).
            unsafe { sys::llama_sampler_apply(self.0, &raw mut array) };
        }
    }

    impl Drop for Reference {
        fn drop(&mut self) {
            // SAFETY: made by llama_sampler_init_grammar, freed once.
            unsafe { sys::llama_sampler_free(self.0) };
        }
    }

    #[test]
    fn the_same_tokens_are_allowed_as_by_llama_cpp() {
        let vocab = vocab();
        let texts = [
            ("root ::= \"{\" [a-z \\n]* \"}\" | [0-9]+", "{abc de\nf}"),
            ("root ::= item+\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c\\x85]+ \"\\n\"", "- eggs, süß 🦀\n- milk\n"),
            ("root ::= .*", "any 漢字"),
            ("root ::= \"a\" <jupyter_code> !<jupyter_code> \"b\"?", "a<jupyter_code>x"),
            ("root ::= ([一-龥] | [ぁ-ん])+", "漢字ひら"),
            ("root ::= (\"x\" | \"xy\" | \"xyz\")* \"end\"", "xyxyzxend"),
        ];
        let number = crate::grammar::json_schema_to_gbnf(
            r#"{"type": "object", "properties": {"n": {"type": "number"}}}"#,
        );
        let number = number.unwrap();
        for (gbnf, text) in texts.into_iter().chain([(number.as_str(), "{\"n\": -1.5e3}")]) {
            let mut ours = GrammarState::new(&vocab, &Grammar::new(gbnf)).unwrap();
            let theirs = Reference::new(&vocab, gbnf);
            for token in vocab.tokenize(text, AddSpecial::No, Special::Control).unwrap() {
                let (mut allowed, mut expected) = (all_tokens(&vocab), all_tokens(&vocab));
                ours.mask(&mut allowed).unwrap();
                theirs.mask(&mut expected);
                for (ours, theirs) in allowed.iter().zip(&expected) {
                    let token = vocab.token_text(Token(ours.id)).unwrap();
                    assert_eq!(ours.logit, theirs.logit, "{token:?} within {text:?}");
                }
                ours.accept(token).unwrap();
                // SAFETY: the sampler is valid, and allows the token (src/llama-grammar.cpp).
                unsafe { sys::llama_sampler_accept(theirs.0, token.0) };
            }
        }
    }
}
