//! The encodings that leave most of a gradient out, and error feedback, against what must be true of them.

use super::*;
use crate::{
    draws,
    id::{BucketId, Step},
    layout::{Layout, TensorSpec},
    payload::{Payload, tests::cut},
};
use proptest::prelude::*;

fn top_k(millionths: u32) -> Encoding {
    Encoding::TopK(Fraction::millionths(millionths).expect("in its range"))
}

fn rank(columns: u8) -> Rank {
    Rank::new(columns).expect("in its range")
}

fn decoded(encoding: Encoding, bytes: &[u8], count: usize) -> Vec<f32> {
    let (payload, mut out) = (Payload::from(bytes.to_vec()), vec![7.0; count]);
    Values::new(&payload, encoding, count).expect("it can be read").read(&mut out).expect("as many");
    out
}

/// Whole numbers from -7 to 7, most of them small.
fn whole_numbers(step: u64, count: usize) -> Vec<f32> {
    let draw = |i: usize| draws::draw(step, i as u64);
    (0..count).map(|i| ((draw(i) % 15) as f32 - 7.0) * f32::from((draw(i) >> 60 < 3) as u8 + 1)).collect()
}

/// The identity of error feedback: nothing is lost and nothing comes from nowhere. All sums are whole numbers far below
/// 2^24, so that not a bit may differ.
#[test]
fn sent_values_plus_residual_equal_the_gradient() {
    const COUNT: usize = 2500;
    let encoding = top_k(10_000);
    let mut encoder = Encoder::new(encoding, COUNT, Vec::new(), 5);
    let (mut sent, mut computed) = (vec![0f32; COUNT], vec![0f32; COUNT]);
    for step in 1..=500 {
        let gradient = whole_numbers(step, COUNT);
        let mut bytes = Vec::new();
        encoder.encode(Step(step), &gradient, &mut bytes);
        assert_eq!(bytes.len(), encoder.encoded_len());
        let push = decoded(encoding, &bytes, COUNT);
        assert!(push.iter().filter(|v| **v != 0.0).count() <= COUNT / 100, "1 % of them");
        sent.iter_mut().zip(&push).for_each(|(s, v)| *s += v);
        computed.iter_mut().zip(&gradient).for_each(|(s, v)| *s += v);
    }
    let all: Vec<f32> = sent.iter().zip(encoder.residual()).map(|(s, e)| s + e).collect();
    assert_eq!(all, computed);
    assert!(sent.iter().filter(|v| **v != 0.0).count() > COUNT / 2, "it sends all in turn");
    assert!(encoder.residual().iter().any(|v| *v != 0.0), "it holds something back");
    encoder.forget();
    assert!(encoder.residual().is_empty());
}

/// The same of the others, up to what the two sums round.
#[test]
fn no_encoding_that_feeds_back_loses_more_than_rounding() {
    const COUNT: usize = 24 * 60;
    let matrix = Stretch::Matrix { rows: 24, columns: 60 };
    for encoding in Encoding::ALL.into_iter().filter(|e| e.feeds_back()) {
        let mut encoder = Encoder::new(encoding, COUNT, vec![matrix], 5);
        let (mut sent, mut computed) = (vec![0f64; COUNT], vec![0f64; COUNT]);
        for step in 1..=300 {
            let gradient: Vec<f32> = whole_numbers(step, COUNT).iter().map(|v| v * 0.1).collect();
            let mut bytes = Vec::new();
            encoder.encode(Step(step), &gradient, &mut bytes);
            for (s, v) in sent.iter_mut().zip(decoded(encoding, &bytes, COUNT)) {
                *s += f64::from(v);
            }
            computed.iter_mut().zip(&gradient).for_each(|(s, v)| *s += f64::from(*v));
        }
        for ((s, e), c) in sent.iter().zip(encoder.residual()).zip(&computed) {
            assert!((s + f64::from(*e) - c).abs() < 2e-3, "{encoding}: {s} and {e} are not {c}");
        }
    }
}

