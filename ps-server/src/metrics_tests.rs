//! Tests of `metrics`.

use super::*;
use paraft_proto::WorkerStaleness;

#[test]
fn a_workers_staleness_is_added_up_over_the_shards() {
    let bin = |upper, count| Bin { upper, count };
    let late = |worker| WorkerStaleness {
        worker,
        delay_counts: vec![4, 0, 3],
        distance: vec![bin(0.0, 4), bin(1.0, 2), bin(1e9, 1)],
        distance_sum: 1.5,
        age_seconds: vec![bin(0.25, 7)],
        age_seconds_sum: 1.25,
    };
    let shard = |workers: &[u32]| ShardStatus {
        job_name: "j".into(),
        staleness: workers.iter().copied().map(late).collect(),
        ..ShardStatus::default()
    };
    let reply = StatusReply { shards: vec![shard(&[0, 1]), shard(&[1])], ..StatusReply::default() };
    let mut registry = Registry::with_prefix("paraft");
    staleness(&mut registry, &reply);
    let mut text = String::new();
    encode(&mut text, &registry).expect("text");
    for line in [
        "paraft_worker_push_delay_versions_sum{job_name=\"j\",worker=\"1\"} 12.0",
        "paraft_worker_push_delay_versions_bucket{le=\"1.0\",job_name=\"j\",worker=\"1\"} 8",
        "paraft_worker_push_delay_versions_bucket{le=\"2.0\",job_name=\"j\",worker=\"1\"} 14",
        "paraft_worker_push_distance_steps_bucket{le=\"1.0\",job_name=\"j\",worker=\"0\"} 6",
        "paraft_worker_push_distance_steps_bucket{le=\"+Inf\",job_name=\"j\",worker=\"0\"} 7",
        "paraft_worker_push_age_seconds_sum{job_name=\"j\",worker=\"0\"} 1.25",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
}
