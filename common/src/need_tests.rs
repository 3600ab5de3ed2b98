//! Tests of `need`.

use super::*;
use crate::{
    consistency::Mode,
    constraint::{Constraint, Rule},
    durability::Durability,
    layout::ParamGroup,
    optim::OptimizerConfig,
    placement::buckets_of,
};
use proptest::prelude::*;

fn job(params_len: usize, bucket_len: usize) -> ServerJob {
    ServerJob::new("need", Mode::Bsp, params_len, bucket_len)
}

fn adam() -> OptimizerConfig {
    toml::from_str("kind = \"adam\"\nlr = 0.1").expect("valid")
}

#[test]
fn bytes_are_read_as_they_are_written() {
    for (text, bytes) in [
        ("310 B", 310),
        ("310", 310),
        ("1.5 KiB", 1536),
        ("24GiB", 24 << 30),
        ("0.5TiB", 1 << 39),
        ("4m", 4 << 20),
    ] {
        assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)), "{text}");
    }
    for text in ["", "GiB", "1 GB", "-1 GiB", "1e300 TiB", "inf", "NaN", "1 2", "1 gb", "99999999TiB"] {
        assert!(text.parse::<Bytes>().is_err(), "{text}");
    }
}

#[test]
fn the_largest_job_with_adam_says_what_it_is_for() {
    let job = ServerJob { optimizer: adam(), ..job(1 << 34, 1 << 18) };
    let need: Need = (0..3).map(|shard| Need::of(&job, ShardId(shard), 3)).sum();
    assert_eq!((need.weights, need.slots), (64 << 30, 128 << 30));
    let text = need.to_string();
    assert!(text.contains("weights 64.0 GiB, slots 128.0 GiB"), "{text}");
    assert!(need.total() > 192 << 30);
}

#[test]
fn with_clipping_by_the_norm_a_steps_rows_wait_for_all() {
    let queued = |norm| {
        let mut job = job(1 << 10, 1 << 10);
        job.tables.push(crate::TableSpec { partitions: 100, ..crate::TableSpec::new("t", 4, 1000) });
        job.clip.norm = norm;
        Need::of(&job, ShardId(0), 1).queued
    };
    assert_eq!((queued(None), queued(Some(1.0))), (WINDOW, (100 << 20) + (4 << 10)));
}

#[test]
fn what_is_kept_of_workers_counts_for_each() {
    let kept = |algorithm: &str| {
        let job = ServerJob {
            optimizer: adam(),
            workers: 8,
            mode: Mode::Asp.into(),
            algorithm: toml::from_str(algorithm).expect("valid"),
            ..job(1 << 20, 1 << 18)
        };
        Need::of(&job, ShardId(0), 1).kept
    };
    assert_eq!(kept("kind = \"asgd\""), 0);
    assert_eq!(kept("kind = \"dc-asgd-c\"\nlambda = 0.1"), 8 * (4 << 20));
    assert_eq!(kept("kind = \"multi-asgd\""), 9 * 2 * (4 << 20), "of the fleet too");
}

#[test]
fn memory_need_is_bounded_and_zero_for_an_empty_shard() {
    let small = Need::of(&job(10, 4), ShardId(0), 1);
    assert_eq!((small.log, small.copies), (32 << 20, 40), "a log is that long before it is cut");
    let disk = ServerJob { durability: Durability::QuorumDisk, ..job(1 << 32, 1 << 18) };
    assert_eq!(Need::of(&disk, ShardId(0), 1).log, 64 << 20);
    let large = Need::of(&job(1 << 32, 1 << 18), ShardId(0), 1);
    assert_eq!((large.log, large.copies), (256 << 20, 1 << 30));
    assert_eq!(Need::of(&job(10, 16), ShardId(1), 2), Need::default());
}

#[test]
fn bytes_are_written_with_the_unit_that_fits() {
    let all = [310, 2048, 5 << 20, (4 << 30) + (100 << 20), 3 << 40].map(|b| Bytes(b).to_string());
    assert_eq!(all, ["310 B", "2.0 KiB", "5.0 MiB", "4.1 GiB", "3.0 TiB"]);
}

proptest! {
    #[test]
    fn what_a_shard_holds_is_what_its_buckets_add_up_to(
        params in 1usize..500, buffers in 0usize..100, len in 1usize..40, shards in 1u32..8,
        groups in prop::collection::vec(1usize..90, 0..5), cuts in prop::collection::btree_set(1usize..500, 0..4),
        rows in (0usize..100, 1usize..9, 1usize..60),
    ) {
        let params = if groups.is_empty() { params } else { groups.iter().sum() };
        let ends: Vec<usize> = cuts.into_iter().filter(|c| *c < params).chain([params]).collect();
        let stages: Vec<usize> = (0..ends.len()).map(|i| ends[i] - if i == 0 { 0 } else { ends[i - 1] }).collect();
        let (stages, buffers) = if stages.len() > 1 { (stages, 0) } else { (Vec::new(), buffers) };
        let groups = groups.iter().map(|n| ParamGroup::new(*n, 0.1, 0.0)).collect();
        let (offset, row, count) = rows;
        let held_to = Constraint { offset, values: row * count, rule: Rule::UnitNorm { row } };
        let whole = ServerJob { buffers_len: buffers, groups, stages, ..job(params, len) };
        let held_rows = ServerJob { constraints: vec![held_to], ..whole.clone() };
        // A constraint that does not fit the parameters makes the job invalid.
        let fits = held_rows.to_toml().is_ok_and(|text| ServerJob::decode(&text).is_ok());
        let job = if fits { held_rows } else { whole };
        for shard in (0..shards).map(ShardId) {
            let buckets = buckets_of(&job.layout(), shard, shards);
            let of = |kind| buckets.iter().filter(|(_, b)| b.kind == kind).map(|(_, b)| b.len as u64).sum();
            let want = (of(TensorKind::Param), of(TensorKind::Buffer), buckets.len() as u64);
            prop_assert_eq!(held(&job, shard, shards), want);
        }
    }
}
