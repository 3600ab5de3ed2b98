//! Which shard holds a bucket, and which servers hold a shard.

use crate::{
    id::{BucketId, ServerId, ShardId},
    layout::{BucketSpec, Layout},
};

/// The shard of a bucket: buckets go round the shards, so that the last layers, which are pushed first, and
/// the first layers, which are needed first, are spread over all leaders. The buckets of a stage go round shards of its own, so
/// that who has the stage is the only one of its worker to speak with them.
pub fn shard_of(layout: &Layout, bucket: BucketId, shards: u32) -> ShardId {
    let stage = layout.stage_of(bucket);
    let Some(own) = shards_of(stage, layout.stages(), shards) else {
        return ShardId(bucket.0 % shards.max(1));
    };
    let nth = (bucket.0 - layout.buckets_in(stage).start) % own;
    ShardId(stage as u32 + nth * layout.stages() as u32)
}

/// How many shards the buckets of a stage go round: of so many every `stages`-th from its number on. `None`: there are fewer shards than
/// stages, and they share them.
pub(crate) fn shards_of(stage: usize, stages: usize, shards: u32) -> Option<u32> {
    let (stage, stages) = (stage as u32, stages as u32);
    (shards >= stages).then(|| (shards - stage).div_ceil(stages))
}

/// The buckets of one shard, in rising order.
pub fn buckets_of(layout: &Layout, shard: ShardId, shards: u32) -> Vec<(BucketId, BucketSpec)> {
    ids_of(layout, shard, shards).map(|id| (id, layout.buckets()[id.0 as usize])).collect()
}

/// Their ids, in rising order.
pub fn ids_of(layout: &Layout, shard: ShardId, shards: u32) -> impl Iterator<Item = BucketId> + use<> {
    let stages = layout.stages() as u32;
    let (shards, stage) = (shards.max(1), shard.0 % stages);
    let (buckets, first, step) = match shards_of(stage as usize, stages as usize, shards) {
        _ if shard.0 >= shards => (0..0, 0, 1),
        Some(own) => (layout.buckets_in(stage as usize), shard.0 / stages, own),
        None => (0..layout.buckets().len() as u32, shard.0, shards),
    };
    (buckets.start.saturating_add(first)..buckets.end).step_by(step as usize).map(BucketId)
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
#[path = "placement_tests.rs"]
mod tests;
