//! Which shard holds a bucket, and which servers hold a shard.

use crate::{
    id::{BucketId, ServerId, ShardId},
    layout::{BucketSpec, Layout},
};

/// The shard of a bucket: buckets go round the shards, so that the last layers, which are pushed first, and
/// the first layers, which are needed first, are spread over all leaders.
pub fn shard_of(bucket: BucketId, shards: u32) -> ShardId {
    ShardId(bucket.0 % shards.max(1))
}

/// The buckets of one shard, in rising order.
pub fn buckets_of(layout: &Layout, shard: ShardId, shards: u32) -> Vec<(BucketId, BucketSpec)> {
    (0u32..)
        .zip(layout.buckets())
        .map(|(i, b)| (BucketId(i), *b))
        .filter(|(id, _)| shard_of(*id, shards) == shard)
        .collect()
}

/// The ids of a shard's buckets among so many, in rising order. The shard is one of `shards`.
pub fn ids_of(shard: ShardId, shards: u32, buckets: usize) -> impl Iterator<Item = BucketId> {
    (shard.0..u32::try_from(buckets).unwrap_or(u32::MAX)).step_by(shards.max(1) as usize).map(BucketId)
}

/// The servers that replicate a shard. The first is its preferred leader; preferred leaders go round the
/// servers, so that leadership is spread.
pub fn replicas_of(shard: ShardId, servers: u32, replicas: u32) -> Vec<ServerId> {
    let servers = servers.max(1);
    (0..replicas.min(servers)).map(|r| ServerId(u64::from((shard.0 % servers + r) % servers))).collect()
}

/// How many of so many servers vote in the control group: an odd number, at most five.
pub fn control_voters(servers: usize) -> usize {
    match servers.min(5) {
        0 => 0,
        n => (n - 1) | 1,
    }
}

/// The bucket length, in values, for a flat vector of `params_len` values over `shards` shards: at most
/// 1 MiB a bucket, and small models are cut so that every shard holds a part.
pub fn default_bucket_len(params_len: usize, shards: u32) -> usize {
    const MAX: usize = (1 << 20) / 4;
    const MIN: usize = 1024;
    params_len.div_ceil(shards.max(1) as usize).clamp(MIN, MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_odd_number_of_servers_votes_in_the_control_group() {
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 100].map(control_voters), [0, 1, 1, 3, 3, 5, 5, 5]);
    }
    use crate::layout::TensorSpec;

    #[test]
    fn every_bucket_has_one_shard_and_leaders_are_spread() {
        let layout = Layout::new(vec![TensorSpec::param("w", &[10_000])], 999).expect("valid");
        let mut seen = 0;
        for s in 0..3 {
            let ids: Vec<BucketId> =
                buckets_of(&layout, ShardId(s), 3).into_iter().map(|(id, _)| id).collect();
            assert_eq!(ids_of(ShardId(s), 3, layout.buckets().len()).collect::<Vec<_>>(), ids);
            let mine = buckets_of(&layout, ShardId(s), 3);
            assert!(mine.iter().all(|(id, _)| shard_of(*id, 3) == ShardId(s)));
            seen += mine.len();
        }
        assert_eq!(seen, layout.buckets().len());
        let leaders: Vec<_> = (0..3).map(|s| replicas_of(ShardId(s), 3, 3)[0]).collect();
        assert_eq!(leaders, [ServerId(0), ServerId(1), ServerId(2)]);
        assert_eq!(replicas_of(ShardId(1), 3, 1), [ServerId(1)]);
    }
}
