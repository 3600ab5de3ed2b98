//! MLflow's tracking API over HTTP: the few requests that a run needs.
//!
//! <https://mlflow.org/docs/latest/rest-api.html>. Credentials come from the variables of MLflow's own
//! client: `MLFLOW_TRACKING_TOKEN`, or `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`.
//! Trusted certificate authorities are those of the system, or of `SSL_CERT_FILE`.

use serde_json::{Value, json};
use std::{borrow::Cow, time::Duration};
use ureq::{
    Agent, Body,
    http::{Response, StatusCode},
};

/// The timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The maximal bytes of a reply.
const MAX_ANSWER: u64 = 4 << 20;
/// MLflow's limits per request.
pub(super) const METRICS: usize = 1000;
const PARAMS: usize = 100;
/// The longest value that older servers accept.
const MAX_VALUE: usize = 500;

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// A retry may succeed.
    Later(String),
    /// The server refused it; a retry fails again.
    Refused(String),
}

impl RequestError {
    /// The reason, for people.
    pub fn why(&self) -> &str {
        match self {
            Self::Later(why) | Self::Refused(why) => why,
        }
    }
}

/// The status of an MLflow run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The run is in progress.
    Running,
    /// It ended normally.
    Finished,
    /// It failed.
    Failed,
    /// The user ended it.
    Killed,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Finished => "FINISHED",
            Self::Failed => "FAILED",
            Self::Killed => "KILLED",
        }
    }
}

/// A metric value of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// The metric's name.
    pub key: Cow<'static, str>,
    /// The value.
    pub value: f64,
    /// Samples.
    pub step: u64,
    /// Unix time, seconds.
    pub wall: f64,
}

/// The description of a run to create.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// The experiment's name.
    pub experiment: String,
    /// The run's name.
    pub name: String,
    /// The run's identity: a run with the same id is not created twice.
    pub id: String,
    /// Unix time, seconds.
    pub began: f64,
    /// Its parameters.
    pub params: Vec<(String, String)>,
    /// Its tags.
    pub tags: Vec<(String, String)>,
    /// Earlier attempts, by id, with the time of their last event: those that MLflow still lists as
    /// running have failed.
    pub earlier: Vec<(String, f64)>,
}

const ID: &str = "paraft.id";

/// An existing MLflow run.
pub struct OpenRun {
    /// Its MLflow id.
    pub id: String,
    /// A user had ended it in MLflow before; the record does not say which user.
    pub was_killed: bool,
}

/// A client of an MLflow server.
#[derive(Clone)]
pub struct Client {
    agent: Agent,
    url: String,
    authorization: Option<String>,
}

impl std::fmt::Debug for Client {
    /// Hides the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Client {
    /// A client for the server at this URL. It sends nothing yet.
    pub fn new(url: &str) -> Self {
        let agent = crate::http::agent(url);
        let given = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let authorization = authorization(
            given("MLFLOW_TRACKING_USERNAME").zip(given("MLFLOW_TRACKING_PASSWORD")),
            given("MLFLOW_TRACKING_TOKEN"),
        );
        Self { agent, url: url.trim_end_matches('/').to_string(), authorization }
    }

    /// The server's address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Finds or creates the run, and marks it running unless a user had ended it. Each request may take
    /// `most`.
    pub fn begin(&self, about: &About, most: Duration) -> Result<OpenRun, RequestError> {
        let experiment = self.experiment(&about.experiment, most)?;
        for (id, at) in &about.earlier {
            if let Some((id, status)) = self.find(&experiment, id, most)?
                && status == Status::Running.name()
            {
                self.update(&id, Status::Failed, Some(*at), most)?;
            }
        }
        // A request with a lost reply may have created the run, so search first.
        if let Some((id, status)) = self.find(&experiment, &about.id, most)? {
            let was_killed = status == Status::Killed.name();
            // A killed run keeps its status, even if this upload fails.
            if !was_killed {
                self.update(&id, Status::Running, None, most)?;
            }
            return Ok(OpenRun { id, was_killed });
        }
        let id = (ID.to_string(), about.id.clone());
        let made = self.post(
            "runs/create",
            &json!({
                "experiment_id": experiment,
                "run_name": about.name,
                "start_time": millis(about.began),
                "tags": pairs(about.tags.iter().chain([&id])),
            }),
            most,
        )?;
        let id = made["run"]["info"]["run_id"].as_str();
        let none = || RequestError::Refused(self.of("runs/create", "no run in its answer"));
        Ok(OpenRun { id: id.ok_or_else(none)?.to_string(), was_killed: false })
    }

