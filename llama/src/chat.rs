//! Chat templates: from messages to a prompt, and from generated text to a message, as llama-server does it.
//!
//! Templates run in llama.cpp's own engine (common/chat.h), through llama-sys/shim/chat.cpp. Everything from outside
//! is checked before, since that engine recurses on nested input. Works with a vocabulary-only [`Model`]; knows
//! nothing of HTTP, and generates nothing.

mod message;
mod parser;
mod request;

use std::ptr::NonNull;
use std::sync::Arc;

use llama_sys as sys;
use serde::Deserialize;

use crate::grammar::{Grammar, GrammarError, ThinkingTags};
use crate::shim::{self, ShimError, ShimErrorKind};
use crate::{AddSpecial, Model, Special, Token, Vocab};

use message::NotAContinuation;
use parser::{Nesting, ParserParams};
use request::Checked;

pub use message::{ChatDelta, ChatMessage, ToolCall};
pub use parser::{ChatParser, ChatStream, Completeness};
pub use request::{ChatRequest, Continuation, NamedSchema, ReasoningFormat, ResponseFormat};

/// Why a chat went wrong, and whose fault it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The request is wrong, or the template refuses it: the client's fault.
    #[error("{reason}")]
    Request {
        /// The field, if it is known.
        param: Option<String>,
        /// What is wrong.
        reason: String,
    },
    /// The template itself cannot be used: the operator's fault.
    #[error("the chat template cannot be used: {reason}")]
    Template {
        /// What llama.cpp says.
        reason: String,
    },
    /// The model generated something that is no message.
    #[error("the model's answer cannot be parsed: {reason}")]
    Output {
        /// What is wrong.
        reason: String,
    },
    /// Nobody's fault outside.
    #[error("chat handling failed: {reason}")]
    Internal {
        /// What happened.
        reason: String,
    },
}

impl ChatError {
    fn internal(error: &ShimError) -> Self {
        Self::Internal { reason: error.message.clone() }
    }
}

impl From<NotAContinuation> for ChatError {
    fn from(error: NotAContinuation) -> Self {
        Self::Output { reason: error.to_string() }
    }
}

/// What a template can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct Capabilities {
    /// Describes tools to the model.
    pub tools: bool,
    /// Renders calls of tools.
    pub tool_calls: bool,
    /// Renders several calls in one message.
    pub parallel_tool_calls: bool,
    /// Can turn thinking on and off.
    pub thinking: bool,
}

/// The chat templates of a model. A cheap handle.
#[derive(Debug, Clone)]
pub struct ChatTemplates {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    handle: Handle,
    vocab: Vocab,
    source: String,
    is_explicit: bool,
    capabilities: Capabilities,
}

#[derive(Debug)]
struct Handle(NonNull<sys::shoal_chat_templates>);

// SAFETY: templates are not changed after they were made; rendering takes them as const and keeps its state in a
// local context ("The AST is shared between threads, so visit and execute must be const", common/jinja/runtime.h), as
// llama-server does from its HTTP threads. They hold no pointer to the model (common/chat.cpp).
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by shoal_chat_templates_new, freed once.
        unsafe { sys::shoal_chat_templates_free(self.0.as_ptr()) };
    }
}

/// What shoal_chat_templates_describe reports.
#[derive(Debug, Deserialize)]
struct Description {
    source: String,
    explicit: bool,
    supports_thinking: bool,
    capabilities: DescribedCapabilities,
}

#[derive(Debug, Deserialize)]
struct DescribedCapabilities {
    supports_tools: bool,
    supports_tool_calls: bool,
    supports_parallel_tool_calls: bool,
}

/// What shoal_chat_templates_apply reports.
#[derive(Debug, Deserialize)]
struct Applied {
    prompt: String,
    grammar: String,
    grammar_lazy: bool,
    triggers: Vec<Trigger>,
    preserved_tokens: Vec<String>,
    additional_stops: Vec<String>,
    generation_prompt: String,
    thinking_start: String,
    thinking_ends: Vec<String>,
    format: i32,
    parser: String,
}

