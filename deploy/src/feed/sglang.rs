//! SGLang's routes, as of 0.5.23, <https://github.com/sgl-project/sglang>. A route without fields needs a body of `{}`.
//! A status of 200 is no success there: the body says `success`.

use super::engine::{AT_ONCE, Engine, Staged, done, text};
use paraft_fleet::http::{Answer, Client};
use serde_json::{Value, json};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Between two orders to empty the cache, which a busy engine refuses.
const FLUSH_DELAY: Duration = Duration::from_millis(100);

/// One server of SGLang.
#[derive(Debug)]
pub struct Sglang {
    client: Client,
    within: Duration,
    mode: &'static str,
}

impl Sglang {
    /// The server at this URL; each call may take `within`. `mode` is what becomes of requests: `abort`, `retract` or
    /// `in_place`.
    pub fn new(url: &str, within: Duration, mode: &'static str) -> Self {
        Self { client: Client::new(url), within, mode }
    }

    fn post(&self, path: &str, body: &Value, within: Duration) -> Result<Answer, String> {
        done(&format!("POST {path}"), self.client.post(path, body, within))
    }
}

impl Engine for Sglang {
    fn url(&self) -> &str {
        self.client.url()
    }

    fn answers(&mut self) -> Result<(), String> {
        let answer = self.client.get("/model_info", self.within.min(AT_ONCE));
        answer.map(drop).map_err(|why| format!("GET /model_info: {why}"))
    }

    fn prepare(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn pause(&mut self) -> Result<(), String> {
        self.post("/pause_generation", &json!({ "mode": self.mode }), self.within).map(drop)
    }

    fn flush(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + self.within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(FLUSH_DELAY);
            let Err(why) = self.post("/flush_cache", &json!({}), left) else { return Ok(()) };
            if Instant::now() + FLUSH_DELAY >= deadline {
                return Err(format!("the cache was not empty within {:.0?}: {why}", self.within));
            }
            thread::sleep(FLUSH_DELAY);
        }
    }

    fn load(&mut self, version: &Staged<'_>) -> Result<(), String> {
        let path = "/update_weights_from_disk";
        let order =
            json!({ "model_path": version.folder, "weight_version": version.label, "flush_cache": true });
        let answer = self.post(path, &order, self.within)?;
        match answer.json() {
            Some(body) if body["success"] == true => Ok(()),
            _ => Err(format!("POST {path}: no `success` in its answer, {}", answer.described())),
        }
    }

    fn label(&mut self) -> Result<String, String> {
        let mut seen = Vec::new();
        // Older servers have the second route alone.
        for path in ["/model_info", "/get_weight_version"] {
            let answer = self.client.get(path, self.within).map_err(|why| format!("GET {path}: {why}"))?;
            let body = answer.json().filter(|_| answer.is_success());
            match body.and_then(|body| text(&body, &["weight_version", "version"])) {
                Some(label) => return Ok(label),
                None => seen.push(format!("GET {path}: no version, {}", answer.described())),
            }
        }
        Err(seen.join("; "))
    }

    fn resume(&mut self) -> Result<(), String> {
        self.post("/continue_generation", &json!({}), self.within.min(AT_ONCE)).map(drop)
    }
}
