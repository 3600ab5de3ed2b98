//! HTTP to trackers and inference engines.

use serde_json::Value;
use std::{sync::Arc, time::Duration};
use ureq::{
    Agent, Body,
    http::Response,
    tls::{Certificate, RootCerts, TlsConfig},
};

/// An HTTP client for this URL. Trusted authorities are those of the system, or of `SSL_CERT_FILE`.
pub(crate) fn agent(url: &str) -> Agent {
    let mut config = Agent::config_builder()
        .http_status_as_error(false)
        .user_agent(concat!("paraft/", env!("CARGO_PKG_VERSION")));
    if url.starts_with("https") {
        config = config.tls_config(tls());
    }
    config.build().new_agent()
}

fn tls() -> TlsConfig {
    let roots: Vec<_> = rustls_native_certs::load_native_certs()
        .certs
        .iter()
        .map(|c| Certificate::from_der(c).to_owned())
        .collect();
    TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .root_certs(RootCerts::new_with_certs(&roots))
        .build()
}

/// The longest body of an answer that is read, in bytes.
const MAX_ANSWER: u64 = 1 << 20;

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status, 100 to 999.
    pub status: u16,
    /// The body as text; bytes that are no UTF-8 are replaced.
    pub body: String,
}

impl Answer {
    /// Whether the status is from 200 to 299.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The body's JSON; `None`: it is none.
    pub fn json(&self) -> Option<Value> {
        serde_json::from_str(&self.body).ok()
    }

    /// The status, and the body's first 300 characters: for messages.
    pub fn described(&self) -> String {
        let said: String = self.body.trim().chars().take(300).collect();
        format!("status {}: {said}", self.status)
    }
}

/// Requests with a JSON body, each with its own deadline and connection: vLLM closes one behind an error without saying so, and
/// the request after it would be lost.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    url: String,
}

impl Client {
    /// A client for the server at this URL, as `http://host:30000`. It sends nothing yet.
    pub fn new(url: &str) -> Self {
        Self { agent: agent(url), url: url.trim_end_matches('/').to_string() }
    }

    /// The server's URL, without a slash at its end.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Sends `body` by POST to `path`, which starts with a slash.
    ///
    /// # Errors
    /// No whole answer arrives `within` this time; the text says why. The server may have taken the request.
    pub fn post(&self, path: &str, body: &Value, within: Duration) -> Result<Answer, String> {
        let request = self.agent.post(format!("{}{path}", self.url)).content_type("application/json");
        let request = request.header("Connection", "close").config().timeout_global(Some(within)).build();
        answer(request.send(body.to_string()))
    }

    /// Asks for `path`, which starts with a slash, by GET.
    ///
    /// # Errors
    /// As [`Self::post`]'s.
    pub fn get(&self, path: &str, within: Duration) -> Result<Answer, String> {
        let request = self.agent.get(format!("{}{path}", self.url)).header("Connection", "close");
        answer(request.config().timeout_global(Some(within)).build().call())
    }
}

fn answer(answered: Result<Response<Body>, ureq::Error>) -> Result<Answer, String> {
    let mut response = answered.map_err(|e| e.to_string())?;
    let status = response.status().as_u16();
    let body = response.body_mut().with_config().limit(MAX_ANSWER).lossy_utf8(true);
    let body = body.read_to_string().map_err(|e| e.to_string())?;
    Ok(Answer { status, body })
}
