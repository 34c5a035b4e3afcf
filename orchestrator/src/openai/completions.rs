//! `POST /v1/completions`: continues a text, or tokens, as they are.
//!
//! Knows nothing of messages or templates.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;

use super::answer::{Answer, Head, Sending, off_the_sockets, respond};
use super::error::ApiError;
use super::fields::{Fields, Inert};
use super::logprobs::{LegacyLogprobs, TokenLogprob};
use super::params::{Common, Constraint, INERT, take_constraint};
use super::prompt::{Bounds, Prompt};
use super::types::{CompletionChoice, FinishReason};
use crate::app::App;
use crate::generation::{End, Generation, Outcome, Piece, Prepared};
use crate::http::read_json;
use crate::model::TextModel;

/// As many alternatives per token as the chat route gives; OpenAI's own limit on this older route is 5.
const MAX_LOGPROBS: u32 = 20;

/// Names of this route alone that have no effect here.
const INERT_HERE: &[Inert] = &[
    Inert { name: "echo", is_neutral: |v| *v == Value::Bool(false), reason: "the prompt is not sent back" },
    Inert { name: "suffix", is_neutral: |v| v == "", reason: "text is continued at its end only" },
];

/// A checked completion request.
#[derive(Debug, PartialEq)]
struct CompletionRequest {
    common: Common,
    text: Text,
    constraint: Constraint,
    /// Report each token's log probability, and those of this many alternatives.
    logprobs: Option<u32>,
}

/// What is to be continued.
#[derive(Debug, PartialEq)]
enum Text {
    Words(String),
    Tokens(Vec<i32>),
}

impl CompletionRequest {
    fn parse(body: Value, n_ctx: u32) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body, "")?;
        let request = Self {
            text: text(&mut fields)?,
            constraint: take_constraint(&mut fields)?,
            logprobs: fields.take_within("logprobs", 0..=MAX_LOGPROBS)?,
            common: Common::take(&mut fields, n_ctx)?,
        };
        fields.take_inert(INERT_HERE)?;
        fields.take_inert(INERT)?;
        fields.finish()?;
        Ok(request)
    }
}

/// A text or its tokens; of OpenAI's lists of these, those with one item.
fn text(fields: &mut Fields) -> Result<Text, ApiError> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a string or an array of token ids is expected")]
    enum Prompts {
        Words(String),
        Tokens(Vec<i32>),
        ManyWords(Vec<String>),
        ManyTokens(Vec<Vec<i32>>),
    }
    let only_one = || ApiError::unsupported("prompt", "one prompt per request is, not several");
    match fields.require("prompt")? {
        Prompts::Words(words) => Ok(Text::Words(words)),
        Prompts::Tokens(tokens) => Ok(Text::Tokens(tokens)),
        Prompts::ManyWords(mut many) if many.len() == 1 => many.pop().map(Text::Words).ok_or_else(only_one),
        Prompts::ManyTokens(mut many) if many.len() == 1 => many.pop().map(Text::Tokens).ok_or_else(only_one),
        Prompts::ManyWords(_) | Prompts::ManyTokens(_) => Err(only_one()),
    }
}

/// Answers a completion request.
pub(crate) async fn create(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let place = app.admit()?;
    let request = CompletionRequest::parse(read_json(request, &app.limits).await?, app.n_ctx)?;
    app.check_model(request.common.model.as_deref())?;
    app.readiness()?;
    let model = app.text_model()?;
    let head = Head::new("cmpl", &app);
    let delivery = request.common.delivery;
    let answer =
        CompletionAnswer { logprobs: request.logprobs.map(|_| Vec::new()), ..CompletionAnswer::default() };
    let prepare = {
        let (model, id, n_ctx) = (Arc::clone(&model), head.id().to_owned(), app.n_ctx);
        move || prepare(&model, request, id, n_ctx)
    };
    let prepared = off_the_sockets(prepare).await?;
    let generation = Generation::start(&app, model, prepared, place).await?;
    respond(generation, answer, Sending { head, delivery, keep_alive: app.limits.keep_alive }).await
}

