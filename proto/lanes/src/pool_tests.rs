//! Tests of `pool`.

use super::*;

#[test]
fn a_buffer_is_used_again_when_the_last_view_of_it_is_gone() {
    let pool = Pool::new(1 << 20);
    let mut first = pool.take(100_000);
    first.as_mut().fill(7);
    let first = first.freeze();
    let (at, view) = (first.as_ptr(), first.slice(10..20));
    drop(first);
    assert_ne!(pool.take(100_000).as_ref().as_ptr(), at, "somebody reads it");
    assert_eq!(view[..], [7; 10]);
    drop(view);
    assert_eq!(pool.take(99_999).as_ref().as_ptr(), at);
    assert_eq!(pool.take(99_999).as_ref().len(), 99_999);
}

#[test]
fn pool_keeps_its_maximum_and_lends_no_oversized_buffer() {
    let pool = Pool::new(1 << 20);
    drop((0..20).map(|_| pool.take(100_000)).collect::<Vec<_>>());
    assert!(pool.lock().bytes <= 1 << 20);
    let before = pool.lock().buffers.len();
    assert_eq!(pool.take(70_000).words.len(), 8750, "a new one");
    assert_eq!(pool.lock().buffers.len(), before);
    drop(pool.take(100));
    assert_eq!(pool.lock().buffers.len(), before, "small ones are not kept");
    drop(pool.take(2 << 20));
    assert!(pool.lock().bytes <= 1 << 20, "nor those beyond all bounds");
    for _ in 0..20 {
        drop((pool.take(300_000), pool.take(300_000)));
    }
    assert!(pool.lock().buffers.iter().any(|b| b.len() == 37_500), "other sizes make way");
}
