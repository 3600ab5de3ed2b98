//! Tests of `staleness`.

use super::*;
use paraft_common::{Seq, SessionId, Step};

fn push(worker: u32, pulled: u64) -> Option<Contribution> {
    let (worker, session, seq) = (WorkerId(worker), SessionId(1), Seq(1));
    Some(Contribution { worker, session, seq, step: Step(1), pulled: Version(pulled), samples: 1 })
}

#[test]
fn delay_distance_and_age_are_those_between_pull_and_push() {
    let staleness = Staleness::default();
    let at = |w: f32| vec![w; 4];
    assert!(staleness.before(0, push(0, 0), Version(0), &at(0.0)).is_none(), "nobody has pulled");
    staleness.pulled(WorkerId(0), 0, Version(0), &at(0.0));
    staleness.pulled(WorkerId(1), 0, Version(0), &at(0.0));
    // Worker 1 pushes four times, by 1 in each of four values each time; then worker 0 pushes.
    for v in 0..4u64 {
        let before = staleness.before(0, push(1, v), Version(v), &at(v as f32)).expect("it watches");
        staleness.after(before, &at(v as f32 + 1.0));
        staleness.pulled(WorkerId(1), 0, Version(v + 1), &at(v as f32 + 1.0));
    }
    let before = staleness.before(0, push(0, 0), Version(4), &at(4.0)).expect("it watches");
    staleness.after(before, &at(5.0));
    let workers = staleness.workers();
    let (late, prompt) = (&workers[&WorkerId(0)], &workers[&WorkerId(1)]);
    assert_eq!((late.delay.max(), prompt.delay.max()), (Some(4), Some(0)));
    assert_eq!((late.distance.mean(), prompt.distance.mean()), (Some(4.0), Some(0.0)));
    assert_eq!((late.age.total(), prompt.age.total()), (1, 4));
}

#[test]
fn pulls_ahead_are_measured_from_the_named_pull() {
    let staleness = Staleness::default();
    let at = |w: f32| vec![w; 4];
    staleness.pulled(WorkerId(0), 0, Version(0), &at(0.0));
    for v in 0..9u64 {
        // Its push is computed at the pull before, except the first.
        let before = staleness.before(0, push(0, v.saturating_sub(1)), Version(v), &at(v as f32));
        staleness.after(before.expect("it watches"), &at(v as f32 + 1.0));
        staleness.pulled(WorkerId(0), 0, Version(v + 1), &at(v as f32 + 1.0));
        assert!(staleness.0.lock().pulled[&(WorkerId(0), 0)].of.len() <= 2);
    }
    // Its first late push shows that it is such a worker.
    let of = &staleness.workers()[&WorkerId(0)];
    assert_eq!((of.delay.total(), of.delay.max(), of.distance.total()), (8, Some(1), 8));
}

#[test]
fn what_is_noted_of_pulls_has_a_bound_and_goes_with_its_worker() {
    let staleness = Staleness::default();
    let weights = vec![0.5; SAMPLE_VALUES];
    let all = (MAX_BYTES / bytes_of(&weights)) as usize;
    for i in 0..all + 100 {
        staleness.pulled(WorkerId(i as u32 % 64), i / 64, Version(0), &weights);
    }
    let full = staleness.bytes();
    assert!(full <= MAX_BYTES && full > MAX_BYTES - 2 * bytes_of(&weights), "{full}");
    staleness.pulled(WorkerId(3), 0, Version(1), &weights);
    assert_eq!(staleness.bytes(), full, "a later pull takes the place of the one before");
    staleness.forget(WorkerId(3));
    let left = staleness.0.lock().pulled.keys().filter(|(w, _)| *w == WorkerId(3)).count();
    assert!(left == 0 && staleness.bytes() < full);
    let counted: u64 =
        staleness.0.lock().pulled.values().flat_map(|p| &p.of).map(|p| bytes_of(&p.sample)).sum();
    assert_eq!(staleness.bytes(), counted);
    (0..64).for_each(|w| staleness.forget(WorkerId(w)));
    assert_eq!(staleness.bytes(), 0);
}

#[test]
fn push_from_another_leaders_weights_is_not_measured() {
    let staleness = Staleness::default();
    staleness.pulled(WorkerId(0), 0, Version(3), &[0.0]);
    let before = staleness.before(0, push(0, 2), Version(3), &[0.0]).expect("it watches");
    staleness.after(before, &[1.0]);
    assert!(staleness.workers().is_empty());
    staleness.clear();
    assert!(staleness.before(0, push(0, 3), Version(4), &[1.0]).is_none(), "it does not lead any more");
}

#[test]
fn a_sample_of_a_large_bucket_measures_its_norm() {
    let weights: Vec<f32> = (0..100_000).map(|i| ((i * 7919) % 1000) as f32 / 1000.0).collect();
    let (whole, part) =
        (distance(&weights, &vec![0.0; 100_000]), distance(&sample(&weights), &[0.0; SAMPLE_VALUES]));
    let scaled = part * (100_000.0 / SAMPLE_VALUES as f64).sqrt();
    assert!((scaled / whole - 1.0).abs() < 0.05, "{scaled} for {whole}");
}