/// Karimireddy et al., 2019, counter-example 1, once for each of a block's values: the slope is 4 with probability 1/4 and -1
/// with 3/4, so 1/4 in the mean, and the minimum over [-1, 1] lies at -1. Signs alone go up three times out of four and end at
/// the maximum; with error feedback the same signs go down.
#[test]
fn signs_alone_climb_where_error_feedback_descends() {
    const COUNT: usize = 512;
    let ends = |feedback: bool| {
        let mut encoder = Encoder::new(Encoding::Sign, COUNT, Vec::new(), 0);
        let mut x = vec![0f32; COUNT];
        let (mut last, rate) = (0.0, 0.002);
        for step in 1..=6000u64 {
            let up = |i: usize| draws::draw(step, i as u64) >> 62 > 0;
            let slopes: Vec<f32> = (0..COUNT).map(|i| if up(i) { -1.0 } else { 4.0 }).collect();
            let mut bytes = Vec::new();
            match feedback {
                true => encoder.encode(Step(step), &slopes, &mut bytes),
                false => Encoding::Sign.encode(&slopes, &mut bytes),
            }
            let push = decoded(Encoding::Sign, &bytes, COUNT);
            x.iter_mut().zip(&push).for_each(|(x, v)| *x = (*x - rate * v).clamp(-1.0, 1.0));
            if step > 4000 {
                last += x.iter().map(|x| f64::from(*x)).sum::<f64>() / (COUNT as f64 * 2000.0);
            }
        }
        last
    };
    let (plain, fed_back) = (ends(false), ends(true));
    assert!(plain > 0.97, "signs alone end at {plain}");
    assert!(fed_back < -0.95, "with error feedback they end at {fed_back}");
}

#[test]
fn top_k_sends_the_largest_and_of_equal_ones_the_first() {
    let values = [0.5, -3.0, 2.0, -2.0, 2.0, 0.0, 1.0, -0.25, 2.0, 0.1];
    let mut bytes = Vec::new();
    top_k(400_000).encode(&values, &mut bytes);
    assert_eq!(bytes.len(), 4 * 8);
    let places: Vec<u32> = bytes[..16].as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    assert_eq!(places, [1, 2, 3, 4]);
    let expected = [0.0, -3.0, 2.0, -2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    assert_eq!(decoded(top_k(400_000), &bytes, 10), expected);
}

#[test]
fn signs_have_the_mean_magnitude_of_their_block() {
    let values = [vec![1.0; 512], vec![-3.0; 512], vec![-0.5, 0.0, 2.5]].concat();
    let mut bytes = Vec::new();
    Encoding::Sign.encode(&values, &mut bytes);
    assert_eq!(bytes.len(), 4 + 128 + 4 + 1);
    let expected = [vec![2.0; 512], vec![-2.0; 512], vec![-1.0, 1.0, 1.0]].concat();
    assert_eq!(decoded(Encoding::Sign, &bytes, 1027), expected);
}

/// A matrix of this rank: a sum of so many products of two vectors.
fn of_rank(true_rank: usize, rows: usize, columns: usize) -> Vec<f32> {
    let value = |r: usize, i: usize| draws::between(100 + r as u64, i as u64);
    let at = |i: usize| {
        let (row, column) = (i / columns, i % columns);
        (0..true_rank).map(|r| value(2 * r, row) * value(2 * r + 1, column)).sum::<f32>()
    };
    (0..rows * columns).map(at).collect()
}

#[test]
fn power_sgd_of_full_rank_returns_the_gradient() {
    let (rows, columns) = (30, 50);
    let stretches = vec![Stretch::Plain(3), Stretch::Matrix { rows, columns }, Stretch::Plain(5)];
    for (true_rank, sent_rank) in [(0, 1), (1, 1), (1, 3), (2, 2), (3, 3), (3, 8)] {
        let encoding = Encoding::PowerSgd(rank(sent_rank));
        let len = rows * columns + 8;
        let values = [vec![1.5; 3], of_rank(true_rank, rows, columns), vec![-2.5; 5]].concat();
        let mut encoder = Encoder::new(encoding, len, stretches.clone(), 3);
        // A gradient of zeros leaves no factor to begin with.
        encoder.encode(Step(1), &vec![0.0; len], &mut Vec::new());
        for step in 2..=4 {
            let mut bytes = Vec::new();
            encoder.encode(Step(step), &values, &mut bytes);
            assert_eq!(bytes.len(), 3 * 8 + 4 * (8 + usize::from(sent_rank) * (rows + columns)));
            let back = decoded(encoding, &bytes, len);
            let apart = values.iter().zip(&back).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            // Columns of P that are nearly parallel cost more than their own rounding.
            assert!(apart < 1e-4, "rank {true_rank} in {sent_rank}, step {step}: {apart:e} apart");
            assert!(back[..3] == values[..3] && back[len - 5..] == values[len - 5..]);
        }
    }
}

#[test]
fn a_buckets_matrices_are_the_rows_that_lie_whole_in_it() {
    let tensors = vec![
        TensorSpec::param("0.weight", &[50, 40]),
        TensorSpec::param("0.bias", &[50]),
        TensorSpec::param("1.weight", &[8, 4, 3, 3]),
        TensorSpec::param("1.bias", &[8]),
        TensorSpec::param("2.weight", &[2, 2]),
        TensorSpec::param("3.weight", &[3, 4000]),
    ];
    let layout = Layout::new(tensors, 1010).expect("a layout");
    let of = |bucket: u32, r: u8| {
        let spec = *layout.bucket(BucketId(bucket)).expect("a bucket");
        let all = stretches(&layout, spec, rank(r));
        assert_eq!(all.iter().map(|s| s.values()).sum::<usize>(), spec.len);
        let bytes: usize = all.iter().map(|s| s.bytes(rank(r))).sum();
        assert!(bytes <= low_rank::most_bytes(spec.len));
        all
    };
    let matrix = |rows, columns| Stretch::Matrix { rows, columns };
    let plain = Stretch::Plain;
    assert_eq!(of(0, 2), [matrix(25, 40), plain(10)]);
    // Ten of the row that was cut are in the bucket before.
    assert_eq!(of(1, 2), [plain(30), matrix(24, 40), plain(20)]);
    assert_eq!(of(2, 2), [plain(30), matrix(8, 36), plain(8 + 4 + 680)]);
    assert_eq!(of(2, 40), [plain(1010)], "its factors are longer than it is");
    assert_eq!(of(5, 1), [plain(1010)], "not one whole row");
}

/// What a worker must not keep to itself.
#[test]
fn what_is_not_finite_is_sent_by_every_encoding() {
    let matrix = Stretch::Matrix { rows: 30, columns: 50 };
    for encoding in Encoding::ALL {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 777, 1499] {
                let mut values = vec![1.0; 1500];
                values[at] = bad;
                let mut bytes = Vec::new();
                let mut encoder = Encoder::new(encoding, 1500, vec![matrix], 3);
                encoder.encode(Step(1), &values, &mut bytes);
                assert_eq!(bytes.len(), encoder.encoded_len());
                assert_eq!(all_finite(&bytes.into(), encoding, 1500), Ok(false), "{encoding}: {bad} at {at}");
            }
        }
    }
}

