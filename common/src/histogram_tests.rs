//! Tests of `histogram`.

use super::*;

#[test]
fn counts_that_no_run_can_have_do_not_overflow() {
    let mut h = DelayHistogram::from_counts(&[vec![u64::MAX; 2], vec![1; 2000]].concat());
    h.merge(&h.clone());
    h.record(0);
    assert_eq!((h.total(), h.quantile(0.99), h.max()), (u64::MAX, Some(0), Some(1024)));
}

#[test]
fn histogram_buckets_are_exact_to_a_factor_of_root_two() {
    let mut h = LogHistogram::default();
    assert_eq!((h.mean(), h.quantile(0.5)), (None, None));
    let numbers = [0.0, 1e-3, 0.5, 1.0, 3.0, 1e6, f64::INFINITY, f64::NAN, -1.0];
    numbers.iter().for_each(|n| h.record(*n));
    assert_eq!(h.total(), 9);
    for (share, number) in
        [(0.1, 0.0), (4.0 / 9.0, 0.5), (5.0 / 9.0, 1.0), (6.0 / 9.0, 3.0), (7.0 / 9.0, 1e6)]
    {
        let bound = h.quantile(share).expect("not empty");
        assert!(bound >= number * 0.999 && bound <= number * 1.42, "{number} is up to {bound}");
    }
    let read = LogHistogram::from_bins(h.bins(), h.sum());
    assert_eq!(read, h);
    assert_eq!(h.bins()[0], (0.0, 2));
}

#[test]
fn quantiles_follow_their_definition() {
    let mut h = DelayHistogram::default();
    assert_eq!(h.quantile(0.5), None);
    for d in [0, 0, 0, 1, 1, 2, 5, 5, 5, 9] {
        h.record(d);
    }
    assert_eq!((h.quantile(0.0), h.quantile(0.3), h.quantile(0.5)), (Some(0), Some(0), Some(1)));
    assert_eq!((h.quantile(0.99), h.max(), h.total()), (Some(9), Some(9), 10));
    h.record(u64::MAX);
    assert_eq!(h.max(), Some(DelayHistogram::EXACT as u64));
    assert_eq!(DelayHistogram::from_counts(h.counts()), h);
}
