//! Takes generated text apart into content, reasoning and tool calls, with the parser that llama.cpp made for the
//! request (common/chat.cpp, `common_chat_parse`). Knows nothing of tokens.

use std::ptr::NonNull;
use std::sync::Arc;

use llama_sys as sys;
use serde::Serialize;

use super::message::{self, ChatDelta, ChatMessage, Ended};
use super::{ChatError, ReasoningFormat};
use crate::nesting::bracket_depth;
use crate::shim;

/// Deepest nesting of brackets in text that is parsed as JSON: llama.cpp's parser recurses, and needs about 3 KiB of
/// stack for each level.
const MAX_DEPTH: usize = 200;

/// Whether more text may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completeness {
    /// More may follow: what could become a tag is held back.
    Partial,
    /// This is all.
    Complete,
}

/// What a parser is made of.
#[derive(Debug, Serialize)]
pub(super) struct ParserParams<'a> {
    pub(super) format: i32,
    pub(super) parser: &'a str,
    pub(super) generation_prompt: &'a str,
    pub(super) reasoning_format: ReasoningFormat,
}

/// What the text may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nesting {
    /// JSON: tools or a schema were given.
    Json,
    /// Nothing that is parsed by recursion.
    Flat,
}

/// Takes the answers to one request apart. A cheap handle.
#[derive(Debug, Clone)]
pub struct ChatParser {
    handle: Arc<Handle>,
    nesting: Nesting,
    /// What the prompt holds of the answer already, and the parser reports again.
    prefill: Arc<ChatMessage>,
}

#[derive(Debug)]
struct Handle(NonNull<sys::shoal_chat_parser>);

// SAFETY: a shoal_chat_parser is not changed after it was made: parsing takes it as const, with all state in a local
// context (shim/chat.cpp; common/chat.cpp, common_chat_peg_parse; common/peg-parser.h, `parse` is const).
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by shoal_chat_parser_new, freed once.
        unsafe { sys::shoal_chat_parser_free(self.0.as_ptr()) };
    }
}

impl ChatParser {
    pub(super) fn new(params: &ParserParams<'_>, nesting: Nesting) -> Result<Self, ChatError> {
        let json = serde_json::to_string(params)
            .map_err(|error| ChatError::Internal { reason: error.to_string() })?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the shim reads `json` during the call and catches every exception (shim/chat.cpp).
        shim::call(|error| unsafe {
            sys::shoal_chat_parser_new(shim::borrow(&json), &raw mut handle, error)
        })
        .map_err(|error| ChatError::internal(&error))?;
        let handle =
            NonNull::new(handle).ok_or(ChatError::Internal { reason: "no parser was made".to_owned() })?;
        Ok(Self { handle: Arc::new(Handle(handle)), nesting, prefill: Arc::default() })
    }

    /// The same, for a request that continues an answer: what the prompt holds of it is not reported again.
    pub(super) fn continuing(mut self) -> Result<Self, ChatError> {
        self.prefill = Arc::new(self.parse("", Completeness::Partial)?);
        Ok(self)
    }

    /// True when all text is content, unchanged: parsing can be left out.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        // SAFETY: the handle is valid and not changed.
        unsafe { sys::shoal_chat_parser_is_plain(self.handle.0.as_ptr()) }
    }

    /// The message that `text`, all that was generated so far, is. Tool calls have an id only if the model gave one.
    pub fn parse(&self, text: &str, completeness: Completeness) -> Result<ChatMessage, ChatError> {
        if self.is_plain() {
            return Ok(ChatMessage { content: text.to_owned(), ..ChatMessage::default() });
        }
        if self.nesting == Nesting::Json && bracket_depth(text) > MAX_DEPTH {
            let reason = format!("its brackets nest deeper than {MAX_DEPTH} levels");
            return Err(ChatError::Output { reason });
        }
        let completeness = match completeness {
            Completeness::Partial => sys::SHOAL_PARTIAL,
            Completeness::Complete => sys::SHOAL_COMPLETE,
        };
        // SAFETY: the handle is valid; the shim reads `text` during the call and catches every exception
        // (shim/chat.cpp).
        let json = shim::call_for_text(|out, error| unsafe {
            sys::shoal_chat_parser_parse(self.handle.0.as_ptr(), shim::borrow(text), completeness, out, error)
        })
        .map_err(|error| ChatError::Output { reason: error.message })?;
        let message: ChatMessage =
            serde_json::from_str(&json).map_err(|error| ChatError::Internal { reason: error.to_string() })?;
        Ok(message.without(&self.prefill))
    }

    /// What `new` has more than `old`; both from [`ChatParser::parse`] of a growing text. For a stream, use
    /// [`ChatParser::stream`].
    pub fn diff(old: &ChatMessage, new: &ChatMessage) -> Result<Vec<ChatDelta>, ChatError> {
        let mut sent = old.tool_calls.len();
        message::deltas(old, new, &mut sent, Ended::Yes).map_err(ChatError::from)
    }

    /// A stream that turns pieces of text into deltas.
    #[must_use]
    pub fn stream(&self) -> ChatStream {
        ChatStream { parser: self.clone(), text: String::new(), sent: ChatMessage::default(), sent_calls: 0 }
    }
}

/// Turns a growing text into what is new in the message, as llama-server's streams do.
#[derive(Debug, Clone)]
pub struct ChatStream {
    parser: ChatParser,
    text: String,
    /// What the client has.
    sent: ChatMessage,
    sent_calls: usize,
}

impl ChatStream {
    /// What `text`, which follows all text pushed before, adds to the message.
    pub fn push(&mut self, text: &str) -> Result<Vec<ChatDelta>, ChatError> {
        if self.parser.is_plain() {
            self.sent.content.push_str(text);
            return Ok(if text.is_empty() { Vec::new() } else { vec![ChatDelta::Content(text.to_owned())] });
        }
        self.text.push_str(text);
        self.update(Completeness::Partial, Ended::No)
    }

    /// The last deltas. [`Completeness::Partial`] if generation was cut off, by a length limit say: what follows the
    /// last complete part of the text is then taken as it is.
    pub fn finish(&mut self, completeness: Completeness) -> Result<Vec<ChatDelta>, ChatError> {
        if self.parser.is_plain() { Ok(Vec::new()) } else { self.update(completeness, Ended::Yes) }
    }

    /// The message so far, as the client has it.
    #[must_use]
    pub fn message(&self) -> &ChatMessage {
        &self.sent
    }

    fn update(&mut self, completeness: Completeness, ended: Ended) -> Result<Vec<ChatDelta>, ChatError> {
        let mut message = self.parser.parse(&self.text, completeness)?;
        if message == ChatMessage::default() {
            // Nothing is recognised yet; with something sent before, this is a text that fits only as a whole.
            return Ok(Vec::new());
        }
        message.fill_tool_call_ids(&self.sent);
        let deltas = message::deltas(&self.sent, &message, &mut self.sent_calls, ended)?;
        self.sent = message::keep_longer(&self.sent, message);
        Ok(deltas)
    }
}
