//! What commands that talk to an orchestrator's admin API have in common: where it is, the key, and what its refusals mean.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use reqwest::{Client, Method, RequestBuilder, StatusCode};
use serde_json::Value;

use super::state;
use crate::cli::Globals;

/// Within which the orchestrator answers; it does nothing for it that takes time.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);

/// Which orchestrator.
#[derive(Debug, Clone, Args)]
pub(crate) struct AdminArgs {
    /// Address of the API.
    #[arg(long, env = "SHOAL_SERVER", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(crate) server: String,
    /// File with the admin key [default: the one in the state folder].
    #[arg(long, env = "SHOAL_ADMIN_KEY_FILE", value_name = "FILE")]
    admin_key: Option<PathBuf>,
}

/// An orchestrator that can be asked.
pub(crate) struct Admin {
    /// Its address, without a slash at the end.
    pub(crate) server: String,
    key: Option<String>,
    client: Client,
}

impl AdminArgs {
    /// With the key that was named, or the one in the state folder, if there is one.
    pub(crate) fn open(&self, globals: &Globals) -> Result<Admin> {
        let server = self.server.trim_end_matches('/').to_owned();
        Ok(Admin { server, key: self.key(globals)?, client: Client::new() })
    }

    fn key(&self, globals: &Globals) -> Result<Option<String>> {
        let own = state::folder(globals)?.cluster().join("admin-key");
        let file = match &self.admin_key {
            Some(file) => file.clone(),
            // A server that is no orchestrator has none.
            None if !own.exists() => return Ok(None),
            None => own,
        };
        Ok(Some(protocol::trust::read_text(&file).context("reading the admin key")?.trim().to_owned()))
    }
}

impl Admin {
    /// What a path answers without a key.
    pub(crate) async fn open_get(&self, path: &str) -> Result<Value> {
        let reply = self.request(Method::GET, path).send().await.with_context(|| self.asking())?;
        reply.json().await.with_context(|| format!("{} is no server of shoal", self.server))
    }

    /// What the admin API says of a path; nothing where it has no such route.
    pub(crate) async fn get(&self, path: &str) -> Result<Option<Value>> {
        self.answer(self.request(Method::GET, path)).await
    }

    /// The same for something that is to be done.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Option<Value>> {
        self.answer(self.request(Method::POST, path).json(body)).await
    }

    async fn answer(&self, request: RequestBuilder) -> Result<Option<Value>> {
        let request = request.bearer_auth(self.key.as_deref().unwrap_or_default());
        let reply = request.send().await.with_context(|| self.asking())?;
        match reply.status() {
            status if status.is_success() => Ok(Some(reply.json().await.with_context(|| self.asking())?)),
            StatusCode::UNAUTHORIZED => bail!(
                "{} asks for the admin key of another state folder: give it with --admin-key, or its folder with --state",
                self.server
            ),
            status => {
                let body: Value = reply.json().await.unwrap_or_default();
                match (status, body["error"]["code"].as_str()) {
                    (StatusCode::NOT_FOUND, Some("unknown_url")) => Ok(None),
                    _ => bail!("{}", refusal(&body, status, &self.server)),
                }
            }
        }
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.server)).timeout(DEADLINE)
    }

    fn asking(&self) -> String {
        format!("asking {}", self.server)
    }
}

/// What a refusal says, a fault a line where there are several.
fn refusal(body: &Value, status: StatusCode, server: &str) -> String {
    let faults: Vec<&str> =
        body["error"]["faults"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    match (faults.len(), body["error"]["message"].as_str()) {
        (2.., _) => format!("{server} refuses the plan:\n  {}", faults.join("\n  ")),
        (_, Some(message)) => format!("{server}: {message}"),
        (_, None) => format!("{server} answers with {status}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_refusal_names_every_fault() {
        let of = |error: Value| refusal(&json!({ "error": error }), StatusCode::BAD_REQUEST, "http://x");
        let said = of(json!({ "message": "m", "faults": ["replica 0: a", "replica 1: b"] }));
        assert_eq!(said, "http://x refuses the plan:\n  replica 0: a\n  replica 1: b");
        assert_eq!(of(json!({ "message": "no plan 7" })), "http://x: no plan 7");
        assert!(of(Value::Null).contains("400"));
    }
}
