//! Tests of `fair_queue`.

use super::*;
use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use std::collections::BTreeMap;

/// The bytes served to each job in `turns` slots, one at a time, if it always has this many pieces of
/// this size waiting.
fn served(jobs: &[(u32, usize, u64)], turns: usize) -> BTreeMap<u32, u64> {
    let all = FairQueue::new(1);
    let mut waiting = FuturesUnordered::new();
    let ask = |job: u32, bytes: u64| {
        let all = all.clone();
        async move { (job, bytes, all.of(job, bytes).await.expect("a turn")) }.boxed()
    };
    let held = all.of(99, 1).now_or_never().flatten().expect("nobody else");
    for (job, pieces, bytes) in jobs {
        (0..*pieces).for_each(|_| waiting.push(ask(*job, *bytes)));
    }
    // They take their places in the queue.
    assert!(waiting.next().now_or_never().is_none());
    drop(held);
    let mut got = BTreeMap::new();
    for _ in 0..turns {
        let (job, bytes, turn) = waiting.next().now_or_never().flatten().expect("somebody's turn");
        *got.entry(job).or_default() += bytes;
        waiting.push(ask(job, bytes));
        assert!(waiting.next().now_or_never().is_none(), "one at a time");
        drop(turn);
    }
    got
}

#[test]
fn jobs_that_always_want_more_get_as_much_whatever_they_ask_for() {
    // One piece at a time, a crowd of them, and fewer but larger ones.
    let got = served(&[(1, 2, 1000), (2, 64, 1000), (3, 8, 4000)], 3000);
    let most = got.values().max().expect("all");
    for (job, bytes) in &got {
        assert!(most - bytes <= 8000, "job {job}: {got:?}");
    }
    assert_eq!(got.len(), 3);
}

#[test]
fn who_wanted_nothing_has_nothing_saved_up() {
    let all = FairQueue::new(1);
    let turn = |job| all.of(job, 100).now_or_never().flatten().expect("free");
    (0..50).for_each(|_| drop(turn(1)));
    // The other job comes now: it does not get 50 slots in a row.
    let held = turn(1);
    let mut waiting: Vec<_> = [2, 2, 2, 1, 1, 1].map(|job| Box::pin(all.of(job, 100))).into();
    assert!(waiting.iter_mut().all(|w| w.as_mut().now_or_never().is_none()));
    let mut order = Vec::new();
    let mut held = Some(held);
    while waiting.iter().len() > order.len() {
        drop(held.take());
        let at = (0..6).find(|at| {
            !order.contains(at) && {
                held = waiting[*at].as_mut().now_or_never().flatten();
                held.is_some()
            }
        });
        order.push(at.expect("somebody's turn"));
    }
    let jobs: Vec<u32> = order.iter().map(|at| if *at < 3 { 2 } else { 1 }).collect();
    assert!(jobs == [2, 1, 2, 1, 2, 1] || jobs == [2, 2, 1, 2, 1, 1], "{jobs:?}");
}

#[test]
fn who_goes_away_takes_nobody_s_turn_along() {
    let all = FairQueue::new(2);
    let held: Vec<_> = (0..2).map(|_| all.of(1, 1).now_or_never().flatten().expect("free")).collect();
    let mut goes = Box::pin(all.of(2, 1));
    let mut stays = Box::pin(all.of(2, 1));
    assert!(goes.as_mut().now_or_never().is_none() && stays.as_mut().now_or_never().is_none());
    drop(goes);
    drop(held);
    assert!(stays.as_mut().now_or_never().flatten().is_some());
    // A future that had its slot already and was never polled again.
    let held: Vec<_> = (0..2).map(|_| all.of(1, 1).now_or_never().flatten().expect("free")).collect();
    let mut goes = Box::pin(all.of(2, 1));
    assert!(goes.as_mut().now_or_never().is_none());
    drop(held);
    drop(goes);
    let both: Vec<_> = (0..2).filter_map(|_| all.of(3, 1).now_or_never().flatten()).collect();
    assert_eq!(both.len(), 2, "both turns are free");
}
