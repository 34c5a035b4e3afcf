//! The server: where it is, what it is asked for, and whether it is there at all.

use std::fmt;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, InvalidHeaderValue};
use reqwest::{StatusCode, Url};
use serde_json::{Map, Value, json};

use crate::prompts::{Content, Prompt};

/// How long a server may take to say which models it has.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// A secret. Never printed.
#[derive(Clone)]
pub struct ApiKey(String);

impl From<String> for ApiKey {
    fn from(key: String) -> Self {
        Self(key)
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey")
    }
}

/// Which of OpenAI's two ways of generating text is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// What is known of a server beforehand.
#[derive(Debug, Clone)]
pub struct TargetConfig {
    /// `http://host:port`, with or without `/v1`; `http://` may be left out.
    pub url: String,
    /// For servers that ask for one.
    pub key: Option<ApiKey>,
    /// The model to ask for; else the first that the server lists.
    pub model: Option<String>,
    /// Which route is used.
    pub endpoint: Endpoint,
    /// Further fields of each request's body.
    pub fields: Map<String, Value>,
    /// How long a request may take in all.
    pub timeout: Duration,
}

/// Why a server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// Not an address.
    #[error("{url:?} is not the address of a server, such as http://127.0.0.1:8080")]
    Url {
        /// As given.
        url: String,
    },
    /// A key that no header can carry.
    #[error("the API key has characters that an HTTP header cannot carry")]
    Key(#[from] InvalidHeaderValue),
    /// The HTTP client cannot be made.
    #[error("cannot start an HTTP client")]
    Client(#[source] reqwest::Error),
    /// Nobody there.
    #[error("no server answers at {url}")]
    Unreachable {
        /// What was asked.
        url: Url,
        /// Why not.
        #[source]
        source: reqwest::Error,
    },
    /// It wants another key.
    #[error("{url} answers {status}: {hint}")]
    Refused {
        /// What was asked.
        url: Url,
        /// 401 or 403.
        status: StatusCode,
        /// What can be done.
        hint: &'static str,
    },
    /// It is no such server.
    #[error(
        "{url} answers {status}, not with a list of models; is this an OpenAI-compatible server? If it lists none, name the model"
    )]
    NoModels {
        /// What was asked.
        url: Url,
        /// What it said.
        status: StatusCode,
    },
}

/// A server that is there.
#[derive(Debug, Clone)]
pub struct Target {
    client: reqwest::Client,
    /// Makes a connection for each request.
    fresh: reqwest::Client,
    generate: Url,
    name: String,
    model: String,
    endpoint: Endpoint,
    fields: Map<String, Value>,
    timeout: Duration,
}

impl Target {
    /// Asks the server for its models.
    pub async fn connect(config: TargetConfig) -> Result<Self, TargetError> {
        let TargetConfig { url, key, model, endpoint, fields, timeout } = config;
        let has_key = key.is_some();
        let base = base(&url).ok_or_else(|| TargetError::Url { url: url.clone() })?;
        let bad = || TargetError::Url { url: url.clone() };
        let route = |path: &str| base.join(path).map_err(|_| bad());
        let headers = headers(key)?;
        let client = client(&headers, usize::MAX)?;
        let fresh = self::client(&headers, 0)?;
        let listed = first_model(&client, route("models")?, has_key).await;
        let model = match (model, listed) {
            (Some(model), Ok(_) | Err(TargetError::NoModels { .. })) => model,
            (None, Ok(model)) => model,
            (_, Err(error)) => return Err(error),
        };
        let generate = route(match endpoint {
            Endpoint::Chat => "chat/completions",
            Endpoint::Completions => "completions",
        })?;
        let name = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        Ok(Self { client, fresh, generate, name, model, endpoint, fields, timeout })
    }

