//! Tests of `sampler`.

use super::*;
use std::collections::BTreeMap;

/// Every size up to 40 with every world up to 9, rather than some at random.
#[test]
fn shares_are_equal_disjoint_and_cover_all_but_the_rest() {
    for len in 1..40usize {
        for world in 1..10usize {
            for drop_last in [false, true] {
                let s = Sampler { drop_last, ..Sampler::new(len, 5) };
                let shares: Vec<_> = (0..world).map(|r| s.share(3, r, world)).collect();
                assert!(shares.iter().all(|x| x.len() == s.share_len(world)));
                let mut seen = BTreeMap::new();
                shares.iter().flatten().for_each(|i| *seen.entry(*i).or_insert(0usize) += 1);
                let total: usize = seen.values().sum();
                let case = format!("{len} samples, {world} workers, drop {drop_last}");
                if drop_last {
                    assert!(seen.values().all(|&n| n == 1) && len - total < world, "{case}");
                } else {
                    assert!(seen.len() == len && total - len < world, "{case}");
                    let most = total.div_ceil(len);
                    assert!(seen.values().all(|&n| n == most || n + 1 == most), "{case}");
                }
            }
        }
    }
}

/// Made with PyTorch 2.15: `list(DistributedSampler(range(len), world, rank, shuffle=False, drop_last=d))`.
#[test]
fn the_index_arithmetic_is_pytorchs() {
    let cases: [(usize, usize, usize, bool, &[u32]); 6] = [
        (10, 3, 0, false, &[0, 3, 6, 9]),
        (10, 3, 2, false, &[2, 5, 8, 1]),
        (10, 3, 2, true, &[2, 5, 8]),
        (3, 8, 7, false, &[1]),
        (3, 8, 7, true, &[]),
        (9, 3, 1, true, &[1, 4, 7]),
    ];
    for (len, world, rank, drop_last, expected) in cases {
        let s = Sampler { shuffle: false, drop_last, ..Sampler::new(len, 0) };
        assert_eq!(s.share(0, rank, world), expected, "{len} {world} {rank} {drop_last}");
    }
}

#[test]
fn the_order_is_pinned() {
    let s = Sampler::new(12, 42);
    assert_eq!(s.order(0), PINNED_0);
    assert_eq!(s.order(1), PINNED_1);
    assert_eq!(Sampler::new(12, 42).order(1), s.order(1));
    assert_ne!(Sampler::new(12, 43).order(1), s.order(1));
}

/// Computed by a separate ChaCha8 and Fisher-Yates in Python, so that the test does not pin an error of ours.
const PINNED_0: [u32; 12] = [4, 9, 5, 8, 11, 6, 7, 10, 2, 0, 3, 1];
const PINNED_1: [u32; 12] = [8, 0, 6, 2, 4, 10, 3, 9, 1, 11, 5, 7];

/// Chi-square over the place of sample 0 in 6,000 orders of 6: 5 degrees of freedom, 99.99 % below 25.8.
#[test]
fn every_place_is_equally_likely() {
    let mut count = [0f64; 6];
    for epoch in 0..6000 {
        let order = Sampler::new(6, 1).order(epoch);
        count[order.iter().position(|&i| i == 0).expect("a permutation")] += 1.0;
    }
    let chi: f64 = count.iter().map(|c| (c - 1000.0).powi(2) / 1000.0).sum();
    assert!(chi < 25.8, "{count:?}");
}

/// Every size up to 40 with every chunk up to 12, whole and short batches.
#[test]
fn chunks_are_the_order_cut_into_pieces() {
    for len in 0..40usize {
        for size in 1..13 {
            for batch in 1..6 {
                let s = Sampler { drop_last: true, drop_last_batch: true, ..Sampler::new(len, 5) };
                let order = s.order(2);
                let all: Vec<Vec<u32>> =
                    (0..s.chunks(size)).flat_map(|c| chunk_of(&order, c, size, batch)).collect();
                assert_eq!(all.concat(), order, "{len} samples in chunks of {size}");
                assert!(all.iter().all(|b| !b.is_empty() && b.len() <= batch));
                assert_eq!(chunk_of(&order, s.chunks(size), size, batch).count(), 0);
                assert_eq!(chunk_of(&order, u64::MAX, size, batch).count(), 0);
            }
        }
    }
}

#[test]
fn batches_are_full_but_for_the_last() {
    let s = Sampler::new(103, 9);
    let sizes = |s: &Sampler| s.batches(0, 1, 4, 8).map(|b| b.len()).collect::<Vec<_>>();
    assert_eq!(sizes(&s), [8, 8, 8, 2]);
    let full = Sampler { drop_last_batch: true, ..s };
    assert_eq!(sizes(&full), [8, 8, 8]);
    assert_eq!((s.batches(0, 1, 4, 8).len(), full.steps(4, 8)), (4, 3));
    assert_eq!(s.batches(0, 1, 4, 8).flatten().collect::<Vec<_>>(), s.share(0, 1, 4));
    assert_eq!(Sampler::new(0, 1).batches(0, 0, 1, 4).count(), 0);
}
