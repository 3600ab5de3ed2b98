//! Tests of `payload_queue`.

use super::*;
use futures::FutureExt;

#[tokio::test]
async fn full_queue_makes_streams_wait_in_order() {
    let queued = PayloadQueue::of(100);
    let first = queued.room(60).await;
    let mut second = Box::pin(queued.room(60));
    assert!(second.as_mut().now_or_never().is_none(), "no room");
    let mut third = Box::pin(queued.room(10));
    assert!(third.as_mut().now_or_never().is_none(), "it does not overtake");
    drop(first);
    let second = second.await;
    let third = third.await;
    assert_eq!(queued.bytes(), 70);
    drop((second, third));
    assert_eq!(queued.bytes(), 0);
    let all = queued.room(1000).await;
    assert_eq!((queued.bytes(), queued.most()), (100, 100));
    drop(all);
    drop(queued.room(0).await);
}

#[test]
fn all_shards_of_a_server_stay_within_a_gigabyte() {
    for shards in 1..=64 {
        assert!(PayloadQueue::of_one_in(shards).most * shards as usize <= SERVER_BYTES, "{shards}");
    }
    assert_eq!(
        (PayloadQueue::of_one_in(1).most, PayloadQueue::of_one_in(64).most),
        (SHARD_BYTES, MIN_SHARD_BYTES)
    );
}
