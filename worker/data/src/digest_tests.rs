//! Tests of `digest`.

use super::*;
use crate::digits;

fn table(values: &[f32], labels: &[u32]) -> Dataset {
    let samples = Samples::Floats(values.to_vec());
    Dataset::new(samples, vec![2], Some((labels.to_vec(), 3))).expect("fits")
}

fn digest(split: &Split) -> String {
    split.digest().expect("in memory").to_string()
}

#[test]
fn digest_changes_with_any_value_or_label() {
    let one = Split { train: table(&[1.0, 2.0, 3.0, 4.0], &[0, 2]), test: table(&[5.0, 6.0], &[1]) };
    assert_eq!(digest(&one), digest(&one.clone()));
    let mut seen = vec![digest(&one)];
    for other in [
        Split { train: table(&[1.0, 2.0, 3.0, 4.5], &[0, 2]), ..one.clone() },
        Split { train: table(&[3.0, 4.0, 1.0, 2.0], &[0, 2]), ..one.clone() },
        Split { train: table(&[1.0, 2.0, 3.0, 4.0], &[0, 1]), ..one.clone() },
        Split { test: table(&[5.0, 7.0], &[1]), ..one.clone() },
        Split { test: table(&[5.0, 6.0, 7.0, 8.0], &[1, 1]), ..one.clone() },
        Split { train: one.test.clone(), test: one.train.clone() },
    ] {
        let digest = digest(&other);
        assert!(digest.starts_with("data ") && !seen.contains(&digest), "{digest}");
        seen.push(digest);
    }
    assert_eq!(&seen[0][..40], "data 2+1 samples of 2 in 3 classes conte");
}

/// The same on any host and in the next release: otherwise workers of both could not train together.
#[test]
fn the_digest_of_the_digits_is_what_it_was() {
    let digits = digest(&digits().expect("embedded"));
    assert!(digits.starts_with("data 1437+360 samples of 1x8x8 in 10 classes content "), "{digits}");
    assert_eq!(&digits[digits.len() - 16..], "59da7b79813372de");
}
