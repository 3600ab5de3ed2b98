//! Tests of `story`.

use super::*;
use crate::event::{Checkpoint, Incident, Leave};
use paraft_common::{ServerId, ShardId, Step, WorkerId};

fn of(what: IncidentKind) -> Option<String> {
    moment(&Event::Incident(Incident { wall: 7.5, what })).map(|m| m.line())
}

#[test]
fn each_kind_of_incident_is_said_in_words() {
    let server = ServerId(0);
    let ended = |restarts| IncidentKind::ServerEnded {
        server,
        how: "was ended by SIGKILL".into(),
        code: None,
        signal: Some(9),
        restarts,
    };
    assert_eq!(
        of(ended(false)).unwrap(),
        "server 0 was ended by SIGKILL; the launcher does not start it again"
    );
    assert_eq!(of(ended(true)).unwrap(), "server 0 was ended by SIGKILL; it is started again");
    let back = IncidentKind::ServerBack { server, seconds: 1.25 };
    assert!(of(back).unwrap().starts_with("server 0 is back (away for 1.2"));
    let drained = |undo| IncidentKind::ServerDrained { server, undo };
    assert_eq!(of(drained(false)).unwrap(), "server 0 is drained");
    assert_eq!(of(drained(true)).unwrap(), "server 0 takes part again");
    let elected = |to, stall_seconds| IncidentKind::LeaderChanged {
        shard: ShardId(2),
        from: server,
        to: ServerId(to),
        term: 3,
        stall_seconds,
        handed_over: false,
    };
    assert_eq!(
        of(elected(1, Some(0.08))).unwrap(),
        "server 1 leads shard 2 instead of server 0 (stall of 0.08 s)"
    );
    assert_eq!(of(elected(0, None)).unwrap(), "server 0 leads shard 2 again");
    let back = IncidentKind::WorkerBack { worker: WorkerId(1), rank: Some(2) };
    assert_eq!(of(back).unwrap(), "rank 2 of worker 1 is started again");
    assert_eq!(of(IncidentKind::WorkersWanted { workers: 3 }).unwrap(), "workers wanted: 3");
    let fault = IncidentKind::Fault { fault: "kill".into(), target: "server 1".into() };
    assert_eq!(of(fault).unwrap(), "chaos: kill, server 1");
}

#[test]
fn only_a_users_switch_of_the_mode_is_a_moment() {
    let switched = |by| IncidentKind::ModeSwitched { number: 1, from: "bsp".into(), to: "asp".into(), by };
    assert_eq!(of(switched(SwitchedBy::User)).unwrap(), "a user switched the mode from bsp to asp");
    assert_eq!(of(switched(SwitchedBy::Rule)), None);
    assert_eq!(of(IncidentKind::Other), None);
}

#[test]
fn departures_and_checkpoints_are_moments() {
    let leave = Leave { worker: WorkerId(1), reason: "was ended by SIGKILL".into(), ..Leave::default() };
    let left = moment(&Event::Leave(leave)).unwrap();
    assert_eq!((left.kind.letter(), &*left.line()), ("W", "worker 1 has left: was ended by SIGKILL"));
    let made = Checkpoint { step: Step(40), seconds: 0.5, path: "c/step-40".into(), ..Checkpoint::default() };
    let line = |c: Checkpoint| moment(&Event::Checkpoint(c)).unwrap().line();
    assert_eq!(line(made.clone()), "checkpoint of step 40 in c/step-40 (0.50 s beside training)");
    let failed = Checkpoint { error: Some("the disk is full".into()), ..made };
    assert_eq!(line(failed), "no checkpoint of step 40: the disk is full");
    assert_eq!(moment(&Event::Train(crate::Train::default())), None);
}

#[test]
fn an_incident_is_one_flat_line_and_an_unknown_one_is_read() {
    let what = IncidentKind::LeaderChanged {
        shard: ShardId(2),
        from: ServerId(0),
        to: ServerId(1),
        term: 3,
        stall_seconds: Some(0.08),
        handed_over: false,
    };
    let event = Event::Incident(Incident { wall: 7.5, what });
    let line = serde_json::to_string(&event).unwrap();
    let wanted = r#"{"event":"incident","wall":7.5,"what":"leader_changed","shard":2,"from":0,"to":1,"term":3,"stall_seconds":0.08,"handed_over":false}"#;
    assert_eq!(line, wanted);
    assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
    let later = r#"{"event":"incident","wall":7.5,"what":"meteor","size":3}"#;
    let other = Event::Incident(Incident { wall: 7.5, what: IncidentKind::Other });
    assert_eq!(serde_json::from_str::<Event>(later).unwrap(), other);
}
