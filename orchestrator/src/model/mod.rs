//! What is known of the model in this process: its vocabulary and chat template. The only file that calls llama.cpp.
//!
//! Knows nothing of HTTP or of where tokens come from.

mod required_call;

use std::collections::HashSet;
use std::path::Path;

use llama::chat::{ChatError, ChatParser, ChatPrompt, ChatRequest, ChatTemplates, ResponseFormat};
use llama::grammar::json_schema_to_gbnf;
use llama::{AddSpecial, Model, ModelParams, Special, Token, Vocab, grammar};
use protocol::sampling::{Grammar, GrammarBinding, ThinkingTags};
use serde_json::Value;

use crate::openai::ApiError;

/// A template for models that speak ChatML but whose own template cannot describe tools.
const CHATML_TOOLS: &str = include_str!("chatml_tools.jinja");

/// How ChatML begins a message, and what a model's template is recognised by.
const CHATML_START: &str = "<|im_start|>";

/// Why a model cannot be used for text.
#[derive(Debug, thiserror::Error)]
pub enum TextModelError {
    /// Its vocabulary cannot be loaded.
    #[error("cannot load the vocabulary")]
    Vocabulary(#[from] llama::Error),
    /// Its chat template cannot be used.
    #[error("cannot use the chat template; another one can be given instead")]
    Template(#[from] ChatError),
}

/// A model's vocabulary and templates.
#[derive(Debug)]
pub(crate) struct TextModel {
    model: Model,
    vocab: Vocab,
    templates: ChatTemplates,
    /// Used for requests with tools, where the model's own cannot be.
    tool_templates: Option<ChatTemplates>,
}

/// Whether a control token is written as its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Control {
    Hidden,
    Shown,
}

/// Numbers for people.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    pub(crate) n_ctx_train: u32,
    pub(crate) n_vocab: u32,
    pub(crate) n_embd: u32,
}

/// A chat as a prompt, and how to read the answer.
pub(crate) struct Rendered {
    pub(crate) tokens: Vec<i32>,
    pub(crate) grammar: Option<Grammar>,
    /// Texts that end the answer, besides the request's.
    pub(crate) stops: Vec<String>,
    /// Control tokens that the parser needs to see.
    pub(crate) shown: HashSet<i32>,
    pub(crate) parser: ChatParser,
    /// The beginning of the answer, which the prompt ends with.
    pub(crate) begun: String,
}

impl TextModel {
    /// Loads what is needed of `path`, with the chat template `template` in place of the model's own if it is given.
    pub(crate) fn load(path: &Path, template: Option<&str>) -> Result<Self, TextModelError> {
        let model = Model::load(path, ModelParams::vocabulary_only())?;
        let templates = ChatTemplates::new(&model, template)?;
        if !templates.is_explicit() {
            tracing::warn!(
                "the model has no chat template: ChatML is used, which it may not have been taught"
            );
        }
        let can_call = templates.capabilities().tools || templates.capabilities().tool_calls;
        let tool_templates = if !can_call && templates.source().contains(CHATML_START) {
            tracing::info!(
                "the chat template has no tools: requests with tools are written as ChatML models do it"
            );
            Some(ChatTemplates::new(&model, Some(CHATML_TOOLS))?)
        } else {
            None
        };
        Ok(Self { vocab: model.vocab(), model, templates, tool_templates })
    }

