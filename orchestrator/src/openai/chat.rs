//! `POST /v1/chat/completions`: from a request's body to the answer's.
//!
//! Knows nothing of templates' formats (`model` does) or of how tokens come (`generation` does).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use llama::chat::{self, Completeness};
use serde_json::Value;

use super::answer::{Answer, Head, Sending, off_the_sockets, respond};
use super::assembler::Assembler;
use super::error::ApiError;
use super::fields::Fields;
use super::logprobs::TokenLogprob;
use super::messages::{parse_messages, take_tools};
use super::params::{Common, Constraint, INERT, SchemaOrigin, take_constraint};
use super::prompt::{Bounds, Prompt};
use super::types::{ChatChoice, ChatDeltaChoice, ChatLogprobs, Delta, FinishReason};
use crate::app::App;
use crate::generation::{End, Generation, Outcome, Piece, Prepared};
use crate::http::read_json;
use crate::model::TextModel;

/// As many alternatives per token as OpenAI gives.
const MAX_TOP_LOGPROBS: u32 = 20;

/// A checked chat request. What depends on the model's template is checked with it, in `llama`.
#[derive(Debug, PartialEq)]
struct ChatRequest {
    common: Common,
    /// For the template.
    chat: chat::ChatRequest,
    /// Report each token's log probability, and those of this many alternatives.
    logprobs: Option<u32>,
}

impl ChatRequest {
    /// Checks a body. `n_ctx` is the size of a slot.
    fn parse(body: Value, n_ctx: u32) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body, "")?;
        let mut chat = chat::ChatRequest {
            messages: parse_messages(&mut fields)?,
            reasoning_format: fields.take("reasoning_format")?,
            reasoning_effort: fields.take("reasoning_effort")?,
            chat_template_kwargs: fields.take("chat_template_kwargs")?,
            ..chat::ChatRequest::default()
        };
        take_tools(&mut fields, &mut chat)?;
        constrain(&mut chat, take_constraint(&mut fields)?);
        let logprobs = logprobs(&mut fields)?;
        let common = Common::take(&mut fields, n_ctx)?;
        fields.take_inert(INERT)?;
        fields.finish()?;
        Ok(Self { common, chat, logprobs })
    }
}

