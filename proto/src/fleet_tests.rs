//! Tests of `fleet`.

use super::*;
use crate::ShardInfo;

fn fleet(control: &[u64], shard: &[u64], silent: &[u64]) -> DescribeReply {
    let of = |voters: &[u64]| voters.iter().copied().filter(|v| silent.contains(v)).collect();
    let shard = ShardInfo { shard: 7, voters: shard.to_vec(), silent: of(shard), ..ShardInfo::default() };
    DescribeReply {
        control_voters: control.to_vec(),
        control_silent: of(control),
        shards: vec![shard],
        ..DescribeReply::default()
    }
}

#[test]
fn server_is_needed_if_a_group_loses_its_majority() {
    let both = ["the control group", "shard 7"];
    for (control, shard, silent, depend) in [
        (&[0, 1, 2][..], &[0, 1, 2][..], &[][..], &[][..]),
        (&[0, 1, 2], &[0, 1, 2], &[2], &both[..]),
        (&[0, 1, 2], &[0, 2, 3], &[2], &both[..1]), // it holds no replica, but votes on placement
        (&[0, 2, 3], &[0, 1, 2], &[2], &both[1..]),
        (&[0, 2, 3], &[0, 2, 3], &[0, 2, 3], &[]), // it is not part of the lost group
        (&[0, 1, 2, 3, 4], &[1], &[2], &both[1..]),
        (&[0, 1, 2, 3, 4], &[], &[2], &both[1..]), // its voters are unknown
    ] {
        assert_eq!(
            fleet(control, shard, silent).depend_on(1, &[]),
            depend,
            "{control:?} {shard:?} {silent:?}"
        );
    }
    let whole = fleet(&[0, 1, 2], &[0, 1, 2, 3, 4], &[]);
    assert_eq!(whole.depend_on(1, &[2]), both[..1], "five voters can lose two");
    assert_eq!(whole.depend_on(1, &[2, 3]), both);
    assert!(whole.depend_on(1, &[9]).is_empty(), "it is no voter");
    assert!(fleet(&[0, 1, 2], &[], &[2]).can_agree());
    assert!(!fleet(&[0, 1, 2], &[], &[1, 2]).can_agree());
    let mut noticed = fleet(&[0, 1, 2], &[0, 2, 3], &[]);
    noticed.note_silent(2);
    assert_eq!(noticed, fleet(&[0, 1, 2], &[0, 2, 3], &[2]));
}

#[test]
fn who_is_missing_is_named_with_a_remedy() {
    let knows = |silent: &[u64]| {
        let servers = [0, 1, 2].map(|server| ServerInfo {
            server,
            address: format!("h{server}:1"),
            state: if silent.contains(&server) { "silent" } else { "up" }.into(),
            ..ServerInfo::default()
        });
        Ok(DescribeReply { fleet: 9, servers: servers.into(), ..fleet(&[0, 1, 2], &[], silent) })
    };
    let refused = || Err("Connection refused".to_string());
    let nobody = [("h0:1".into(), Ok(DescribeReply::default())), ("h1:1".into(), refused())];
    let alone = [("h0:1".into(), knows(&[1, 2])), ("h1:1".into(), refused())];
    let none = [("h0:1".into(), Err("UnknownCA".into())), ("h1:1".into(), refused())];
    let starts = ["h0:1", "h1:1"].map(|a| (a.into(), Ok(DescribeReply::default())));
    for (answers, words) in [
        (nobody, ["has no leader", "that answer: h0:1;", "h1:1 (Connection refused)", "--data"]),
        (alone, ["no majority", "that answer: h0:1;", "s1 at h1:1, s2 at h2:1", "--data"]),
        (none, ["no server answered", "h0:1: UnknownCA", "h1:1: Connection refused", "\n"]),
        (starts, ["has no leader", "h0:1, h1:1", "They elect one", "try again"]),
    ] {
        let said = no_leader(&answers);
        words.iter().for_each(|w| assert!(said.contains(w), "`{w}` is not in: {said}"));
    }
}
