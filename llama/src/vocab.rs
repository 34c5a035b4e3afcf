//! A model's vocabulary: text to tokens and back.
//!
//! llama.cpp asserts on tokens that do not exist and on slices without a tokenizer; both are caught here first.

use std::ffi::{CStr, c_char};

use llama_sys as sys;
use serde::{Deserialize, Serialize};

use crate::shim;
use crate::{Error, Model};

/// A token id. Ids below zero mean "none" to llama.cpp and are never in a vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(pub i32);

/// Whether tokenising adds what the model's metadata asks for around a text (usually BOS before it).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddSpecial {
    /// Add BOS and EOS where the model says so.
    AsModelSays,
    /// Only the text.
    No,
}

/// What text such as `<|im_end|>` means: the control token of that name, or those ten characters.
///
/// Prompts that a template made want [`Special::Control`]; text that a user typed wants [`Special::Text`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// Read and write control tokens as their names.
    Control,
    /// Read names of control tokens as plain text, and write control tokens as nothing.
    Text,
}

/// What one must know of a vocabulary to draw tokens, apart from their text, which takes far more memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VocabularyFacts {
    /// `general.architecture` of the model.
    pub(crate) architecture: String,
    /// Number of tokens, which is also the length of a row of logits.
    pub n_tokens: u32,
    /// Tokens that end a generation, in order.
    pub ends: Vec<Token>,
    /// Tokens that must never be generated (`tokenizer.ggml.suppress_tokens`).
    pub suppressed: Vec<Token>,
}

impl VocabularyFacts {
    /// Whether generation ends with `token`. False for a token that does not exist.
    pub fn is_end_of_generation(&self, token: Token) -> bool {
        self.ends.binary_search(&token).is_ok()
    }
}

/// Vocabulary of a model. Cheap to clone; keeps the model alive.
#[derive(Debug, Clone)]
pub struct Vocab {
    handle: *const sys::llama_vocab,
    model: Model,
}

// SAFETY: the vocabulary is a part of the model, written only while that loads; its functions are const members that
// lock nothing and cache nothing (llama-vocab.cpp, `llama_vocab::impl`).
unsafe impl Send for Vocab {}
// SAFETY: as above.
unsafe impl Sync for Vocab {}

impl Vocab {
    pub(crate) fn of(model: &Model) -> Self {
        // SAFETY: the model lives; the pointer is to a member of it (llama-model.cpp, `llama_model_get_vocab`).
        let handle = unsafe { sys::llama_model_get_vocab(model.as_ptr()) };
        Self { handle, model: model.clone() }
    }

    pub(crate) fn as_ptr(&self) -> *const sys::llama_vocab {
        self.handle
    }

    /// The model it belongs to.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Number of tokens, which is also the length of a row of logits.
    pub fn n_tokens(&self) -> u32 {
        // SAFETY: the vocabulary lives (llama-vocab.cpp).
        u32::try_from(unsafe { sys::llama_vocab_n_tokens(self.handle) }).unwrap_or(0)
    }

    /// What drawing tokens needs of it.
    pub fn facts(&self) -> VocabularyFacts {
        let n_tokens = self.n_tokens();
        // A vocabulary's size is an i32 in llama.cpp.
        let tokens = (0..i32::try_from(n_tokens).unwrap_or(i32::MAX)).map(Token);
        VocabularyFacts {
            architecture: self.model.metadata("general.architecture").unwrap_or_default(),
            n_tokens,
            ends: tokens.filter(|token| self.is_end_of_generation(*token)).collect(),
            suppressed: self.suppressed(),
        }
    }

    /// Tokens that must never be generated.
    pub(crate) fn suppressed(&self) -> Vec<Token> {
        let mut count = 0;
        // SAFETY: the vocabulary lives; the array of `count` tokens belongs to it, and is null if there are none
        // (src/llama-vocab.cpp, llama_vocab_get_suppress_tokens).
        let tokens = unsafe {
            let tokens = sys::llama_vocab_get_suppress_tokens(self.handle, &raw mut count);
            if tokens.is_null() {
                &[]
            } else {
                std::slice::from_raw_parts(tokens, usize::try_from(count).unwrap_or(0))
            }
        };
        tokens.iter().copied().map(Token).filter(|token| self.check(*token).is_ok()).collect()
    }

    /// Whether there is a tokenizer at all; slices other than the last have none, and models whose text was left out.
    pub fn has_tokenizer(&self) -> bool {
        // SAFETY: the vocabulary lives (llama-vocab.cpp).
        unsafe { sys::llama_vocab_type(self.handle) != sys::LLAMA_VOCAB_TYPE_NONE }
    }

    /// Tokens of `text`.
    pub fn tokenize(&self, text: &str, add: AddSpecial, special: Special) -> Result<Vec<Token>, Error> {
        let refuse = |reason: &str| Error::Tokenize { bytes: text.len(), reason: reason.to_owned() };
        if !self.has_tokenizer() {
            return Err(refuse("the model has no tokenizer"));
        }
        let size = i32::try_from(text.len()).map_err(|_| refuse("more than 2 GiB"))?;
        // A token is a byte or more of text, apart from those added around it.
        let mut tokens = vec![Token(0); text.len() + 8];
        let mut count = self.tokenize_into(text, size, &mut tokens, (add, special))?;
        if count < 0 {
            let room = count.checked_neg().ok_or_else(|| refuse("more tokens than 2^31"))?;
            tokens.resize(room as usize, Token(0));
            count = self.tokenize_into(text, size, &mut tokens, (add, special))?;
        }
        tokens.truncate(
            usize::try_from(count).map_err(|_| refuse("llama.cpp changed its mind about the length"))?,
        );
        Ok(tokens)
    }