#[derive(Debug, Deserialize)]
struct Trigger {
    kind: TriggerKind,
    value: String,
    token: i32,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum TriggerKind {
    Word,
    Pattern,
    PatternFull,
    Token,
}

/// A rendered request.
#[derive(Debug, Clone)]
pub struct ChatPrompt {
    /// To be tokenised with special tokens parsed, and with the BOS that the vocabulary adds: the template's own BOS
    /// has been taken off if it adds one.
    pub prompt: String,
    /// What the answer must follow.
    pub grammar: Option<Grammar>,
    /// Texts that end the answer, besides the request's.
    pub stops: Vec<String>,
    /// Special tokens whose text the parser needs to see in the answer.
    pub preserved_tokens: Vec<Token>,
    /// Takes the answer apart.
    pub parser: ChatParser,
}

impl ChatTemplates {
    /// The templates of `model`, or the one whose source is `override_source`.
    pub fn new(model: &Model, override_source: Option<&str>) -> Result<Self, ChatError> {
        let template_error = |error: ShimError| ChatError::Template { reason: error.message };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the model is valid; the shim reads the source during the call and catches every exception
        // (shim/chat.cpp).
        shim::call(|error| unsafe {
            let source = shim::borrow(override_source.unwrap_or_default());
            sys::shoal_chat_templates_new(model.as_ptr(), source, &raw mut handle, error)
        })
        .map_err(template_error)?;
        let handle =
            NonNull::new(handle).ok_or(ChatError::Internal { reason: "no template was made".to_owned() })?;
        let handle = Handle(handle);
        // SAFETY: the handle is valid; every exception is caught (shim/chat.cpp).
        let json = shim::call_for_text(|out, error| unsafe {
            sys::shoal_chat_templates_describe(handle.0.as_ptr(), out, error)
        })
        .map_err(template_error)?;
        let described: Description = parse_reply(&json)?;
        let capabilities = Capabilities {
            tools: described.capabilities.supports_tools,
            tool_calls: described.capabilities.supports_tool_calls,
            parallel_tool_calls: described.capabilities.supports_parallel_tool_calls,
            thinking: described.supports_thinking,
        };
        let (source, is_explicit) = (described.source, described.explicit);
        Ok(Self {
            inner: Arc::new(Inner { handle, vocab: model.vocab(), source, is_explicit, capabilities }),
        })
    }

    /// The template's source.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.inner.source
    }

    /// False if neither the model nor the caller has a template, and ChatML is used.
    #[must_use]
    pub fn is_explicit(&self) -> bool {
        self.inner.is_explicit
    }

