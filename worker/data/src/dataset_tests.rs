//! Tests of `dataset`.

use super::*;

#[test]
fn a_batch_has_the_rows_asked_for_in_their_order() {
    let bytes = Samples::Bytes { values: (0..12).collect(), divisor: 4.0 };
    let d = Dataset::new(bytes, vec![1, 2, 2], Some((vec![0, 1, 2], 3))).expect("fits");
    assert_eq!((d.len(), d.input_len(), d.classes()), (3, 4, Some(3)));
    let (mut x, mut y) = (vec![9.0; 50], vec![9; 50]);
    d.fill(&[2, 0], &mut x, &mut Vec::new(), &mut y).expect("in memory");
    assert_eq!(x, [2.0, 2.25, 2.5, 2.75, 0.0, 0.25, 0.5, 0.75]);
    assert_eq!(y, [2, 0]);
    let split = d.split(|i| i == 1);
    assert_eq!((split.train.len(), split.test.labels()), (2, &[1][..]));
}

#[test]
fn a_text_gives_tokens_and_the_ones_that_follow() {
    let corpus = TextCorpus::new("abcdefgh", 3).expect("text");
    let d = Dataset::text(corpus).expect("fits");
    assert_eq!((d.len(), d.input_len(), d.classes(), d.vocab()), (2, 3, Some(256), Some(256)));
    let (mut x, mut t, mut y) = (vec![1.0], Vec::new(), Vec::new());
    d.fill(&[1, 0], &mut x, &mut t, &mut y).expect("in memory");
    assert_eq!(
        (x.len(), &t[..], &y[..]),
        (0, &[100, 101, 102, 97, 98, 99][..], &[101, 102, 103, 98, 99, 100][..])
    );
    // The label of the last token would need one more.
    let corpus = TextCorpus::new("abcdef", 3).expect("text");
    assert_eq!(Dataset::text(corpus).expect("fits").len(), 1);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let floats = |n| Samples::Floats(vec![0.0; n]);
    assert!(Dataset::new(floats(7), vec![2], None).is_err());
    assert!(Dataset::new(floats(4), vec![0], None).is_err());
    assert!(Dataset::new(floats(4), vec![usize::MAX, 2], None).is_err());
    let text = Dataset::new(floats(4), vec![2], Some((vec![0], 1))).expect_err("labels").to_string();
    assert_eq!(text, "2 samples but 1 labels; they must be as many");
    assert!(Dataset::new(floats(4), vec![2], Some((vec![0, 1], 1))).is_err());
    assert_eq!(Dataset::new(floats(4), vec![2], None).expect("fits").classes(), None);
    let text = Dataset::with_targets(floats(4), vec![2], &[0.5]).expect_err("targets").to_string();
    assert_eq!(text, "2 samples but 1 numbers to predict; they must be as many");
}