fn prepare(
    model: &TextModel,
    request: CompletionRequest,
    id: String,
    n_ctx: u32,
) -> Result<Prepared, ApiError> {
    let tokens = match request.text {
        Text::Words(words) => model.tokenize(&words)?,
        Text::Tokens(tokens) => tokens,
    };
    let mut common = request.common;
    common.sampling.grammar = match request.constraint {
        Constraint::Free => None,
        Constraint::Schema { schema, .. } => Some(model.schema_grammar(&schema)?),
        Constraint::Grammar(gbnf) => Some(model.grammar(gbnf)?),
    };
    let prompt = Prompt { param: "prompt", tokens, top_logprobs: request.logprobs };
    prompt.prepare(common, id, Bounds { n_ctx, n_vocab: model.n_vocab() })
}

/// The answer of the completions route.
#[derive(Default)]
struct CompletionAnswer {
    text: String,
    /// `None` where they were not asked for.
    logprobs: Option<Vec<TokenLogprob>>,
    /// Characters of the tokens told so far.
    offset: usize,
}

impl CompletionAnswer {
    fn choice(&mut self, piece: Piece, finish_reason: Option<FinishReason>) -> CompletionChoice {
        let wanted = self.logprobs.is_some();
        let logprobs = wanted.then(|| LegacyLogprobs::new(piece.logprobs, &mut self.offset));
        CompletionChoice { index: 0, text: piece.text, logprobs, finish_reason }
    }
}

impl Answer for CompletionAnswer {
    const WHOLE: &'static str = "text_completion";
    const CHUNK: &'static str = "text_completion";
    type Part = CompletionChoice;
    type Whole = CompletionChoice;

    fn part(&mut self, piece: Piece) -> Vec<Self::Part> {
        vec![self.choice(piece, None)]
    }

    fn end(&mut self, piece: Piece, outcome: &Outcome) -> Vec<Self::Part> {
        vec![self.choice(piece, Some(finish_reason(outcome)))]
    }

    fn collect(&mut self, mut piece: Piece) {
        self.text.push_str(&piece.text);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.append(&mut piece.logprobs);
        }
    }

    fn whole(mut self, outcome: &Outcome) -> Self::Whole {
        let logprobs = self.logprobs.take();
        let piece = Piece { text: std::mem::take(&mut self.text), logprobs: Vec::new() };
        let mut choice = self.choice(piece, Some(finish_reason(outcome)));
        choice.logprobs = logprobs.map(|logprobs| LegacyLogprobs::new(logprobs, &mut 0));
        choice
    }
}

fn finish_reason(outcome: &Outcome) -> FinishReason {
    match outcome.end {
        End::Full => FinishReason::Length,
        End::Stopped => FinishReason::Stop,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(body: Value) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(body, 512)
    }

    #[test]
    fn a_prompt_is_a_text_or_tokens() {
        let text = |prompt: Value| parse(json!({ "prompt": prompt })).unwrap().text;
        assert_eq!(text(json!("a")), Text::Words("a".into()));
        assert_eq!(text(json!(["a"])), Text::Words("a".into()));
        assert_eq!(text(json!([1, 2])), Text::Tokens(vec![1, 2]));
        assert_eq!(text(json!([[1, 2]])), Text::Tokens(vec![1, 2]));
    }

    #[test]
    fn what_a_completion_cannot_mean_is_refused_by_name() {
        for (body, param) in [
            (json!({}), "prompt"),
            (json!({ "prompt": ["a", "b"] }), "prompt"),
            (json!({ "prompt": [[1], [2]] }), "prompt"),
            (json!({ "prompt": [1.5] }), "prompt"),
            (json!({ "prompt": 1 }), "prompt"),
            (json!({ "prompt": "a", "echo": true }), "echo"),
            (json!({ "prompt": "a", "suffix": "b" }), "suffix"),
            (json!({ "prompt": "a", "best_of": 2 }), "best_of"),
            (json!({ "prompt": "a", "logprobs": 21 }), "logprobs"),
            (json!({ "prompt": "a", "logprobs": true }), "logprobs"),
            (json!({ "prompt": "a", "messages": [] }), "messages"),
            (json!({ "prompt": "a", "tools": [] }), "tools"),
        ] {
            let error = parse(body.clone()).unwrap_err();
            assert_eq!(error.param(), Some(param), "{body}: {error}");
        }
    }

    #[test]
    fn defaults_that_clients_send_are_accepted() {
        parse(
            json!({ "prompt": "a", "echo": false, "suffix": null, "best_of": 1, "n": 1, "logprobs": null }),
        )
        .unwrap();
    }
}
