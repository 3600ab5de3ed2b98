//! Tests of `metrics`.
//!
//! The expected numbers are scikit-learn 1.9.1's, of the same scores in float64: `roc_auc_score(y, s)`,
//! `log_loss(y, 1 / (1 + exp(-s)))`, that divided by `log_loss(y, full(n, y.mean()))`, and the root of
//! `mean_squared_error(y, s)`.

use super::*;
use paraft_common::draws::draw;

/// 200 samples with eleven different scores.
fn ties() -> Vec<(f32, f32)> {
    let score = |i: u32| ((7 * i % 11) as f32 - 5.0) / 4.0;
    (0..200).map(|i| (score(i), if (3 * i * i + i) % 7 < 3 { 1.0 } else { 0.0 })).collect()
}

/// 20,000 samples, each of another score.
fn many() -> Vec<(f32, f32)> {
    let rank = |i: u64, by: u64| i * by % 20_011;
    let label = |i| if rank(i, 104_729) < rank(i, 7_919) { 1.0 } else { 0.0 };
    (0..20_000).map(|i| (rank(i, 7_919) as f32 / 4_096.0 - 2.5, label(i))).collect()
}

fn classes(rows: &[(f32, f32)]) -> ClassMetrics {
    let mut metrics = ClassMetrics::default();
    rows.iter().for_each(|(score, label)| metrics.add(*score, *label));
    metrics
}

fn exact(rows: &[(f32, f32)]) -> Option<f64> {
    let (scores, labels): (Vec<f32>, Vec<f32>) = rows.iter().copied().unzip();
    auc(&scores, &labels)
}

fn near(ours: Option<f64>, theirs: f64) {
    let ours = ours.expect("there is one");
    assert!((ours - theirs).abs() < 1e-12, "{ours} {theirs}");
}

#[test]
fn the_metrics_are_those_of_scikit_learn() {
    let (ties, many) = (ties(), many());
    near(exact(&ties), 0.5107928388746803);
    near(exact(&many), 0.83303733);
    let metrics = classes(&ties);
    near(metrics.auc().map(|a| a.value), 0.5107928388746803);
    near(metrics.log_loss(), 0.7613873488047627);
    near(metrics.normalized_entropy(), 1.1166417870549015);
    near(classes(&many).log_loss(), 0.5060647412528623);
    let mut numbers = NumberMetrics::default();
    ties.iter().for_each(|(score, label)| numbers.add(*score, *label));
    near(numbers.rmse(), 1.092159557940139);
}

#[test]
fn the_auc_of_bins_is_as_near_as_it_says() {
    let area = classes(&many()).auc().expect("both labels");
    assert!((area.value - 0.83303733).abs() <= area.within && area.within < 2e-4, "{area:?}");
    // Beyond the bins all scores are equal, and it says so.
    let far: Vec<(f32, f32)> = many().iter().map(|(score, label)| (score + 100.0, *label)).collect();
    assert_eq!(classes(&far).auc(), Some(Area { value: 0.5, within: 0.5 }));
}

#[test]
fn parts_add_up_to_the_same_bits_in_any_order() {
    let rows: Vec<(f32, f32)> =
        many().iter().enumerate().map(|(i, (s, l))| (s * if i % 5 == 0 { 1e-20 } else { 9.0 }, *l)).collect();
    let whole = classes(&rows);
    let mut numbers = NumberMetrics::default();
    rows.iter().for_each(|(score, label)| numbers.add(*score, *label));
    for seed in 0..4 {
        // Samples in another order, parts of other sizes.
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|i| draw(seed, *i as u64));
        let shuffled: Vec<(f32, f32)> = order.iter().map(|i| rows[*i]).collect();
        let (mut sum, mut squares) = (ClassMetrics::default(), NumberMetrics::default());
        for part in shuffled.chunks(1_000 + 777 * seed as usize).rev() {
            sum.merge(&ClassMetrics::from_bytes(&classes(part).to_bytes()).expect("its own bytes"));
            let mut other = NumberMetrics::default();
            part.iter().for_each(|(score, label)| other.add(*score, *label));
            squares.merge(&NumberMetrics::from_bytes(&other.to_bytes()).expect("its own bytes"));
        }
        assert_eq!((&sum, &squares), (&whole, &numbers));
        let bits = |m: &ClassMetrics| [m.log_loss(), m.auc().map(|a| a.value)].map(|v| v.map(f64::to_bits));
        assert_eq!(bits(&sum), bits(&whole));
        assert_eq!(squares.rmse().map(f64::to_bits), numbers.rmse().map(f64::to_bits));
    }
}

