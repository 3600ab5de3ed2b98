//! Tests of `digests`.

use super::*;
use futures::future::join_all;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[tokio::test]
async fn concurrent_callers_share_a_digest_no_older_than_the_call() {
    let (asked, applied, reads) = (DigestSlot::default(), AtomicU64::new(1), AtomicU64::new(0));
    let ask = || {
        share(
            &asked,
            || applied.load(Relaxed),
            || async {
                // The state changes while it is read, as in training.
                let index = applied.fetch_add(1, Relaxed);
                reads.fetch_add(1, Relaxed);
                tokio::task::yield_now().await;
                let head = index.to_le_bytes().to_vec().into();
                Some((index, RawImage { head, parts: Vec::new() }))
            },
        )
    };
    let answers = join_all((0..1000).map(|_| ask())).await;
    assert!(answers.iter().all(Option::is_some));
    assert_eq!(reads.load(Relaxed), 2, "the first one's, and one for all that came meanwhile");
    let before = applied.load(Relaxed);
    let (index, digest) = ask().await.expect("a digest");
    assert_eq!((index, reads.load(Relaxed)), (before, 3), "it is of now");
    applied.store(index, Relaxed);
    assert_eq!(ask().await, Some((index, digest)));
    assert_eq!(reads.load(Relaxed), 3, "nothing has changed since");
}