fn refused(encoding: Encoding, bytes: Vec<u8>, count: usize, why: &str) {
    let payload = bytes.into();
    let said = Values::new(&payload, encoding, count).expect_err(why).to_string();
    assert!(said.contains(why), "{said}");
    assert!(
        all_finite(&payload, encoding, count).is_err() && sum_of_squares(&payload, encoding, count).is_err()
    );
}

#[test]
fn a_payload_that_cannot_be_is_refused_with_the_reason() {
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let one = 1f32.to_bits();
    let top = top_k(200_000); // two of ten
    assert!(top.check(&words(&[3, 9, one, one]).into(), 10).is_ok());
    refused(top, words(&[3, 10, one, one]), 10, "beyond the bucket's end");
    refused(top, words(&[3, u32::MAX, one, one]), 10, "beyond the bucket's end");
    refused(top, words(&[3, 3, one, one]), 10, "do not rise");
    refused(top, words(&[4, 3, one, one]), 10, "do not rise");
    refused(top, words(&[u32::MAX, u32::MAX, one, one]), 10, "do not rise");
    refused(top, words(&[3, 9, one]), 10, "12 bytes are not 10 values in top-k:0.2, which are 16 bytes");
    refused(top, words(&[1, 3, 9, one, one, one]), 10, "which are 16 bytes");
    refused(Encoding::Sign, vec![0; 5], 10, "which are 6 bytes");
    let low = Encoding::PowerSgd(rank(1));
    assert!(low.check(&words(&[3, 3, 1, 1, 1, 1, 1, 1, 0, 1, one]).into(), 10).is_ok());
    refused(low, words(&[3, 3, 1, 1, 1, 1, 1, 1, 0, 2, one]), 10, "beyond the bucket's end");
    refused(low, words(&[3, 3, 1, 1, 1, 1, 1, 1]), 10, "not the whole bucket");
    refused(low, words(&[3, 3, 1, 1, 1, 1, 1]), 10, "ends within a stretch");
    refused(low, words(&[3]), 10, "ends within a stretch");
    refused(low, words(&[0, 0]), 10, "empty");
    refused(low, words(&[3, 0]), 10, "empty");
    refused(low, words(&[u32::MAX, u32::MAX]), 10, "beyond the bucket's end");
    refused(low, words(&[0, u32::MAX]), 10, "beyond the bucket's end");
    refused(low, words(&[1, 10]), 10, "ends within a stretch");
    refused(low, Vec::new(), 10, "not the whole bucket");
    refused(Encoding::PowerSgd(rank(64)), words(&[2, 5]), 10, "ends within a stretch");
    // As long as it could be, but of factors that are no saving.
    refused(low, vec![0; 49], 10, "49 bytes are not 10 values in powersgd:1, which are 48 bytes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// As with the encodings that are as long as their values: where the cuts are, and in how many parts it is read, changes
    /// nothing.
    #[test]
    fn the_cuts_of_factors_change_no_bit(
        (rows, columns, before, behind) in (1usize..40, 1usize..80, 0usize..1100, 0usize..1100),
        at in prop::collection::vec(any::<prop::sample::Index>(), 0..20), n in 1usize..1500, r in 1u8..5,
    ) {
        let all = [Stretch::Plain(before), Stretch::Matrix { rows, columns }, Stretch::Plain(behind)];
        let all: Vec<Stretch> = all.into_iter().filter(|s| s.values() > 0).collect();
        let count = before + rows * columns + behind;
        let values: Vec<f32> = (0..count).map(|i| draws::between(9, i as u64)).collect();
        let encoding = Encoding::PowerSgd(rank(r));
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(encoding, count, all, 1);
        // A worker finds matrices only where factors save bytes.
        prop_assume!(encoder.encoded_len() <= encoding.encoded_len(count));
        encoder.encode(Step(1), &values, &mut bytes);
        let expected = decoded(encoding, &bytes, count);
        let pieces = cut(&bytes, &at);
        let mut reader = Values::new(&pieces, encoding, count).expect("it can be read");
        let mut out = vec![0f32; count];
        for part in out.chunks_mut(n) {
            reader.read(part).expect("they are there");
        }
        prop_assert_eq!(
            out.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
            expected.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        );
    }

    /// Bytes that begin as a payload does, and are changed, cut or made longer.
    #[test]
    fn the_decoder_takes_payloads_that_were_damaged(
        which in 5usize..7, count in 1usize..3000, to in any::<u8>(), change in any::<prop::sample::Index>(),
        cut_at in prop::option::of(any::<prop::sample::Index>()), columns in 1usize..60,
    ) {
        let encoding = Encoding::ALL[which];
        let rows = count / columns;
        let all = [Stretch::Matrix { rows, columns }, Stretch::Plain(count - rows * columns)];
        let all: Vec<Stretch> = all.into_iter().filter(|s| s.values() > 0).collect();
        let values: Vec<f32> = (0..count).map(|i| draws::between(9, i as u64)).collect();
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(encoding, count, all, 1);
        prop_assume!(encoder.encoded_len() <= encoding.encoded_len(count));
        encoder.encode(Step(1), &values, &mut bytes);
        let i = change.index(bytes.len());
        bytes[i] = to;
        bytes.truncate(cut_at.map_or(bytes.len(), |i| i.index(bytes.len() + 1)));
        let payload = bytes.into();
        match Values::new(&payload, encoding, count) {
            Ok(mut values) => {
                prop_assert_eq!(values.read(&mut vec![0.0; count]), Ok(()));
                prop_assert!(values.read(&mut [0.0]).is_err());
            }
            Err(e) => {
                prop_assert_eq!(encoding.check(&payload, count), Err(e));
            }
        }
    }
}
