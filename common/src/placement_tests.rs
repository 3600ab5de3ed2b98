//! Tests of `placement`.

use super::*;

#[test]
fn an_odd_number_of_servers_votes_in_the_control_group() {
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 100].map(control_voters), [0, 1, 1, 3, 3, 5, 5, 5]);
}
use crate::layout::{Cuts, TensorSpec};

#[test]
fn the_buckets_of_a_stage_are_on_shards_that_have_no_other() {
    for (shards, stages) in
        [(2, vec![3000, 7000]), (5, vec![1, 8000, 1999]), (3, vec![10_000]), (7, vec![2000; 5])]
    {
        let tensors = vec![TensorSpec::param("w", &[10_000])];
        let layout = Layout::cut(tensors, Cuts { stages: &stages, ..Cuts::default() }, 333).expect("valid");
        let mut seen = Vec::new();
        for shard in (0..shards).map(ShardId) {
            let ids: Vec<BucketId> = ids_of(&layout, shard, shards).collect();
            assert!(ids.is_sorted() && ids.iter().all(|id| shard_of(&layout, *id, shards) == shard));
            let of: Vec<usize> = ids.iter().map(|id| layout.stage_of(*id)).collect();
            assert!(of.iter().all(|stage| *stage == shard.0 as usize % stages.len()), "{of:?}");
            seen.extend(ids);
        }
        seen.sort_unstable();
        let all: Vec<BucketId> = (0..layout.buckets().len() as u32).map(BucketId).collect();
        assert_eq!(seen, all, "{stages:?} on {shards}");
        assert_eq!(ids_of(&layout, ShardId(shards), shards).count(), 0, "no such shard");
    }
}

#[test]
fn every_bucket_has_one_shard_and_leaders_are_spread() {
    let layout = Layout::new(vec![TensorSpec::param("w", &[10_000])], 999).expect("valid");
    let mut seen = 0;
    for s in 0..3 {
        let ids: Vec<BucketId> = buckets_of(&layout, ShardId(s), 3).into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids_of(&layout, ShardId(s), 3).collect::<Vec<_>>(), ids);
        let mine = buckets_of(&layout, ShardId(s), 3);
        assert!(mine.iter().all(|(id, _)| shard_of(&layout, *id, 3) == ShardId(s)));
        seen += mine.len();
    }
    assert_eq!(seen, layout.buckets().len());
    let leaders: Vec<_> = (0..3).map(|s| replicas_of(ShardId(s), 3, 3)[0]).collect();
    assert_eq!(leaders, [ServerId(0), ServerId(1), ServerId(2)]);
    assert_eq!(replicas_of(ShardId(1), 3, 1), [ServerId(1)]);
}