    /// Numbers for people.
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            n_ctx_train: self.model.n_ctx_train(),
            n_vocab: self.vocab.n_tokens(),
            n_embd: self.model.n_embd(),
        }
    }

    /// Tokens of the vocabulary.
    pub(crate) fn n_vocab(&self) -> u32 {
        self.vocab.n_tokens()
    }

    /// The tokens of a text, in which names of control tokens mean these, as in llama-server.
    pub(crate) fn tokenize(&self, text: &str) -> Result<Vec<i32>, ApiError> {
        let tokens = self.vocab.tokenize(text, AddSpecial::AsModelSays, Special::Control);
        let tokens = tokens.map_err(|error| ApiError::Refused { reason: error.to_string() })?;
        Ok(tokens.into_iter().map(|Token(id)| id).collect())
    }

    /// The bytes of a token.
    pub(crate) fn token_bytes(&self, id: i32, control: Control) -> Result<Vec<u8>, ApiError> {
        let special = match control {
            Control::Hidden => Special::Text,
            Control::Shown => Special::Control,
        };
        let bytes = self.vocab.token_bytes(Token(id), special);
        bytes.map_err(|error| ApiError::Engine { reason: error.to_string() })
    }

    /// Renders a chat and tokenises it.
    pub(crate) fn render(&self, mut chat: ChatRequest) -> Result<Rendered, ApiError> {
        let mut templates = &self.templates;
        if let Some(with_tools) = &self.tool_templates
            && chat.tools.is_some()
        {
            templates = with_tools;
            // A model that was not taught tools does not know when to stop calling them.
            chat.parallel_tool_calls.get_or_insert(false);
        }
        if required_call::is_required(&chat) {
            // Small models that must call go on to call; a client that wants several calls can say so.
            chat.parallel_tool_calls.get_or_insert(false);
        }
        let blame = |error| chat_error(&chat, error);
        let mut prompt = templates.apply(&chat).map_err(blame)?;
        let begun = required_call::begin(templates, &self.vocab, &chat, &mut prompt).map_err(blame)?;
        let ChatPrompt { prompt, grammar, stops, preserved_tokens, parser } = prompt;
        Ok(Rendered {
            tokens: self.tokenize(&prompt)?,
            grammar: grammar.map(on_the_wire),
            stops,
            shown: preserved_tokens.into_iter().map(|Token(id)| id).collect(),
            parser,
            begun,
        })
    }

    /// The grammar of texts that follow a JSON schema.
    pub(crate) fn schema_grammar(&self, schema: &Value) -> Result<Grammar, ApiError> {
        let gbnf = json_schema_to_gbnf(&schema.to_string());
        let gbnf = gbnf.map_err(|error| ApiError::invalid("json_schema", error.to_string()))?;
        self.grammar(gbnf)
    }

    /// A client's own grammar, checked.
    pub(crate) fn grammar(&self, gbnf: String) -> Result<Grammar, ApiError> {
        let grammar = grammar::Grammar::new(gbnf);
        grammar.check(&self.vocab).map_err(|error| ApiError::invalid("grammar", error.to_string()))?;
        Ok(on_the_wire(grammar))
    }
}

fn on_the_wire(grammar: grammar::Grammar) -> Grammar {
    let grammar::Grammar { gbnf, lazy, trigger_patterns, trigger_tokens, prefill, thinking } = grammar;
    let binding = if lazy {
        GrammarBinding::After {
            patterns: trigger_patterns,
            tokens: trigger_tokens.into_iter().map(|Token(id)| id).collect(),
            thinking: thinking.map(|grammar::ThinkingTags { start, ends }| ThinkingTags { start, ends }),
        }
    } else {
        GrammarBinding::Always
    };
    Grammar { gbnf, binding, prefill }
}

fn chat_error(chat: &ChatRequest, error: ChatError) -> ApiError {
    match error {
        ChatError::Request { param: Some(param), reason } => ApiError::invalid(param, reason),
        ChatError::Request { param: None, reason } => match bad_schema(chat) {
            Some((param, reason)) => ApiError::invalid(param, reason),
            None => ApiError::Template { reason },
        },
        other => ApiError::Engine { reason: other.to_string() },
    }
}

/// The first schema of a request that cannot become a grammar: llama.cpp does not say which it was.
fn bad_schema(chat: &ChatRequest) -> Option<(String, String)> {
    let tools = chat.tools.iter().flatten().enumerate().filter_map(|(index, tool)| {
        let parameters = tool.pointer("/function/parameters")?;
        Some((format!("tools[{index}].function.parameters"), parameters))
    });
    let format = match &chat.response_format {
        Some(ResponseFormat::JsonSchema { json_schema }) => json_schema.schema.as_ref(),
        _ => None,
    };
    let format = format.map(|schema| ("response_format".to_owned(), schema));
    let own = chat.json_schema.as_ref().map(|schema| ("json_schema".to_owned(), schema));
    tools.chain(format).chain(own).find_map(|(param, schema)| {
        let refused = json_schema_to_gbnf(&schema.to_string()).err()?;
        Some((param, refused.to_string()))
    })
}

#[cfg(test)]
mod tests;
