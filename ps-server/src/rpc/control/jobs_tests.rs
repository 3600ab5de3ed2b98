//! Tests of `jobs`.

use super::*;
use crate::control::{Command, Shape};
use paraft_common::{Durability, ServerId};
use paraft_proto::FleetShape;
use std::collections::BTreeMap;

/// A fleet of one server.
fn state() -> State {
    let shape = Shape { shards: 0, replicas: 1, durability: Durability::QuorumMemory };
    let mut state = State::default();
    state.apply(&Command::Found { fleet: 1, shape, servers: BTreeMap::from([(ServerId(0), "s0:1".into())]) });
    state
}

fn request(name: &str, token: u64) -> SubmitRequest {
    let durability = Durability::QuorumMemory.name().into();
    let shape = Some(FleetShape { shards: 2, replicas: 1, durability });
    SubmitRequest { name: name.into(), token, shape, keep_ms: None, run: String::new() }
}

/// Submits a job, and returns its number.
fn submit(state: &mut State, name: &str, token: u64) -> u32 {
    let submission = submission(state, request(name, token), 1).expect("it fits");
    match state.apply(&Command::Order { token, order: Order::Submit(submission) }) {
        Outcome::Submitted(job) => job.0,
        other => panic!("{other:?}"),
    }
}

#[test]
fn submitted_names_follow_the_rule_of_names() {
    assert!(submission(&state(), request("mnist.v2-final_3", 1), 1).is_ok());
    let long = "n".repeat(MAX_NAME_CHARS + 1);
    for name in ["", "*", "a*", "..", "-x", " a", "\u{202e}a", &long] {
        let refused = submission(&state(), request(name, 1), 1).expect_err(name);
        assert!(matches!(refused, RefusalKind::BadName(_)), "{name}: {refused}");
    }
}

#[test]
fn deletion_that_is_sent_again_is_still_done() {
    let mut state = state();
    submit(&mut state, "a", 1);
    let delete = |token| EndJobRequest { job: "a".into(), delete: true, token };
    let Ok(Ending::Order(order)) = ending(&state, delete(2), 1) else { panic!("nothing is ordered") };
    assert_eq!(state.apply(&Command::Order { token: 2, order }), Outcome::Ended(JobState::Waiting));
    let again = |state: &State| ending(state, delete(2), 1).map(|e| format!("{e:?}"));
    assert_eq!(again(&state), Ok("Ended(Waiting)".into()), "the job is gone, as ordered");
    let other = ending(&state, delete(3), 1).expect_err("there is no such job");
    assert!(matches!(other, RefusalKind::NoSuchJob { .. }), "{other}");
    // Another job has the name since.
    submit(&mut state, "a", 4);
    assert_eq!(again(&state), Ok("Ended(Waiting)".into()), "and that one stays");
}
