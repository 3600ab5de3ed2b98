//! Tests of `compute`.

use super::*;
use std::thread::{ThreadId, current};

async fn threads() -> [ThreadId; 3] {
    let id = || current().id();
    [current().id(), run(0, LARGE_BYTES, id).await.expect("done"), long(SMALL_BYTES, id).await.expect("done")]
}

#[tokio::test(flavor = "multi_thread")]
async fn large_work_leaves_the_runtimes_thread_and_small_work_stays() {
    let [here, short, long] = tokio::spawn(threads()).await.expect("a task");
    assert!(here != short && here != long);
    let stays = tokio::spawn(async {
        (current().id(), run(0, LARGE_BYTES - 1, || current().id()).await.expect("done"))
    });
    let (here, there) = stays.await.expect("a task");
    assert_eq!(here, there);
}

#[tokio::test(start_paused = true)]
async fn on_a_runtime_with_one_thread_everything_stays() {
    let [here, short, long] = threads().await;
    assert_eq!([here; 2], [short, long]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_an_error_and_the_next_work_is_done() {
    for _ in 0..20 {
        for bytes in [SMALL_BYTES, LARGE_BYTES] {
            let said: Result<(), _> = run(0, bytes, || panic!("on purpose")).await;
            assert_eq!(said, Err(Panicked("on purpose".into())));
        }
        let said: Result<(), _> = long(SMALL_BYTES, || panic!("number {}", 7)).await;
        assert_eq!(said, Err(Panicked("number 7".into())));
    }
    assert_eq!((run(0, SMALL_BYTES, || 1).await, long(SMALL_BYTES, || 2).await), (Ok(1), Ok(2)));
}
