//! Tests of `drain`.

use super::*;
use paraft_proto::{FleetShape, ServerInfo, ShardInfo};

/// Server 1 is drained; shard 0 has replicas on `shard`, of which those on `silent` do not answer.
fn fleet(servers: u64, control: &[u64], shard: &[u64], silent: &[u64]) -> DescribeReply {
    let of = |voters: &[u64]| voters.iter().copied().filter(|v| silent.contains(v)).collect();
    let server = |server| ServerInfo {
        server,
        address: format!("h{server}:1"),
        state: match (silent.contains(&server), server) {
            (true, _) => "silent",
            (false, 1) => "draining",
            (false, _) => "up",
        }
        .into(),
        holds: u32::from(shard.contains(&server)),
        ..ServerInfo::default()
    };
    DescribeReply {
        shape: Some(FleetShape { shards: 1, replicas: 3, durability: String::new() }),
        servers: (0..servers).map(server).collect(),
        shards: vec![ShardInfo { voters: shard.to_vec(), silent: of(shard), ..ShardInfo::default() }],
        control_voters: control.to_vec(),
        control_silent: of(control),
        ..DescribeReply::default()
    }
}

#[test]
fn servers_drained_together_may_not_stop_together() {
    let drained = |mut fleet: DescribeReply, servers: &[u64]| {
        let of = |s: &&mut ServerInfo| servers.contains(&s.server);
        fleet.servers.iter_mut().filter(of).for_each(|s| s.state = "draining".into());
        fleet
    };
    let (three, five) = (&[0, 1, 2][..], &[0, 1, 2, 3, 4][..]);
    let both = "s0, which is drained too: without both there is no majority for the control group, shard 0";
    for (fleet, words) in [
        (drained(fleet(3, three, three, &[]), &[0]), both),
        (drained(fleet(3, three, three, &[]), &[0, 2]), "together with s0 or s2, which are drained too"),
        (drained(fleet(5, five, five, &[]), &[0, 2]), "with s0 and s2, which are drained too: without all"),
        (drained(fleet(5, five, &[1, 2, 3], &[]), &[0, 2]), "with s2, which is drained too: without both"),
        (
            drained(fleet(5, five, five, &[4]), &[0]),
            "s4 (h4:1) is silent: the others are a majority; but not",
        ),
    ] {
        let Some(DrainProgress::Done(said)) = progress(&fleet, ServerId(1)) else { panic!("{fleet:?}") };
        assert!(said.contains("It can be stopped") && said.contains(words), "{said}\n{words}");
    }
    let five = drained(fleet(5, five, five, &[]), &[0]);
    assert_eq!(together(&five, ServerId(1)), None, "five voters can lose two");
}

#[test]
fn a_server_can_be_stopped_when_nothing_needs_it() {
    let all = &[0, 1, 2][..];
    for (fleet, words) in [
        (fleet(4, &[0, 2, 3], &[0, 2, 3], &[]), "done: s1 is empty: it can be stopped"),
        (fleet(3, all, all, &[]), "done: s1 leads nothing any more; its 1 replicas stay"),
        (fleet(3, all, all, &[2]), "needed: s1 leads nothing any more; its 1 replicas stay"),
        (fleet(4, &[0, 2, 3], all, &[]), "goes: s1 still leads 0 and holds 1 replicas"),
        // It only keeps its vote in the control group.
        (fleet(4, all, &[0, 2, 3], &[2]), "needed: s1 is empty, but do not stop it: s2 (h2:1) is silent"),
        (fleet(5, &[0, 1, 2, 3, 4], &[0, 3, 4], &[2]), "done: s1 is empty. It can be stopped, though s2"),
        (fleet(5, &[0, 1, 2, 3, 4], &[0, 3, 4], &[2, 4]), "needed: s1 is empty, but do not stop it: s2"),
        // It has stopped, and the others have taken over.
        (fleet(4, &[0, 2, 3], &[0, 2, 3], &[1]), "done: s1 is empty: it can be stopped"),
    ] {
        let said = match progress(&fleet, ServerId(1)).expect("it is there") {
            DrainProgress::Done(s) => format!("done: {s}"),
            DrainProgress::Goes(s) => format!("goes: {s}"),
            DrainProgress::Needed(s) => format!("needed: {s}"),
        };
        assert!(said.starts_with(words), "{said}\n{words}");
    }
    assert_eq!(progress(&fleet(3, all, all, &[]), ServerId(9)), None);
}
