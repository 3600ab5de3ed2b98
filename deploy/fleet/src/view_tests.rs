//! Tests of `view`.

use super::*;
use paraft_proto::{FleetShape, JobInfo, ServerInfo, StoppedReplica};

fn node(server: u64) -> u64 {
    server << 32 | 1
}

fn fleet() -> DescribeReply {
    let server = |server| ServerInfo { server, address: format!("h{server}:1"), ..ServerInfo::default() };
    DescribeReply {
        jobs: vec![JobInfo {
            shape: Some(FleetShape { shards: 1, replicas: 3, durability: String::new() }),
            ..JobInfo::default()
        }],
        servers: (0..3).map(server).collect(),
        control_voters: vec![0, 1, 2],
        ..DescribeReply::default()
    }
}

fn replies() -> Vec<Result<StatusReply, String>> {
    let reply = |server| {
        let role = if server == 0 { "leader" } else { "follower" }.into();
        let shard = ShardStatus {
            node: node(server),
            role,
            voters: (0..3).map(node).collect(),
            ..ShardStatus::default()
        };
        Ok(StatusReply { server, shards: vec![shard], ..StatusReply::default() })
    };
    (0..3).map(reply).collect()
}

fn told(change: impl FnOnce(&mut Vec<Result<StatusReply, String>>)) -> FleetHealth {
    let mut replies = replies();
    change(&mut replies);
    weigh(&fleet(), &replies)
}

fn of(replies: &mut [Result<StatusReply, String>], server: usize) -> &mut StatusReply {
    replies[server].as_mut().expect("it answers")
}

#[test]
fn a_fleet_is_whole_only_by_what_every_server_says_now() {
    assert!(told(|_| {}).is_whole());
    let one_votes = weigh(&DescribeReply { control_voters: vec![1], ..fleet() }, &replies());
    assert!(one_votes.serves() && one_votes.says().contains("1 of 3 servers vote"), "{one_votes:?}");
    let cases: [(FleetHealth, bool, &str); 7] = [
        (told(|r| r[2] = Err("no answer".into())), true, "s2 at h2:1 does not answer"),
        (told(|r| of(r, 1).shards.clear()), true, "the replica that votes on s1 is not there"),
        // The server has restarted without its memory, under another name.
        (told(|r| of(r, 1).shards[0].node = node(1) + 1), true, "votes on s1 is not there"),
        (told(|r| of(r, 0).shards[0].voters.truncate(2)), true, "2 of 3 replicas vote"),
        (told(|r| of(r, 0).shards[0].role = "follower".into()), false, "shard 0 has no leader"),
        (
            told(|r| {
                r[1] = Err("gone".into());
                of(r, 2).shards[0].trouble = "diverged".into();
            }),
            false,
            "1 of 3 replicas answer",
        ),
        (
            told(|r| {
                let reply = of(r, 1);
                reply.shards.clear();
                reply.stopped.push(StoppedReplica { why: "EMFILE".into(), ..StoppedReplica::default() });
            }),
            true,
            "storage on s1: EMFILE",
        ),
    ];
    let mut drained = fleet();
    drained.servers[2].state = "draining".into();
    let mut without = replies();
    of(&mut without, 0).shards[0].voters.truncate(2);
    let lacks = (weigh(&drained, &without), true, "`paraft drain 2 --undo`");
    assert!(weigh(&drained, &replies()).is_whole(), "it holds what it held");
    for (now, serves, words) in cases.into_iter().chain([lacks]) {
        assert!(!now.is_whole() && now.serves() == serves && now.says().contains(words), "{now:?}\n{words}");
    }
}
