//! Tests of `prefetch`.

use super::*;
use crate::{Sampler, Samples};
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn batches_come_in_order_and_are_what_fill_gives() {
    let values = (0..300).map(|i| i as f32).collect();
    let labels = (0..100).map(|i| i % 7).collect();
    let data = Arc::new(Dataset::new(Samples::Floats(values), vec![3], Some((labels, 7))).expect("fits"));
    let sampler = Sampler::new(100, 1);
    let indices = (0..3).flat_map(move |epoch| sampler.batches(epoch, 0, 2, 8));
    let mut prefetcher = Prefetcher::over(Arc::clone(&data), indices.clone()).expect("starts");
    for expected in indices {
        let batch = prefetcher.next().expect("a batch").expect("filled");
        let (mut x, mut y) = (Vec::new(), Vec::new());
        data.fill(&expected, &mut x, &mut Vec::new(), &mut y).expect("in memory");
        assert_eq!(batch, Minibatch { inputs: x, tokens: Vec::new(), labels: y, n: expected.len() });
        prefetcher.recycle(batch);
    }
    assert!(prefetcher.next().is_none());
    assert!(prefetcher.next().is_none());
}

#[test]
fn no_more_than_the_bound_is_filled_ahead_and_buffers_come_back() {
    let filled = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&filled);
    let mut p = Prefetcher::spawn(move |b: &mut Vec<u8>| {
        if b.is_empty() {
            b.resize(1 << 10, count.fetch_add(1, Ordering::SeqCst) as u8);
        }
        Ok(true)
    })
    .expect("starts");
    let mut used = std::collections::BTreeSet::new();
    for _ in 0..200 {
        let buffer = p.next().expect("endless").expect("filled");
        used.insert(buffer.as_ptr() as usize);
        p.recycle(buffer);
    }
    assert!(used.len() <= DEPTH + 2, "{} buffers", used.len());
    drop(p); // ends though the thread is waiting to send
    assert!(filled.load(Ordering::SeqCst) <= DEPTH + 2);
}

#[test]
fn a_panic_and_an_error_come_out_of_next_and_stay() {
    let mut n = 0;
    let mut p = Prefetcher::spawn(move |b: &mut u32| {
        n += 1;
        *b = n;
        assert!(n < 3, "bad sample {n}");
        Ok(true)
    })
    .expect("starts");
    assert_eq!((p.next().expect("1").expect("ok"), p.next().expect("2").expect("ok")), (1, 2));
    let text = p.next().expect("a result").expect_err("the panic").to_string();
    assert_eq!(text, "the data thread stopped: it panicked: bad sample 3");
    assert!(p.next().expect("a result").is_err());

    let mut p = Prefetcher::spawn(|_: &mut u32| Err(DataError::Mismatch("no".into()))).expect("starts");
    assert!(matches!(p.next(), Some(Err(DataError::Mismatch(_)))));
    assert!(matches!(p.next(), Some(Err(DataError::Stopped(_)))));
}
