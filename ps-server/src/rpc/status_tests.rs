//! Tests of `status`.

use super::*;
use std::time::Duration;

#[test]
fn waits_that_are_told_are_the_longest_ones() {
    const MORE: u32 = 100;
    let mut progress = Progress::default();
    progress.pushed(WorkerId(1 << 20));
    for worker in 0..MAX_WAITS as u32 + MORE {
        progress.waited(WorkerId(worker), Duration::from_secs(u64::from(worker)));
    }
    let told = who_waits(&progress);
    assert_eq!(told.len(), MAX_WAITS);
    assert!(told.iter().all(|w| w.worker >= MORE));
}