fn constrain(chat: &mut chat::ChatRequest, constraint: Constraint) {
    match constraint {
        Constraint::Free => {}
        Constraint::Grammar(gbnf) => chat.grammar = Some(gbnf),
        Constraint::Schema { schema, origin: SchemaOrigin::JsonSchema } => chat.json_schema = Some(schema),
        Constraint::Schema { schema, origin: SchemaOrigin::ResponseFormat } => {
            let json_schema = chat::NamedSchema { schema: Some(schema), ..chat::NamedSchema::default() };
            chat.response_format = Some(chat::ResponseFormat::JsonSchema { json_schema });
        }
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    match fields.take_within("top_logprobs", 0..=MAX_TOP_LOGPROBS)? {
        Some(1..) if !wanted => Err(ApiError::invalid("top_logprobs", "only allowed with `logprobs: true`")),
        top => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

/// Answers a chat request.
pub(crate) async fn create(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let place = app.admit()?;
    let request = ChatRequest::parse(read_json(request, &app.limits).await?, app.n_ctx)?;
    app.check_model(request.common.model.as_deref())?;
    app.readiness()?;
    let model = app.text_model()?;
    let head = Head::new("chatcmpl", &app);
    let delivery = request.common.delivery;
    let prepare = {
        let (model, id, n_ctx) = (Arc::clone(&model), head.id().to_owned(), app.n_ctx);
        move || prepare(&model, request, id, n_ctx)
    };
    let (prepared, answer) = off_the_sockets(prepare).await?;
    let generation = Generation::start(&app, model, prepared, place).await?;
    respond(generation, answer, Sending { head, delivery, keep_alive: app.limits.keep_alive }).await
}

fn prepare(
    model: &TextModel,
    request: ChatRequest,
    id: String,
    n_ctx: u32,
) -> Result<(Prepared, ChatAnswer), ApiError> {
    let rendered = model.render(request.chat)?;
    let mut common = request.common;
    common.stops.extend(rendered.stops);
    common.sampling.grammar = rendered.grammar;
    let prompt = Prompt { param: "messages", tokens: rendered.tokens, top_logprobs: request.logprobs };
    let mut prepared = prompt.prepare(common, id, Bounds { n_ctx, n_vocab: model.n_vocab() })?;
    prepared.shown = rendered.shown;
    Ok((prepared, ChatAnswer::new(Assembler::new(rendered.parser, rendered.begun), request.logprobs)))
}

/// The answer of the chat route.
struct ChatAnswer {
    assembler: Assembler,
    /// Of text that was not told yet; `None` where they were not asked for.
    logprobs: Option<Vec<TokenLogprob>>,
    has_spoken: bool,
}

impl ChatAnswer {
    fn new(assembler: Assembler, top_logprobs: Option<u32>) -> Self {
        Self { assembler, logprobs: top_logprobs.map(|_| Vec::new()), has_spoken: false }
    }

    fn keep_logprobs(&mut self, piece: &mut Piece) {
        if let Some(kept) = &mut self.logprobs {
            kept.append(&mut piece.logprobs);
        }
    }

    fn told_logprobs(&mut self) -> Option<ChatLogprobs> {
        let told = self.logprobs.as_mut().map(std::mem::take);
        told.filter(|told| !told.is_empty()).map(ChatLogprobs::of)
    }
}

impl Answer for ChatAnswer {
    const WHOLE: &'static str = "chat.completion";
    const CHUNK: &'static str = "chat.completion.chunk";
    type Part = ChatDeltaChoice;
    type Whole = ChatChoice;

    fn part(&mut self, mut piece: Piece) -> Vec<Self::Part> {
        // Probabilities of text that tells nothing yet go with the next that does.
        self.keep_logprobs(&mut piece);
        let mut parts = Vec::new();
        if !std::mem::replace(&mut self.has_spoken, true) {
            let hello = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
            parts.push(ChatDeltaChoice::new(hello, None));
        }
        if let Some(delta) = self.assembler.push(&piece.text) {
            parts.push(ChatDeltaChoice::new(delta, self.told_logprobs()));
        }
        parts
    }

    fn end(&mut self, piece: Piece, outcome: &Outcome) -> Vec<Self::Part> {
        let mut parts = self.part(piece);
        if let Some(delta) = self.assembler.end(completeness(outcome)) {
            parts.push(ChatDeltaChoice::new(delta, self.told_logprobs()));
        }
        let reason = finish_reason(outcome, self.assembler.has_called());
        let mut last = ChatDeltaChoice::new(Delta::default(), self.told_logprobs());
        last.finish_reason = Some(reason);
        parts.push(last);
        parts
    }

    fn collect(&mut self, mut piece: Piece) {
        self.keep_logprobs(&mut piece);
        self.assembler.collect(&piece.text);
    }

    fn whole(self, outcome: &Outcome) -> Self::Whole {
        let message = self.assembler.finish(completeness(outcome));
        let finish_reason = finish_reason(outcome, !message.tool_calls.is_empty());
        ChatChoice {
            index: 0,
            message: message.into(),
            logprobs: self.logprobs.map(ChatLogprobs::of),
            finish_reason,
        }
    }
}

fn completeness(outcome: &Outcome) -> Completeness {
    match outcome.end {
        End::Full => Completeness::Partial,
        End::Stopped => Completeness::Complete,
    }
}

/// A call that was cut off by a limit is no call.
fn finish_reason(outcome: &Outcome, has_called: bool) -> FinishReason {
    match outcome.end {
        End::Full => FinishReason::Length,
        End::Stopped if has_called => FinishReason::ToolCalls,
        End::Stopped => FinishReason::Stop,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const N_CTX: u32 = 512;

    fn parse(mut body: Value) -> Result<ChatRequest, ApiError> {
        let messages = json!([{ "role": "user", "content": "hi" }]);
        body.as_object_mut().unwrap().entry("messages").or_insert(messages);
        ChatRequest::parse(body, N_CTX)
    }

    #[test]
    fn a_plain_request_is_accepted() {
        let request = parse(json!({ "model": "m" })).unwrap();
        assert_eq!(request.common.model.as_deref(), Some("m"));
        assert_eq!(request.chat.messages, [json!({ "role": "user", "content": "hi" })]);
        assert_eq!((request.logprobs, request.chat.tools), (None, None));
    }

    #[test]
    fn what_a_chat_cannot_mean_is_refused_by_name() {
        for (body, param) in [
            (json!({ "messages": null }), "messages"),
            (json!({ "prompt": "hi" }), "prompt"),
            (json!({ "logprobs": 5 }), "logprobs"),
            (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
            (json!({ "top_logprobs": 2 }), "top_logprobs"),
            (json!({ "reasoning_format": "loud" }), "reasoning_format"),
            (json!({ "chat_template_kwargs": [] }), "chat_template_kwargs"),
            (json!({ "echo": true }), "echo"),
        ] {
            let error = parse(body.clone()).unwrap_err();
            assert_eq!(error.param(), Some(param), "{body}: {error}");
            assert_eq!(error.status_and_code().0, 400);
        }
    }

    #[test]
    fn a_body_that_is_no_object_is_refused() {
        let error = ChatRequest::parse(json!([]), N_CTX).unwrap_err();
        assert_eq!(error.status_and_code(), (axum::http::StatusCode::BAD_REQUEST, "invalid_json"));
    }

    #[test]
    fn logprobs_and_their_alternatives() {
        assert_eq!(parse(json!({ "logprobs": true })).unwrap().logprobs, Some(0));
        assert_eq!(parse(json!({ "logprobs": true, "top_logprobs": 3 })).unwrap().logprobs, Some(3));
        assert_eq!(parse(json!({ "logprobs": false, "top_logprobs": 0 })).unwrap().logprobs, None);
    }

    #[test]
    fn a_schemas_origin_is_kept_for_its_errors() {
        let schema = json!({ "type": "object" });
        let own = parse(json!({ "json_schema": schema })).unwrap().chat;
        assert_eq!((own.json_schema, own.response_format), (Some(schema.clone()), None));
        let format = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
        let openais = parse(json!({ "response_format": format })).unwrap().chat;
        assert!(openais.json_schema.is_none() && openais.response_format.is_some());
    }
}
