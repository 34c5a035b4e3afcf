//! Requests as a client of the OpenAI API makes them, and their streams.

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use futures::stream::BoxStream;
use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::server::Server;

/// A greedy chat request of one user message.
pub fn greedy(prompt: &str, max_tokens: u32) -> Value {
    json!({
        "messages": [{ "role": "user", "content": prompt }],
        "temperature": 0,
        "max_tokens": max_tokens,
    })
}

/// The events of one server-sent stream.
pub struct EventStream {
    bytes: BoxStream<'static, reqwest::Result<Vec<u8>>>,
    buffer: String,
    pending: Vec<u8>,
}

impl EventStream {
    /// Posts `body` with `stream: true`; a refusal is returned with its status and body.
    pub async fn open(server: &Server, path: &str, mut body: Value) -> Result<Self> {
        body["stream"] = json!(true);
        let reply = server.client().post(server.url(path)).json(&body).send().await?;
        if reply.status() != StatusCode::OK {
            bail!("{}: {}", reply.status(), reply.text().await?);
        }
        let bytes = reply.bytes_stream().map(|chunk| chunk.map(|b| b.to_vec())).boxed();
        Ok(Self { bytes, buffer: String::new(), pending: Vec::new() })
    }

    /// The next event's data; `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(end) = self.buffer.find("\n\n") {
                let event: String = self.buffer.drain(..end + 2).collect();
                if let Some(data) = event.lines().find_map(|line| line.strip_prefix("data:")) {
                    return Ok(Some(data.trim().to_owned()));
                }
                continue;
            }
            let Some(chunk) = self.bytes.next().await else { return Ok(None) };
            self.pending.extend(chunk.context("reading the stream")?);
            let valid = match std::str::from_utf8(&self.pending) {
                Ok(text) => text.len(),
                Err(e) if e.error_len().is_none() => e.valid_up_to(),
                Err(e) => bail!("the stream carries invalid UTF-8: {e}"),
            };
            let text: Vec<u8> = self.pending.drain(..valid).collect();
            self.buffer.push_str(std::str::from_utf8(&text)?);
        }
    }

    /// The next event as JSON; `None` at `[DONE]` or the end.
    pub async fn next_json(&mut self) -> Result<Option<Value>> {
        match self.next().await? {
            Some(data) if data != "[DONE]" => Ok(Some(serde_json::from_str(&data)?)),
            _ => Ok(None),
        }
    }

    /// Reads to the end: the joined content and the last finish reason; an error event is an error.
    pub async fn text(mut self) -> Result<(String, String)> {
        let (mut text, mut reason) = (String::new(), String::new());
        while let Some(event) = self.next_json().await? {
            if !event["error"].is_null() {
                bail!("error event: {}", event["error"]);
            }
            let choice = &event["choices"][0];
            text.push_str(
                choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default(),
            );
            if let Some(why) = choice["finish_reason"].as_str() {
                reason = why.to_owned();
            }
        }
        Ok((text, reason))
    }
}

/// The text of a whole, unstreamed greedy chat.
pub async fn chat_text(server: &Server, prompt: &str, max_tokens: u32) -> Result<String> {
    let (status, answer) = server.post("/v1/chat/completions", &greedy(prompt, max_tokens)).await?;
    if status != StatusCode::OK {
        bail!("{status}: {answer}");
    }
    Ok(answer["choices"][0]["message"]["content"].as_str().context("no content")?.to_owned())
}

/// What a client gets of a completion's stream, to its end.
pub struct Answer {
    /// All of it.
    pub text: String,
    /// Why it ended.
    pub finish_reason: String,
    /// Where it was asked for.
    pub usage: Value,
    /// Likewise.
    pub timings: Value,
}

/// The answer to a request for a completion, by its stream. One that ends with an error event, or without `[DONE]`, is an error.
pub async fn completion(server: &Server, body: Value) -> Result<Answer> {
    let mut stream = EventStream::open(server, "/v1/completions", body).await?;
    let (text, finish_reason, usage, timings) = (String::new(), String::new(), Value::Null, Value::Null);
    let mut answer = Answer { text, finish_reason, usage, timings };
    loop {
        let data = stream.next().await?.context("the stream ended without [DONE]")?;
        if data == "[DONE]" {
            return Ok(answer);
        }
        let event: Value = serde_json::from_str(&data)?;
        if !event["error"].is_null() {
            bail!("error event: {event}");
        }
        answer.text += event["choices"][0]["text"].as_str().unwrap_or_default();
        if let Some(reason) = event["choices"][0]["finish_reason"].as_str() {
            answer.finish_reason = reason.to_owned();
        }
        if !event["usage"].is_null() {
            (answer.usage, answer.timings) = (event["usage"].clone(), event["timings"].clone());
        }
    }
}