#[test]
fn sums_are_exact_from_the_smallest_to_the_largest_number() {
    for numbers in [
        vec![0.0],
        vec![5e-324, 5e-324, 1e-310],
        vec![f64::MIN_POSITIVE, 5e-324],
        vec![1e300, 1.0, 1e-300],
        vec![f64::MAX / 4.0; 3],
        vec![0.1; 10],
    ] {
        let mut sum = ExactSum::default();
        numbers.iter().for_each(|n| sum.add(*n));
        let expected = if numbers.len() == 10 { 1.0 } else { numbers.iter().sum() };
        assert_eq!(sum.value(), expected, "{numbers:?}");
    }
}

#[test]
fn other_bytes_than_those_written_are_refused() {
    let mut numbers = NumberMetrics::default();
    ties().iter().for_each(|(score, label)| numbers.add(*score, *label));
    let refused = |bytes: &[u8]| {
        let error = ClassMetrics::from_bytes(bytes).expect_err("refused").to_string();
        assert!(error.contains("malformed; give all workers the same version"), "{error}");
    };
    let bytes = classes(&ties()).to_bytes();
    (0..bytes.len()).for_each(|len| refused(&bytes[..len]));
    refused(&[&bytes[..], &[0]].concat());
    for (at, with) in [(0, 99), (3, 1), (5, 0xff), (13, 1), (bytes.len() - 17, 64), (bytes.len() - 1, 0x80)] {
        let mut changed = bytes.clone();
        assert_ne!(std::mem::replace(&mut changed[at], with), with);
        refused(&changed);
    }
    let bytes = numbers.to_bytes();
    assert_eq!(NumberMetrics::from_bytes(&bytes).expect("its own bytes"), numbers);
    (0..bytes.len()).for_each(|len| assert!(NumberMetrics::from_bytes(&bytes[..len]).is_err()));
    assert_eq!(
        ClassMetrics::from_bytes(&ClassMetrics::default().to_bytes()).expect("empty"),
        ClassMetrics::default()
    );
}

#[test]
fn without_both_labels_there_is_no_auc() {
    let ones = classes(&[(0.5, 1.0), (1.0, 1.0)]);
    assert_eq!((ones.auc(), ones.normalized_entropy(), exact(&[(0.5, 1.0)])), (None, None, None));
    assert!(ones.log_loss().is_some());
    let none = ClassMetrics::default();
    assert_eq!((none.auc(), none.log_loss(), NumberMetrics::default().rmse()), (None, None, None));
}

#[test]
fn scores_that_are_not_finite_show() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut metrics = classes(&ties());
        let mut other = ClassMetrics::default();
        other.add(bad, 1.0);
        metrics.merge(&other);
        assert!(
            [metrics.auc().map(|a| a.value), metrics.log_loss(), metrics.normalized_entropy()]
                .iter()
                .all(|m| m.is_some_and(f64::is_nan))
        );
        let mut numbers = NumberMetrics::default();
        numbers.add(bad, 1.0);
        assert!(numbers.rmse().is_some_and(f64::is_nan));
    }
    assert!(exact(&[(f32::NAN, 1.0), (0.0, 0.0)]).is_some_and(f64::is_nan));
    assert_eq!(exact(&[(-0.0, 1.0), (0.0, 0.0)]), Some(0.5));
}
