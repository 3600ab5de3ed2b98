//! Tests of `counters`.

use super::*;
use crate::shard::leader::tests::shard_of;
use paraft_common::{Mode, config::ServerJob};
use std::thread;

/// A status locks these counters while it reads the state. An update that waits for the state keeps later readers out, so
/// whoever waited there with a lock would wait for ever.
#[test]
fn a_workers_report_waits_for_the_state_without_a_lock() {
    let shard = &shard_of(&ServerJob::new("t", Mode::Asp, 16, 8));
    let counters = &Counters::default();
    thread::scope(|scope| {
        shard.read(|_| {
            scope.spawn(|| drop(shard.meta_mut()));
            thread::sleep(Duration::from_millis(100));
            scope.spawn(|| counters.take_about(shard, WorkerId(1), WorkerInfo::default()));
            thread::sleep(Duration::from_millis(100));
            assert!(counters.about.try_lock().is_some());
        });
    });
    assert!(counters.about.lock().contains_key(&WorkerId(1)));
}
