//! A run's trace for OpenTelemetry: Jaeger, Tempo, a Collector, whatever takes OTLP over HTTP.
//!
//! <https://opentelemetry.io/docs/specs/otlp/#otlphttp>. What has to be shown to be let in is in `OTEL_EXPORTER_OTLP_HEADERS`, as
//! OpenTelemetry's own exporters have it: `key=value,key=value`.

use crate::failure::Failure;
use paraft_worker::exit;
use percent_encoding::percent_decode_str;
use serde_json::Value;
use std::{path::Path, time::Duration};
use ureq::http::StatusCode;

const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
/// One request takes so long at most.
const TIMEOUT: Duration = Duration::from_secs(30);
/// An answer is no longer.
const MAX_ANSWER: u64 = 1 << 20;

/// Sends what the processes have recorded whose files are in this folder, or in a run's folder, to `url`; how many spans went.
///
/// # Errors
/// There is no trace, or no receiver accepts it.
pub fn send(folder: &Path, url: &str) -> Result<usize, Failure> {
    if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
        return Err(Failure::new(exit::USAGE, format!("--otlp {url}: write http://HOST:4318")));
    }
    let given = std::env::var(HEADERS).unwrap_or_default();
    let headers = headers(&given).map_err(|e| Failure::new(exit::CONFIG, e))?;
    let url = match url.trim_end_matches('/') {
        whole if whole.ends_with("/v1/traces") => whole.to_string(),
        base => format!("{base}/v1/traces"),
    };
    let agent = crate::http::agent(&url);
    let mut sent = 0;
    paraft_trace::otlp::requests(folder, |request, spans| {
        let mut post = agent.post(&url).content_type("application/json");
        for (key, value) in &headers {
            post = post.header(key, value);
        }
        let post = post.config().timeout_global(Some(TIMEOUT)).build();
        let why = |e: &dyn std::fmt::Display| format!("{url}: {e}; {sent} spans went before");
        let away = |e: ureq::Error| Failure::new(exit::UNAVAILABLE, why(&e));
        let mut answer = post.send(request.to_string()).map_err(away)?;
        let status = answer.status();
        let body = answer.body_mut().with_config().limit(MAX_ANSWER).lossy_utf8(true);
        let text = body.read_to_string().map_err(away)?;
        if !status.is_success() {
            let said: String = text.chars().take(300).collect();
            let (code, help) = match status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    (exit::CONFIG, "set OTEL_EXPORTER_OTLP_HEADERS")
                }
                s if s.is_server_error() || s == StatusCode::TOO_MANY_REQUESTS => {
                    (exit::UNAVAILABLE, "try it again later")
                }
                _ => (exit::CONFIG, "it must take OTLP over HTTP in JSON; a Collector listens on port 4318"),
            };
            return Err(Failure::new(code, why(&format!("{status} {said}"))).help(help));
        }
        sent += spans - refused(&text, spans);
        Ok(())
    })?;
    Ok(sent)
}

/// Of those it was sent; what an answer says that has taken a part only.
fn refused(answer: &str, of: usize) -> usize {
    let said: Value = serde_json::from_str(answer).unwrap_or_default();
    let n = &said["partialSuccess"]["rejectedSpans"];
    let n = n.as_u64().or_else(|| n.as_str()?.parse().ok()).unwrap_or(0) as usize;
    if n > 0 {
        let why = said["partialSuccess"]["errorMessage"].as_str().unwrap_or_default();
        eprintln!("warning: {n} spans were refused: {why}");
    }
    n.min(of)
}

fn headers(given: &str) -> Result<Vec<(String, String)>, String> {
    let all = given.split(',').map(str::trim).filter(|h| !h.is_empty());
    all.map(|h| {
        let (key, value) = h.split_once('=').ok_or_else(|| format!("{HEADERS}: `{h}` is not key=value"))?;
        Ok((plain(key.trim()), plain(value.trim())))
    })
    .collect()
}

/// Without percent-encoding, as W3C Baggage has it.
fn plain(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_refusals_are_read_as_opentelemetry_writes_them() {
        let pair = |k: &str, v: &str| (k.to_string(), v.to_string());
        assert_eq!(headers("a=b, api-key=c=d ,"), Ok(vec![pair("a", "b"), pair("api-key", "c=d")]));
        assert_eq!(
            headers("Authorization=Basic%20YQ%3D%3D,b=5%"),
            Ok(vec![pair("Authorization", "Basic YQ=="), pair("b", "5%")])
        );
        assert_eq!(headers(""), Ok(Vec::new()));
        assert!(headers("a").is_err());
        assert_eq!(refused(r#"{"partialSuccess":{"rejectedSpans":"3","errorMessage":"full"}}"#, 10), 3);
        assert_eq!(refused("{}", 10), 0);
        assert_eq!(refused(r#"{"partialSuccess":{"rejectedSpans":99}}"#, 10), 10);
    }
}