    /// Finds a run by its identity; returns its MLflow id and status.
    fn find(
        &self,
        experiment: &str,
        id: &str,
        most: Duration,
    ) -> Result<Option<(String, String)>, RequestError> {
        let found = self.post(
            "runs/search",
            &json!({
                "experiment_ids": [experiment],
                "filter": format!("tags.`{ID}` = '{id}'"),
                "max_results": 1,
            }),
            most,
        )?;
        let info = &found["runs"][0]["info"];
        let word = |key: &str| info[key].as_str().map(str::to_string);
        Ok(word("run_id").map(|id| (id, word("status").unwrap_or_default())))
    }

    fn experiment(&self, name: &str, most: Duration) -> Result<String, RequestError> {
        for _ in 0..2 {
            let path = "experiments/get-by-name";
            let request = self.agent.get(self.path(path)).query("experiment_name", name);
            let request = self.authorized(request).config().timeout_global(Some(most.min(TIMEOUT))).build();
            let (status, answer) = self.answer(path, request.call())?;
            if let Some(id) = answer["experiment"]["experiment_id"].as_str() {
                if answer["experiment"]["lifecycle_stage"] == "deleted" {
                    let why = format!(
                        "the experiment \"{name}\" was deleted there: restore it, or set track.experiment"
                    );
                    return Err(RequestError::Refused(self.of(path, &why)));
                }
                return Ok(id.to_string());
            }
            if status != StatusCode::NOT_FOUND || answer["error_code"] != "RESOURCE_DOES_NOT_EXIST" {
                return Err(self.wrong(path, status, &answer));
            }
            let path = "experiments/create";
            let (status, answer) = self.posted(path, &json!({ "name": name }), most)?;
            match answer["experiment_id"].as_str() {
                Some(id) if status.is_success() => return Ok(id.to_string()),
                _ if status.is_success() => {
                    return Err(RequestError::Refused(self.of(path, "no id in its answer")));
                }
                // Another client has created it in the meantime.
                _ if answer["error_code"] == "RESOURCE_ALREADY_EXISTS" => {}
                _ => return Err(self.wrong(path, status, &answer)),
            }
        }
        Err(RequestError::Later(self.of("experiments/get-by-name", "the experiment comes and goes")))
    }

    /// Sends the run's parameters.
    pub fn params(&self, run: &str, params: &[(String, String)], most: Duration) -> Result<(), RequestError> {
        let all = params.chunks(PARAMS);
        all.map(|some| json!({ "run_id": run, "params": pairs(some) }))
            .try_for_each(|body| self.post("runs/log-batch", &body, most).map(drop))
    }

    /// Sets one tag of the run.
    pub fn tag(&self, run: &str, key: &str, value: &str, most: Duration) -> Result<(), RequestError> {
        self.post("runs/set-tag", &json!({ "run_id": run, "key": key, "value": value }), most).map(drop)
    }

    /// Sends up to 1000 metric values; returns how many were sent.
    pub fn metrics(&self, run: &str, metrics: &[Metric], most: Duration) -> Result<usize, RequestError> {
        let some = &metrics[..metrics.len().min(METRICS)];
        let metric = |m: &Metric| json!({ "key": m.key, "value": number(m.value), "timestamp": millis(m.wall), "step": m.step });
        let metrics: Vec<_> = some.iter().map(metric).collect();
        self.post("runs/log-batch", &json!({ "run_id": run, "metrics": metrics }), most)?;
        Ok(some.len())
    }

    /// Sets the status of the run, and when it ended.
    pub fn update(
        &self,
        run: &str,
        status: Status,
        ended: Option<f64>,
        most: Duration,
    ) -> Result<(), RequestError> {
        let mut body = json!({ "run_id": run, "status": status.name() });
        if let Some(at) = ended {
            body["end_time"] = millis(at).into();
        }
        self.post("runs/update", &body, most).map(drop)
    }

    fn path(&self, path: &str) -> String {
        format!("{}/api/2.0/mlflow/{path}", self.url)
    }

    fn of(&self, path: &str, why: &str) -> String {
        format!("MLflow at {}, {path}: {why}", self.url)
    }

    fn authorized<T>(&self, request: ureq::RequestBuilder<T>) -> ureq::RequestBuilder<T> {
        match &self.authorization {
            Some(value) => request.header("Authorization", value),
            None => request,
        }
    }

