//! Tests of `observe`.

use super::*;
use paraft_proto::ServerInfo;

fn shard(shard: u32, term: u64, leads: bool) -> ShardStatus {
    ShardStatus {
        shard,
        job_name: "t".into(),
        buckets: 1,
        term,
        leads,
        mode: "bsp".into(),
        ..ShardStatus::default()
    }
}

fn reply(server: u64, shards: Vec<ShardStatus>) -> StatusReply {
    StatusReply { server, shards, ..StatusReply::default() }
}

#[test]
fn a_healthy_fleet_has_no_incidents() {
    let now = Instant::now();
    let mut view = View::new("t".into());
    let replies = [reply(0, vec![shard(0, 1, true)]), reply(1, vec![shard(0, 1, false), shard(1, 2, true)])];
    assert_eq!(view.see(&replies, now), []);
    assert_eq!(view.see(&replies, now + SLOW), []);
    assert_eq!(view.see(&[], now + SLOW), [], "no server answers");
    assert_eq!((view.pause(now), view.pause(now + SLOW)), (FIRST, SLOW));
}

#[test]
fn an_ended_servers_shards_and_return_are_seen() {
    let began = Instant::now();
    let mut view = View::new("t".into());
    view.see(&[reply(0, vec![shard(0, 1, true)]), reply(1, vec![shard(1, 1, true)])], began);
    let now = began + Duration::from_secs(5);
    view.ended(ServerId(0), now);
    assert_eq!(view.pause(now), FAST);
    assert_eq!(view.see(&[reply(1, vec![shard(0, 2, false)])], now), [], "it does not serve yet");
    let at = now + Duration::from_millis(80);
    let elected = IncidentKind::LeaderChanged {
        shard: ShardId(0),
        from: ServerId(0),
        to: ServerId(1),
        term: 2,
        stall_seconds: Some(0.08),
        handed_over: false,
    };
    assert_eq!(view.see(&[reply(1, vec![shard(0, 2, true), shard(1, 1, true)])], at), [elected]);
    assert_eq!(view.pause(at), MEDIUM, "it is still away");
    let back = IncidentKind::ServerBack { server: ServerId(0), seconds: 2.0 };
    let replies = [reply(0, vec![shard(0, 1, true)]), reply(1, vec![shard(0, 2, true)])];
    assert_eq!(view.see(&replies, now + Duration::from_secs(2)), [back], "its old term does not count");
    // A leader that is deposed without an end has no known stall. Its process may have ended, which is known later.
    let deposed = [reply(0, vec![shard(0, 3, true)])];
    let at = now + Duration::from_secs(9);
    assert_eq!(view.see(&deposed, at), []);
    assert_eq!(view.pause(at), FAST);
    let again = view.see(&deposed, at + SLOW);
    let is_election = |i: &IncidentKind| {
        matches!(i, IncidentKind::LeaderChanged { stall_seconds: None, handed_over: false, .. })
    };
    assert!(again.len() == 1 && again.iter().all(is_election), "{again:?}");
    assert_eq!(view.pause(at + SLOW), SLOW);
    // One that still answers has handed the shard over.
    let moved = [reply(0, vec![]), reply(1, vec![shard(0, 4, true)])];
    let moved = view.see(&moved, at + SLOW);
    assert!(matches!(moved[..], [IncidentKind::LeaderChanged { handed_over: true, .. }]), "{moved:?}");
}

#[test]
fn a_drained_server_is_told_once_until_it_takes_part_again() {
    let mut view = View::new("t".into());
    let mut states = |states: [&str; 2]| {
        let info = |(server, state): (u64, &str)| ServerInfo {
            server,
            state: state.into(),
            ..ServerInfo::default()
        };
        let servers = (0..).zip(states).map(info).collect();
        view.drained(&DescribeReply { servers, ..DescribeReply::default() })
    };
    let now = |undo| vec![IncidentKind::ServerDrained { server: ServerId(1), undo }];
    assert_eq!(states(["up", "up"]), []);
    assert_eq!(states(["up", "draining"]), now(false));
    assert_eq!(states(["silent", "draining"]), []);
    assert_eq!(states(["up", "silent"]), [], "it may be drained still");
    assert_eq!(states(["up", "draining"]), []);
    assert_eq!(states(["up", "up"]), now(true));
}

#[test]
fn the_rule_and_a_user_are_told_apart() {
    let now = Instant::now();
    let mut view = View::new("t".into());
    let mut switched = |number: u64, mode: &str, auto: &str| {
        let s = ShardStatus {
            mode_number: number,
            mode: mode.into(),
            mode_auto: auto.into(),
            ..shard(0, 1, true)
        };
        match view.see(&[reply(0, vec![s])], now).pop() {
            Some(IncidentKind::ModeSwitched { from, to, by, .. }) => Some((from, to, by)),
            _ => None,
        }
    };
    let wanted = |from: &str, to: &str, by| Some((from.to_string(), to.to_string(), by));
    assert_eq!(switched(0, "bsp", ""), None);
    assert_eq!(switched(1, "asp", ""), wanted("bsp", "asp", SwitchedBy::User));
    assert_eq!(switched(2, "ssp:1", "asp"), wanted("asp", "ssp:1", SwitchedBy::User));
    assert_eq!(switched(3, "ssp:2", "asp"), wanted("ssp:1", "ssp:2", SwitchedBy::Rule));
    assert_eq!(switched(4, "bsp", ""), wanted("ssp:2", "bsp", SwitchedBy::User));
}
