//! One inference engine, and how it takes a version: pause, empty the cache, load, check, resume.
//!
//! ```text
//!             pause ──▶ flush ──▶ load ──▶ which version? ──▶ resume      current
//!  fails:       │         │        │            │               │
//!               ▼         ▼        ▼            ▼               ▼
//!             behind    behind   half loaded  half loaded     paused
//!           (resumed) (resumed)  (stays paused: its weights may be of two versions)
//! ```

use paraft_fleet::http::Answer;
use serde_json::Value;
use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// How often the order to resume is given.
const RESUMES: usize = 3;
/// Between two of them.
const RESUME_DELAY: Duration = Duration::from_millis(200);

/// The deadline of what an engine does at once, unless the user's is shorter.
pub const AT_ONCE: Duration = Duration::from_secs(10);

/// A version on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged<'a> {
    /// Its step, as the engines' label.
    pub label: &'a str,
    /// The Hugging Face folder, from the root.
    pub folder: &'a Path,
}

/// What an engine is asked for. Each call has a deadline of its own. An error says what was asked, and what came back.
pub trait Engine: Send {
    /// Its URL.
    fn url(&self) -> &str;
    /// It answers at all.
    fn answers(&mut self) -> Result<(), String>;
    /// What is done once, while it serves.
    fn prepare(&mut self) -> Result<(), String>;
    /// No request is worked on from here on.
    fn pause(&mut self) -> Result<(), String>;
    /// What is cached for the old weights goes.
    fn flush(&mut self) -> Result<(), String>;
    /// Loads the weights, and labels them if all are loaded.
    fn load(&mut self, version: &Staged<'_>) -> Result<(), String>;
    /// The label of its weights.
    fn label(&mut self) -> Result<String, String>;
    /// Requests are worked on again.
    fn resume(&mut self) -> Result<(), String>;
}

/// Where an engine is after an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It serves the version.
    Current,
    /// It serves what it served before: its weights were not touched.
    Behind,
    /// Some of its weights may be of another version than others. It stays paused.
    HalfLoaded,
    /// Its weights are whole, but it may be paused: it did not take the order to resume.
    Paused,
}

impl State {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Behind => "behind",
            Self::HalfLoaded => "half_loaded",
            Self::Paused => "paused",
        }
    }

    /// What is to be done about it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Current => "serves it",
            Self::Behind => "serves the version that it had",
            Self::HalfLoaded => {
                "may be half loaded and stays paused: keep it out of rotation until a version loads"
            }
            Self::Paused => "may be paused, as it did not take the order to resume: keep it out of rotation",
        }
    }
}

/// How an update of one engine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The engine's URL.
    pub url: String,
    /// Where it is.
    pub state: State,
    /// Why it is not current.
    pub why: Option<String>,
    /// From the order to pause until it resumed, or until the feed gave up.
    pub paused: Duration,
    /// It was told to load.
    pub told: bool,
}

/// Resumes its engine when it is dropped, unless the engine may be half loaded.
struct Pause<'a> {
    engine: &'a mut dyn Engine,
    resume: bool,
}

impl Pause<'_> {
    /// Tells it to resume, some times.
    fn resume(&mut self) -> Result<(), String> {
        self.resume = false;
        let mut last = self.engine.resume();
        for _ in 1..RESUMES {
            if last.is_ok() {
                break;
            }
            thread::sleep(RESUME_DELAY);
            last = self.engine.resume();
        }
        last
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        if self.resume {
            let _ = self.resume();
        }
    }
}

/// Brings a version to an engine, which was in the state `before`: one that may be half loaded is not resumed before it has
/// loaded a version.
pub fn update(engine: &mut dyn Engine, version: &Staged<'_>, before: State) -> Outcome {
    let url = engine.url().to_string();
    let whole = before != State::HalfLoaded;
    let untouched = if whole { State::Behind } else { State::HalfLoaded };
    if let Err(why) = engine.prepare() {
        let state = if before == State::Paused { before } else { untouched };
        return Outcome { url, state, why: Some(why), paused: Duration::ZERO, told: false };
    }
    let began = Instant::now();
    // A pause without an answer may have been taken: it is ended, too.
    let mut pause = Pause { engine, resume: whole };
    let (state, why, told) = match pause.engine.pause().and_then(|()| pause.engine.flush()) {
        Err(why) if !whole => (untouched, Some(why), false),
        Err(why) => match pause.resume() {
            Ok(()) => (untouched, Some(why), false),
            Err(too) => (State::Paused, Some(format!("{why}; {too}")), false),
        },
        Ok(()) => {
            let (state, why) = load(&mut pause, version);
            (state, why, true)
        }
    };
    drop(pause);
    Outcome { url, state, why, paused: began.elapsed(), told }
}

fn load(pause: &mut Pause<'_>, version: &Staged<'_>) -> (State, Option<String>) {
    // Half of the weights may be there from here on.
    pause.resume = false;
    let loaded = pause.engine.load(version).and_then(|()| {
        let label = pause.engine.label()?;
        match label == version.label {
            true => Ok(()),
            false => {
                Err(format!("it says that it has loaded {}, and that its version is {label}", version.label))
            }
        }
    });
    if let Err(why) = loaded {
        return (State::HalfLoaded, Some(why));
    }
    match pause.resume() {
        Ok(()) => (State::Current, None),
        Err(why) => (State::Paused, Some(why)),
    }
}

/// What was asked by `what` is done: the status says so, and the body does not deny it.
pub fn done(what: &str, answered: Result<Answer, String>) -> Result<Answer, String> {
    let answer = answered.map_err(|why| format!("{what}: {why}"))?;
    match answer.is_success() && answer.json().is_none_or(|body| body["success"] != false) {
        true => Ok(answer),
        false => Err(format!("{what}: {}", answer.described())),
    }
}

/// A label of a JSON object, under the first of these keys that it has.
pub fn text(answer: &Value, keys: &[&str]) -> Option<String> {
    let value = keys.iter().map(|key| &answer[*key]).find(|value| !value.is_null())?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_string))
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