    fn posted(&self, path: &str, body: &Value, most: Duration) -> Result<(StatusCode, Value), RequestError> {
        let request = self.agent.post(self.path(path)).content_type("application/json");
        let request = self.authorized(request).config().timeout_global(Some(most.min(TIMEOUT))).build();
        self.answer(path, request.send(body.to_string()))
    }

    fn post(&self, path: &str, body: &Value, most: Duration) -> Result<Value, RequestError> {
        let (status, answer) = self.posted(path, body, most)?;
        if status.is_success() { Ok(answer) } else { Err(self.wrong(path, status, &answer)) }
    }

    fn answer(
        &self,
        path: &str,
        answer: Result<Response<Body>, ureq::Error>,
    ) -> Result<(StatusCode, Value), RequestError> {
        let later = |e: ureq::Error| RequestError::Later(self.of(path, &e.to_string()));
        let mut answer = answer.map_err(later)?;
        let status = answer.status();
        let text = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_string().map_err(later)?;
        match serde_json::from_str(&text) {
            Ok(value) => Ok((status, value)),
            Err(_) if !status.is_success() => Ok((status, Value::Null)),
            Err(_) => {
                Err(RequestError::Refused(self.of(path, "its answer is not JSON; is this an MLflow server?")))
            }
        }
    }

    fn wrong(&self, path: &str, status: StatusCode, answer: &Value) -> RequestError {
        let code = answer["error_code"].as_str().unwrap_or_default();
        let said: String = answer["message"].as_str().unwrap_or_default().chars().take(300).collect();
        let help = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                "; set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            }
            StatusCode::NOT_FOUND if code.is_empty() => "; is this an MLflow server?",
            _ => "",
        };
        let words = [code, &said].into_iter().filter(|w| !w.is_empty()).collect::<Vec<_>>().join(": ");
        let words = if words.is_empty() { String::new() } else { format!(" ({words})") };
        let why = self.of(path, &format!("{status}{words}{help}"));
        let again = status.is_server_error()
            || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
        if again { RequestError::Later(why) } else { RequestError::Refused(why) }
    }
}

/// As MLflow's own client: a user takes precedence over a token.
fn authorization(user: Option<(String, String)>, token: Option<String>) -> Option<String> {
    match (user, token) {
        (Some((name, password)), _) => {
            Some(format!("Basic {}", base64(format!("{name}:{password}").as_bytes())))
        }
        (None, token) => token.map(|t| format!("Bearer {t}")),
    }
}

/// Base64 of RFC 4648, for one header.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |three: &[u8]| {
        let n = (0..3).fold(0, |n, i| n << 8 | u32::from(*three.get(i).unwrap_or(&0)));
        let digit = move |i: u32| DIGITS[(n >> (18 - 6 * i)) as usize & 63] as char;
        let there = three.len() as u32 + 1;
        (0..4).map(move |i| if i < there { digit(i) } else { '=' }).collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

fn millis(wall: f64) -> i64 {
    (wall * 1e3) as i64
}

/// JSON has no NaN or infinity; protobuf's JSON mapping uses these words.
fn number(x: f64) -> Value {
    match x {
        x if x.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        x => x.into(),
    }
}

fn pairs<'a>(all: impl IntoIterator<Item = &'a (String, String)>) -> Vec<Value> {
    let cut = |v: &str| match v.char_indices().nth(MAX_VALUE - 1) {
        Some((end, _)) if v.chars().count() > MAX_VALUE => format!("{}…", &v[..end]),
        _ => v.to_string(),
    };
    all.into_iter().map(|(k, v)| json!({ "key": k, "value": cut(v) })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_those_of_mlflows_own_client() {
        let user = || Some(("me".to_string(), "secret".to_string()));
        let token = || Some("abc".to_string());
        assert_eq!(authorization(None, None), None);
        assert_eq!(authorization(None, token()).as_deref(), Some("Bearer abc"));
        assert_eq!(authorization(user(), token()).as_deref(), Some("Basic bWU6c2VjcmV0"));
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[255, 254, 253]), "//79");
    }

    #[test]
    fn a_value_is_cut_where_it_is_longer_than_servers_take() {
        let value = |n: usize| pairs(&[("k".to_string(), "ä".repeat(n))])[0]["value"].to_string();
        assert_eq!(value(500).chars().count(), 502);
        assert!(value(501).ends_with("ä…\"") && value(501).chars().count() == 502);
        assert_eq!(number(f64::NAN), "NaN");
    }
}
