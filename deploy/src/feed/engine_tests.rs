//! Tests of `engine`.

use super::*;
use std::collections::VecDeque;

/// Fails at the calls that are named, in this order; says its label.
struct Scripted {
    fails: VecDeque<&'static str>,
    calls: Vec<&'static str>,
    label: String,
    panics: bool,
}

impl Scripted {
    fn new(fails: &[&'static str]) -> Self {
        Self { fails: fails.iter().copied().collect(), calls: Vec::new(), label: "41".into(), panics: false }
    }

    fn call(&mut self, name: &'static str) -> Result<(), String> {
        self.calls.push(name);
        match self.fails.front() == Some(&name) {
            true => Err(format!("{} fails", self.fails.pop_front().unwrap())),
            false => Ok(()),
        }
    }
}

impl Engine for Scripted {
    fn url(&self) -> &str {
        "http://engine"
    }
    fn answers(&mut self) -> Result<(), String> {
        self.call("answers")
    }
    fn prepare(&mut self) -> Result<(), String> {
        self.call("prepare")
    }
    fn pause(&mut self) -> Result<(), String> {
        self.call("pause")
    }
    fn flush(&mut self) -> Result<(), String> {
        assert!(!self.panics, "it was told to");
        self.call("flush")
    }
    fn load(&mut self, version: &Staged<'_>) -> Result<(), String> {
        self.call("load")?;
        if self.call("labels another").is_ok() {
            self.label = version.label.into();
        }
        Ok(())
    }
    fn label(&mut self) -> Result<String, String> {
        self.call("label").map(|()| self.label.clone())
    }
    fn resume(&mut self) -> Result<(), String> {
        self.call("resume")
    }
}

fn updated(fails: &[&'static str], before: State) -> (State, Vec<&'static str>) {
    let mut engine = Scripted::new(fails);
    let staged = Staged { label: "42", folder: Path::new("/v000042") };
    let outcome = update(&mut engine, &staged, before);
    assert_eq!(outcome.why.is_some(), outcome.state != State::Current);
    engine.calls.retain(|call| *call != "prepare" && *call != "labels another");
    (outcome.state, engine.calls)
}

#[test]
fn engine_is_resumed_unless_it_may_be_half_loaded() {
    let all = ["pause", "flush", "load", "label", "resume"];
    for (fails, before, state, calls) in [
        (&[][..], State::Behind, State::Current, &all[..]),
        (&[], State::HalfLoaded, State::Current, &all),
        (&["prepare"], State::Behind, State::Behind, &[]),
        (&["prepare"], State::HalfLoaded, State::HalfLoaded, &[]),
        (&["pause"], State::Behind, State::Behind, &["pause", "resume"]),
        (&["pause"], State::HalfLoaded, State::HalfLoaded, &["pause"]),
        (&["flush"], State::Behind, State::Behind, &["pause", "flush", "resume"]),
        (&["flush"], State::HalfLoaded, State::HalfLoaded, &["pause", "flush"]),
        (&["load"], State::Behind, State::HalfLoaded, &all[..3]),
        (&["label"], State::Behind, State::HalfLoaded, &all[..4]),
        (&["labels another"], State::Behind, State::HalfLoaded, &all[..4]),
        (
            &["resume"; 2],
            State::Behind,
            State::Current,
            &["pause", "flush", "load", "label", "resume", "resume", "resume"],
        ),
        (
            &["resume"; 3],
            State::Behind,
            State::Paused,
            &["pause", "flush", "load", "label", "resume", "resume", "resume"],
        ),
        (&["flush", "resume"], State::Behind, State::Behind, &["pause", "flush", "resume", "resume"]),
        (&["prepare"], State::Paused, State::Paused, &[]),
        (&["pause"], State::Paused, State::Behind, &["pause", "resume"]),
    ] {
        assert_eq!(updated(fails, before), (state, calls.to_vec()), "{fails:?} {before:?}");
    }
}

#[test]
fn engine_is_resumed_if_the_feed_panics() {
    let mut engine = Scripted { panics: true, ..Scripted::new(&[]) };
    let staged = Staged { label: "42", folder: Path::new("/v000042") };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        update(&mut engine, &staged, State::Behind)
    }));
    assert!(caught.is_err());
    assert_eq!(engine.calls, ["prepare", "pause", "resume"]);
}

#[test]
fn status_of_success_is_no_success_if_the_body_denies_it() {
    let answer = |status, body: &str| done("POST /x", Ok(Answer { status, body: body.into() }));
    assert!(answer(200, "Cache flushed.").is_ok());
    assert!(answer(200, r#"{"success": true}"#).is_ok());
    assert!(answer(200, r#"{"success": false, "message": "no"}"#).unwrap_err().contains("no"));
    assert!(answer(400, "busy").unwrap_err().contains("status 400: busy"));
    assert_eq!(done("GET /x", Err("no answer".into())).unwrap_err(), "GET /x: no answer");
}