    /// Its address, as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The model that it is asked for.
    pub fn model(&self) -> &str {
        &self.model
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A request for a streamed answer.
    pub(crate) fn request(&self, prompt: &Prompt) -> reqwest::RequestBuilder {
        self.client.post(self.generate.clone()).json(&self.body(prompt))
    }

    /// The same over a connection of its own.
    pub(crate) fn request_afresh(&self, prompt: &Prompt) -> reqwest::RequestBuilder {
        self.fresh.post(self.generate.clone()).json(&self.body(prompt))
    }

    fn body(&self, prompt: &Prompt) -> Value {
        let mut body = json!({
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        match (self.endpoint, &prompt.content) {
            (Endpoint::Chat, Content::Text(text)) => {
                body["messages"] = json!([{ "role": "user", "content": text }]);
            }
            (Endpoint::Chat, Content::Messages(messages)) => body["messages"] = messages.clone(),
            (Endpoint::Completions, Content::Text(text)) => body["prompt"] = json!(text),
            (Endpoint::Completions, Content::Messages(messages)) => body["prompt"] = joined(messages).into(),
        }
        for (name, value) in &self.fields {
            body[name] = value.clone();
        }
        body
    }
}

/// The texts of a conversation, for a route that knows no conversations.
fn joined(messages: &Value) -> String {
    let texts = messages.as_array().into_iter().flatten().filter_map(|message| message["content"].as_str());
    texts.collect::<Vec<_>>().join("\n")
}

/// The address that routes are joined to: with `/v1/` at its end.
fn base(url: &str) -> Option<Url> {
    let url = url.trim();
    let mut url =
        Url::parse(&if url.contains("://") { url.to_owned() } else { format!("http://{url}") }).ok()?;
    if !matches!(url.scheme(), "http" | "https") {
        return None;
    }
    let path = url.path().trim_end_matches('/').trim_end_matches("/v1").to_owned();
    url.set_path(&format!("{path}/v1/"));
    Some(url)
}

fn headers(key: Option<ApiKey>) -> Result<HeaderMap, TargetError> {
    let mut headers = HeaderMap::new();
    if let Some(ApiKey(key)) = key {
        let mut value = HeaderValue::from_str(&format!("Bearer {key}"))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    Ok(headers)
}

fn client(headers: &HeaderMap, kept_connections: usize) -> Result<reqwest::Client, TargetError> {
    // A proxy would be measured with the server.
    let builder = reqwest::Client::builder().default_headers(headers.clone()).no_proxy().tcp_nodelay(true);
    builder.pool_max_idle_per_host(kept_connections).build().map_err(TargetError::Client)
}

async fn first_model(client: &reqwest::Client, url: Url, has_key: bool) -> Result<String, TargetError> {
    let answer = client.get(url.clone()).timeout(PROBE_TIMEOUT).send().await;
    let answer = answer
        .map_err(|source| TargetError::Unreachable { url: url.clone(), source: source.without_url() })?;
    let status = answer.status();
    if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
        let hint = if has_key { "the API key was refused" } else { "it wants an API key" };
        return Err(TargetError::Refused { url, status, hint });
    }
    let list: Value = answer.json().await.unwrap_or_default();
    let model = list["data"][0]["id"].as_str().map(str::to_owned);
    model.ok_or(TargetError::NoModels { url, status })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(endpoint: Endpoint, fields: Value) -> Target {
        Target {
            client: reqwest::Client::new(),
            fresh: reqwest::Client::new(),
            generate: base("x").unwrap(),
            name: String::new(),
            model: "m".to_owned(),
            endpoint,
            fields: fields.as_object().cloned().unwrap_or_default(),
            timeout: Duration::from_secs(1),
        }
    }

    #[test]
    fn an_address_may_leave_out_what_goes_without_saying() {
        for url in
            ["127.0.0.1:80", "http://127.0.0.1:80/", "http://127.0.0.1:80/v1", "http://127.0.0.1:80/v1/"]
        {
            assert_eq!(base(url).unwrap().as_str(), "http://127.0.0.1/v1/", "{url}");
        }
        assert_eq!(base("https://[::1]:9/api/v1").unwrap().as_str(), "https://[::1]:9/api/v1/");
        for url in ["", "ftp://host", "http://", "http://a b"] {
            assert!(base(url).is_none(), "{url}");
        }
    }

    #[test]
    fn a_key_is_never_printed() {
        assert_eq!(format!("{:?}", ApiKey::from("sk-secret".to_owned())), "ApiKey");
    }

    #[test]
    fn a_body_has_the_form_of_its_route_and_the_fields_asked_for() {
        let prompt = Prompt { content: Content::Text("hi".to_owned()), max_tokens: 4 };
        let body = target(Endpoint::Chat, json!({ "ignore_eos": true, "temperature": 0.5 })).body(&prompt);
        assert_eq!(body["messages"][0], json!({ "role": "user", "content": "hi" }));
        assert_eq!((&body["ignore_eos"], &body["temperature"]), (&json!(true), &json!(0.5)));
        let messages = json!([{ "role": "system", "content": "a" }, { "role": "user", "content": "b" }]);
        let prompt = Prompt { content: Content::Messages(messages), max_tokens: 4 };
        assert_eq!(target(Endpoint::Completions, json!({})).body(&prompt)["prompt"], "a\nb");
    }
}
