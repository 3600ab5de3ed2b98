//! vLLM's routes for weights, as of 0.32: <https://docs.vllm.ai>, <https://github.com/vllm-project/vllm>. The server runs with
//! `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "paraft"}'`, of the plug-in `paraft.vllm`, which loads
//! the file that the feed names.

use super::engine::{AT_ONCE, Engine, Staged, done, text};
use paraft_checkpoint::MODEL_FILE;
use paraft_fleet::http::{Answer, Client};
use serde_json::{Value, json};
use std::time::Duration;

/// One server of vLLM.
#[derive(Debug)]
pub struct Vllm {
    client: Client,
    within: Duration,
    mode: &'static str,
    init: Value,
    /// Its backend knows the job. An engine that has failed may be another process now.
    ready: bool,
}

impl Vllm {
    /// The server at this URL; each call may take `within`. `mode` is what becomes of requests: `keep`, `wait` or `abort`.
    /// `init` is the body of its backend's one `init` call.
    pub fn new(url: &str, within: Duration, mode: &'static str, init: Value) -> Self {
        Self { client: Client::new(url), within, mode, init, ready: false }
    }

    fn post(&mut self, path: &str, body: &Value) -> Result<Answer, String> {
        self.post_within(path, body, self.within)
    }

    fn post_within(&mut self, path: &str, body: &Value, within: Duration) -> Result<Answer, String> {
        let answered = self.client.post(path, body, within);
        self.noted(path, answered)
    }

    fn noted(&mut self, path: &str, answered: Result<Answer, String>) -> Result<Answer, String> {
        let answer = done(&format!("POST {path}"), answered);
        self.ready &= answer.is_ok();
        answer
    }

    /// Begins an update. A feed that was killed, or gave up waiting, may have left one open, and vLLM begins no other until that
    /// one ends. It ends on all workers with an order to load that fails, as one without a file does; no weight is changed by it.
    fn start(&mut self) -> Result<(), String> {
        let path = "/start_weight_update";
        let answered = self.client.post(path, &json!({}), self.within);
        if answered.as_ref().is_ok_and(|answer| !answer.is_success()) {
            let _ = self.client.post("/update_weights", &json!({ "update_info": {} }), self.within);
            return self.post(path, &json!({})).map(drop);
        }
        self.noted(path, answered).map(drop)
    }
}

impl Engine for Vllm {
    fn url(&self) -> &str {
        self.client.url()
    }

    fn answers(&mut self) -> Result<(), String> {
        let answer = self.client.get("/weight_info", self.within.min(AT_ONCE));
        answer.map(drop).map_err(|why| format!("GET /weight_info: {why}"))
    }

    fn prepare(&mut self) -> Result<(), String> {
        if !self.ready {
            let init = json!({ "init_info": self.init });
            self.post("/init_weight_transfer_engine", &init)?;
            self.ready = true;
        }
        Ok(())
    }

    fn pause(&mut self) -> Result<(), String> {
        self.post(&format!("/pause?mode={}&clear_cache=true", self.mode), &json!({})).map(drop)
    }

    /// The pause has emptied the cache.
    fn flush(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn load(&mut self, version: &Staged<'_>) -> Result<(), String> {
        let file = version.folder.join(MODEL_FILE);
        let update = json!({ "update_info": { "version": version.label, "file": file } });
        self.start()?;
        self.post("/update_weights", &update)?;
        self.post("/finish_weight_update", &json!({ "weight_version": version.label })).map(drop)
    }

    fn label(&mut self) -> Result<String, String> {
        let path = "/weight_info";
        let answer = self.client.get(path, self.within).map_err(|why| format!("GET {path}: {why}"))?;
        let body = answer.json().filter(|_| answer.is_success());
        body.and_then(|body| text(&body, &["weight_version", "version"]))
            .ok_or_else(|| format!("GET {path}: no version, {}", answer.described()))
    }

    fn resume(&mut self) -> Result<(), String> {
        self.post_within("/resume", &json!({}), self.within.min(AT_ONCE)).map(drop)
    }
}