    fn tokenize_into(
        &self,
        text: &str,
        size: i32,
        tokens: &mut [Token],
        (add, special): (AddSpecial, Special),
    ) -> Result<i32, Error> {
        let capacity = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
        let mut count = 0;
        shim::call(|error| {
            // SAFETY: pointers and lengths belong together, a tokenizer exists, and `Token` is a transparent i32
            // (llama-vocab.cpp, `llama_vocab::tokenize`).
            unsafe {
                sys::shoal_tokenize(
                    self.handle,
                    text.as_ptr().cast::<c_char>(),
                    size,
                    tokens.as_mut_ptr().cast::<sys::llama_token>(),
                    capacity,
                    add == AddSpecial::AsModelSays,
                    special == Special::Control,
                    &raw mut count,
                    error,
                )
            }
        })
        .map_err(|error| Error::Tokenize { bytes: text.len(), reason: error.message })?;
        Ok(count)
    }

    /// Appends the bytes of `token` to `text`. They need not be whole UTF-8 characters.
    pub fn append_bytes(&self, token: Token, special: Special, text: &mut Vec<u8>) -> Result<(), Error> {
        self.check(token)?;
        let start = text.len();
        // Most tokens are shorter than this.
        let mut room = 64;
        loop {
            text.resize(start + room, 0);
            let size = self.piece_into(token, special, &mut text[start..])?;
            if let Ok(size) = usize::try_from(size) {
                text.truncate(start + size);
                return Ok(());
            }
            room = size.unsigned_abs() as usize;
        }
    }

    /// Bytes of `token`.
    pub fn token_bytes(&self, token: Token, special: Special) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.append_bytes(token, special, &mut bytes)?;
        Ok(bytes)
    }

    fn piece_into(&self, token: Token, special: Special, bytes: &mut [u8]) -> Result<i32, Error> {
        let capacity = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
        let mut size = 0;
        shim::call(|error| {
            // SAFETY: the token exists and pointer and length belong together (llama-vocab.cpp, `token_to_piece`).
            unsafe {
                sys::shoal_token_to_piece(
                    self.handle,
                    token.0,
                    bytes.as_mut_ptr().cast::<c_char>(),
                    capacity,
                    special == Special::Control,
                    &raw mut size,
                    error,
                )
            }
        })
        .map_err(Error::exception("writing a token as text"))?;
        Ok(size)
    }

    /// The token as it stands in the vocabulary, with the tokenizer's own marks for spaces and bytes.
    pub fn token_text(&self, token: Token) -> Result<String, Error> {
        self.check(token)?;
        // SAFETY: the token exists; the string belongs to the vocabulary (llama-vocab.cpp, `token_get_text`).
        let text = unsafe { CStr::from_ptr(sys::llama_vocab_get_text(self.handle, token.0)) };
        Ok(text.to_string_lossy().into_owned())
    }

    /// Whether generation ends with `token`. False for a token that does not exist.
    pub fn is_end_of_generation(&self, token: Token) -> bool {
        // SAFETY: the token exists (llama-vocab.cpp, `is_eog`).
        self.check(token).is_ok() && unsafe { sys::llama_vocab_is_eog(self.handle, token.0) }
    }

    /// Whether `token` is a control token. False for a token that does not exist.
    pub fn is_control(&self, token: Token) -> bool {
        // SAFETY: the token exists (llama-vocab.cpp, `is_control`).
        self.check(token).is_ok() && unsafe { sys::llama_vocab_is_control(self.handle, token.0) }
    }

    /// The token that begins a text, if there is one.
    pub fn bos(&self) -> Option<Token> {
        // SAFETY: the vocabulary lives; returns a stored id (llama-vocab.cpp, `token_bos`).
        existing(unsafe { sys::llama_vocab_bos(self.handle) })
    }

    /// The token that ends a text, if there is one.
    pub fn eos(&self) -> Option<Token> {
        // SAFETY: the vocabulary lives; returns a stored id (llama-vocab.cpp, `token_eos`).
        existing(unsafe { sys::llama_vocab_eos(self.handle) })
    }

    /// Whether [`AddSpecial::AsModelSays`] puts BOS before a text.
    pub fn adds_bos(&self) -> bool {
        // SAFETY: the vocabulary lives; returns a stored flag (llama-vocab.cpp, `get_add_bos`).
        unsafe { sys::llama_vocab_get_add_bos(self.handle) }
    }

    fn check(&self, token: Token) -> Result<(), Error> {
        let n_tokens = self.n_tokens();
        let exists = u32::try_from(token.0).is_ok_and(|id| id < n_tokens);
        if exists && self.has_tokenizer() {
            return Ok(());
        }
        Err(Error::Token { token: token.0, n_tokens: if self.has_tokenizer() { n_tokens } else { 0 } })
    }
}

fn existing(id: sys::llama_token) -> Option<Token> {
    (id >= 0).then_some(Token(id))
}