    /// What the template can do.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.inner.capabilities
    }

    /// Renders `request`. Takes milliseconds, and with 20 tools some 20: llama.cpp finds out anew each time how the
    /// template marks tool calls and reasoning. Needs about 1 MiB of stack.
    pub fn apply(&self, request: &ChatRequest) -> Result<ChatPrompt, ChatError> {
        let checked = request.check(&self.inner.capabilities)?;
        let json = checked.json.to_string();
        // SAFETY: the handle is valid; the shim reads `json` during the call and catches every exception
        // (shim/chat.cpp).
        let reply = shim::call_for_text(|out, error| unsafe {
            sys::shoal_chat_templates_apply(self.inner.handle.0.as_ptr(), shim::borrow(&json), out, error)
        })
        .map_err(|error| match error.kind {
            ShimErrorKind::OutOfMemory => ChatError::internal(&error),
            // The template's own raise_exception, a function it lacks, a tool's schema that cannot be converted.
            ShimErrorKind::Refused => ChatError::Request { param: None, reason: error.message },
        })?;
        self.prompt(request, &checked, parse_reply(&reply)?)
    }

    fn prompt(
        &self,
        request: &ChatRequest,
        checked: &Checked,
        applied: Applied,
    ) -> Result<ChatPrompt, ChatError> {
        let params = ParserParams {
            format: applied.format,
            parser: &applied.parser,
            generation_prompt: &applied.generation_prompt,
            reasoning_format: checked.reasoning_format,
        };
        let nesting = if checked.has_structure { Nesting::Json } else { Nesting::Flat };
        let mut parser = ChatParser::new(&params, nesting)?;
        if checked.is_continuation {
            parser = parser.continuing()?;
        }
        let preserved =
            applied.preserved_tokens.iter().filter_map(|text| self.single_token(text).transpose());
        let mut preserved_tokens = preserved.collect::<Result<Vec<_>, _>>()?;
        let grammar = match &request.grammar {
            _ if !applied.grammar.is_empty() => Some(self.template_grammar(&applied, &mut preserved_tokens)?),
            Some(gbnf) => Some(Grammar::new(gbnf.as_str())),
            None if checked.must_call => {
                let reason =
                    "llama.cpp cannot tell how this model's chat template marks tool calls".to_owned();
                return Err(ChatError::Request { param: Some("tool_choice".to_owned()), reason });
            }
            None => None,
        };
        if let Some(grammar) = &grammar {
            grammar.check(&self.inner.vocab).map_err(|error| grammar_error(request, error))?;
        }
        let stops = applied.additional_stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Ok(ChatPrompt { prompt: applied.prompt, grammar, stops, preserved_tokens, parser })
    }

    /// The token whose text is `text`, if there is one.
    fn single_token(&self, text: &str) -> Result<Option<Token>, ChatError> {
        let tokens = self.inner.vocab.tokenize(text, AddSpecial::No, Special::Control);
        match tokens.map_err(|error| ChatError::Internal { reason: error.to_string() })?[..] {
            [token] => Ok(Some(token)),
            _ => Ok(None),
        }
    }

    /// Triggers become patterns and tokens as in common_sampler_init (common/sampling.cpp) and llama-server: a word
    /// that is one token is that token, which must then be visible in the text.
    fn template_grammar(&self, applied: &Applied, preserved: &mut Vec<Token>) -> Result<Grammar, ChatError> {
        let mut grammar = Grammar {
            gbnf: applied.grammar.clone(),
            lazy: applied.grammar_lazy,
            prefill: applied.generation_prompt.clone(),
            ..Grammar::default()
        };
        if !applied.grammar_lazy {
            return Ok(grammar);
        }
        if !applied.thinking_start.is_empty() && !applied.thinking_ends.is_empty() {
            let (start, ends) = (applied.thinking_start.clone(), applied.thinking_ends.clone());
            grammar.thinking = Some(ThinkingTags { start, ends });
        }
        for Trigger { kind, value, token } in &applied.triggers {
            match kind {
                TriggerKind::Word => match self.single_token(value)? {
                    Some(token) => {
                        grammar.trigger_tokens.push(token);
                        if !preserved.contains(&token) {
                            preserved.push(token);
                        }
                    }
                    None => grammar.trigger_patterns.push(escape_pattern(value)),
                },
                TriggerKind::Token => grammar.trigger_tokens.push(Token(*token)),
                TriggerKind::Pattern => grammar.trigger_patterns.push(value.clone()),
                TriggerKind::PatternFull => grammar.trigger_patterns.push(anchor_pattern(value)),
            }
        }
        Ok(grammar)
    }
}

/// A grammar that cannot be used is the fault of whoever wrote it or the schema it was made of.
fn grammar_error(request: &ChatRequest, error: GrammarError) -> ChatError {
    if let GrammarError::OutOfMemory { .. } = error {
        return ChatError::Internal { reason: error.to_string() };
    }
    let param = match request {
        ChatRequest { grammar: Some(_), .. } => "grammar",
        ChatRequest { json_schema: Some(_), .. } => "json_schema",
        ChatRequest { response_format: Some(_), .. } => "response_format",
        _ => "tools",
    };
    ChatError::Request { param: Some(param.to_owned()), reason: error.to_string() }
}

fn parse_reply<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, ChatError> {
    serde_json::from_str(json).map_err(|error| ChatError::Internal { reason: error.to_string() })
}

/// A pattern that matches `word`, as llama.cpp's regex_escape makes it (common/common.cpp).
fn escape_pattern(word: &str) -> String {
    let mut pattern = String::with_capacity(word.len());
    for character in word.chars() {
        if ".^$|()*+?[]{}\\".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}

fn anchor_pattern(pattern: &str) -> String {
    let start = if pattern.starts_with('^') { "" } else { "^" };
    let end = if pattern.ends_with('$') { "" } else { "$" };
    if pattern.is_empty() { "^$".to_owned() } else { format!("{start}{pattern}{end}") }
}
