//! Tests of `health`.

use super::*;
use paraft_proto::{FleetShape, JobInfo, ServerInfo, ShardInfo};

fn node(server: u64) -> u64 {
    server << 32 | 1
}

fn fleet() -> DescribeReply {
    let server = |server| ServerInfo { server, state: "up".into(), ..ServerInfo::default() };
    let shape = FleetShape { shards: 1, replicas: 3, durability: String::new() };
    DescribeReply {
        jobs: vec![JobInfo { shape: Some(shape), ..JobInfo::default() }],
        servers: (10..13).map(server).collect(),
        shards: vec![ShardInfo { state: "serving".into(), ..ShardInfo::default() }],
        control_voters: vec![10, 11, 12],
        ..DescribeReply::default()
    }
}

fn reply(server: u64, role: &str, leader: Option<u64>, term: u64) -> Result<StatusReply, String> {
    let (role, voters) = (role.into(), (10..13).map(node).collect());
    let shard = ShardStatus { node: node(server), role, leader, term, voters, ..ShardStatus::default() };
    Ok(StatusReply { server, shards: vec![shard], ..StatusReply::default() })
}

#[test]
fn a_fleet_is_whole_when_all_voters_follow_one_leader() {
    let good = [
        reply(10, "leader", Some(10), 3),
        reply(11, "follower", Some(10), 3),
        reply(12, "follower", Some(10), 3),
    ];
    let seen = view(&fleet(), &good, 1).expect("whole");
    assert_eq!((seen.led_by(0), seen.led_by(1), seen.terms), (vec![ShardId(0)], vec![], vec![3]));
    let with = |place: usize, reply| {
        let mut all = good.to_vec();
        all[place] = reply;
        all
    };
    for (bad, why) in [
        (with(2, Err("dead".into())), "does not answer: dead"),
        (with(2, reply(12, "follower", Some(10), 2)), "not all its voters"),
        (with(2, reply(12, "follower", None, 3)), "not all its voters"),
        (with(2, reply(12, "candidate", None, 4)), "not all its voters"),
        (with(2, reply(12, "leader", Some(12), 2)), "2 leaders"),
        (with(0, reply(10, "candidate", None, 4)), "has no leader"),
        (good[..2].to_vec(), "2 servers were asked"),
    ] {
        let said = view(&fleet(), &bad, 1).expect_err(why);
        assert!(said.contains(why), "{said}");
    }
    assert!(view(&fleet(), &good, 2).is_err(), "a shard that nobody has");
}

#[test]
fn it_is_not_whole_before_its_control_group_knows_it() {
    let good = [10, 11, 12].map(|s| reply(s, if s == 10 { "leader" } else { "follower" }, Some(10), 3));
    let (mut repairing, mut silent) = (fleet(), fleet());
    repairing.shards[0].state = "repairing".into();
    silent.servers[1].state = "silent".into();
    for (fleet, why) in [(repairing, "is repairing"), (silent, "does not hear s11")] {
        let said = whole(&fleet, &good).expect_err(why);
        assert!(said.contains(why), "{said}");
    }
}
