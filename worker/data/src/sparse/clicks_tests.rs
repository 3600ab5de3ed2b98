//! Tests of `clicks`.

use super::*;
use crate::SparseDataset;
use crate::metrics::auc;
use std::collections::BTreeMap;

fn stream(options: ClicksOptions) -> (Clicks, SparseBatch, Vec<f64>) {
    let clicks = Clicks::new(options).expect("in range");
    let mut batch = SparseBatch::new(FIELDS);
    let (from, n) = (clicks.options.first, u64::from(clicks.options.samples));
    let chances = (from..from + n).map(|i| clicks.push(i, &mut batch)).collect();
    (clicks, batch, chances)
}

fn small(seed: u64) -> ClicksOptions {
    ClicksOptions { seed, samples: 20_000, ..ClicksOptions::default() }
}

/// Ids of a field, sorted, each once.
fn ids(batch: &SparseBatch, field: usize) -> Vec<u64> {
    let mut ids = batch.fields[field].ids.clone();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[test]
fn a_sample_depends_on_seed_and_number_alone() {
    let (_, all, _) = stream(small(7));
    let again =
        SparseDataset::clicks(Clicks::new(ClicksOptions { first: 5_000, ..small(7) }).expect("in range"));
    let whole = SparseDataset::new(all).expect("fits");
    let (mut ours, mut theirs) = (SparseBatch::default(), SparseBatch::default());
    again.fill(&[9, 0, 9, 14_999], &mut ours);
    whole.fill(&[5_009, 5_000, 5_009, 19_999], &mut theirs);
    assert_eq!(ours, theirs);
    let (_, other, _) = stream(small(8));
    whole.fill(&[0], &mut theirs);
    assert!(other.fields.iter().zip(&theirs.fields).all(|(a, b)| a.ids[0] != b.ids[0]));
}

/// Pinned: the bits must be the same on every host and after every change.
#[test]
fn the_first_sample_never_changes() {
    let (_, batch, chances) = stream(ClicksOptions { samples: 1, ..ClicksOptions::default() });
    let ids = [0, 2, 25].map(|f| batch.fields[f].ids[0]);
    let bits = [batch.dense[0].to_bits(), batch.dense[12].to_bits()];
    let pinned = [10_380_882_265_355_069_018, 10_329_563_014_986_846_045, 8_404_128_823_504_747_494];
    assert_eq!((ids, bits), (pinned, [1_067_938_040, 1_068_027_510]));
    assert_eq!(chances[0].to_bits(), 4_599_118_321_350_039_299);
}

#[test]
fn a_quarter_clicks_and_the_chances_are_honest() {
    for seed in 0..3 {
        let (_, batch, chances) = stream(small(seed));
        let n = batch.len() as f64;
        let clicks: f32 = batch.labels.iter().sum();
        let expected: f64 = chances.iter().sum();
        // Deviations: 0.003 of the rate, 60 of the count.
        assert!((expected / n - 0.25).abs() < 0.015, "{}", expected / n);
        assert!((f64::from(clicks) - expected).abs() < 250.0, "{clicks} {expected}");
    }
}

#[test]
fn products_of_fields_matter_as_much_as_weights() {
    let (clicks, batch, chances) = stream(small(1));
    let scores: Vec<f32> = chances.iter().map(|c| *c as f32).collect();
    let teacher = auc(&scores, &batch.labels).expect("both labels");
    let linear: Vec<f32> = (0..batch.len())
        .map(|i| {
            let mut teacher = Teacher::default();
            batch.fields.iter().for_each(|f| teacher.add(draw(clicks.of(Purpose::Teacher), f.ids[i])));
            let values = batch.dense[i * DENSE..(i + 1) * DENSE].iter().zip(&clicks.made.dense);
            (teacher.linear + values.map(|(v, law)| law.effect * f64::from(*v)).sum::<f64>()) as f32
        })
        .collect();
    let linear = auc(&linear, &batch.labels).expect("both labels");
    assert!(teacher > 0.75 && linear > 0.6 && teacher - linear > 0.03, "{teacher} {linear}");
}

#[test]
fn fields_have_few_hot_and_many_rare_ids() {
    let (_, batch, _) = stream(ClicksOptions { samples: 1_999, ..ClicksOptions::default() });
    let (mut distinct, mut single) = (0, 0);
    for field in &batch.fields {
        let mut counts = BTreeMap::new();
        field.ids.iter().for_each(|id| *counts.entry(*id).or_insert(0) += 1);
        distinct += counts.len();
        single += counts.values().filter(|n| **n == 1).count();
    }
    // As many rows of Criteo's logs have 0.252 and 0.753.
    let (distinct_share, single_share) =
        (distinct as f64 / (1_999.0 * 26.0), single as f64 / distinct as f64);
    assert!((0.2..0.3).contains(&distinct_share), "{distinct_share}");
    assert!((0.7..0.82).contains(&single_share), "{single_share}");
    assert!(ids(&batch, 8).len() == 3 && ids(&batch, 0).len() < 1_460);
}

#[test]
fn categories_are_capped_and_replaced_from_day_to_day() {
    let days = |drift| ClicksOptions { samples: 30_000, day: 10_000, max_categories: 100, drift, ..small(3) };
    for (drift, from, to) in [(0.0, 0.0, 0.0), (0.1, 0.05, 0.2), (1.0, 1.0, 1.0)] {
        let (_, batch, _) = stream(days(drift));
        let dataset = SparseDataset::new(batch).expect("fits");
        let of_day = |day: u32| {
            let mut part = SparseBatch::default();
            dataset.fill(&(day * 10_000..(day + 1) * 10_000).collect::<Vec<u32>>(), &mut part);
            let ids: Vec<Vec<u64>> = (0..FIELDS).map(|field| ids(&part, field)).collect();
            assert!(ids.iter().all(|ids| ids.len() <= 100));
            ids.concat()
        };
        let (first, second) = (of_day(0), of_day(1));
        let fresh = second.iter().filter(|id| !first.contains(id)).count() as f64 / second.len() as f64;
        assert!((from..=to).contains(&fresh), "drift {drift}: {fresh} of the second day's ids are new");
    }
}

#[test]
fn the_held_out_part_is_the_end_of_the_stream() {
    let (train, test) =
        SparseDataset::clicks(Clicks::new(small(2)).expect("in range")).split(0.1, 0).expect("splits");
    assert_eq!((train.len(), test.len()), (18_000, 2_000));
    let (_, all, _) = stream(small(2));
    let all = SparseDataset::new(all).expect("fits");
    let (mut ours, mut theirs) = (SparseBatch::default(), SparseBatch::default());
    test.fill(&[0, 1_999], &mut ours);
    all.fill(&[18_000, 19_999], &mut theirs);
    assert_eq!(ours, theirs);
}

#[test]
fn streams_outside_their_ranges_are_refused() {
    let ok = ClicksOptions::default();
    for (options, key) in [
        (ClicksOptions { samples: 0, ..ok.clone() }, "samples"),
        (ClicksOptions { first: u64::MAX, ..ok.clone() }, "samples"),
        (ClicksOptions { day: 0, ..ok.clone() }, "day"),
        (ClicksOptions { max_categories: 0, ..ok.clone() }, "max_categories"),
        (ClicksOptions { drift: 1.5, ..ok.clone() }, "drift"),
        (ClicksOptions { drift: f64::NAN, ..ok.clone() }, "drift"),
    ] {
        let error = Clicks::new(options).expect_err(key).to_string();
        assert!(error.starts_with(&format!("[data] {key}: ")), "{error}");
    }
    let last = ClicksOptions { first: u64::MAX - 1, samples: 1, day: 1, drift: 1.0, ..ok };
    assert_eq!(stream(last).1.len(), 1, "the last sample that there is");
}
