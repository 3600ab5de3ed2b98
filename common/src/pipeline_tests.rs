//! Tests of `pipeline`.

use super::*;
use proptest::prelude::*;

const ALL: [PipelineSchedule; 3] =
    [PipelineSchedule::GPipe, PipelineSchedule::OneForwardOneBackward, PipelineSchedule::DoubleBuffered];

#[test]
fn equal_stages_are_idle_as_the_papers_say() {
    for schedule in ALL {
        for (stages, micro) in [(1, 1), (1, 8), (2, 1), (2, 8), (4, 4), (4, 16), (8, 64), (64, 256)] {
            let bubble = schedule.bubble(&vec![(1.0, 2.0); stages], micro, 1);
            let want = (stages - 1) as f64 / (micro + stages - 1) as f64;
            assert!((bubble - want).abs() < 1e-9, "{schedule:?}, {stages}, {micro}: {bubble} for {want}");
        }
    }
}

#[test]
fn overlapping_steps_are_idle_only_at_start_and_end() {
    for (stages, micro, steps) in [(2, 2, 10), (4, 4, 25), (4, 16, 50), (8, 8, 100)] {
        let times = vec![(1.0, 2.0); stages];
        let bubble = PipelineSchedule::DoubleBuffered.bubble(&times, micro, steps);
        let want = (stages - 1) as f64 / (micro * steps + stages - 1) as f64;
        assert!((bubble - want).abs() < 1e-9, "{stages}, {micro}, {steps}: {bubble} for {want}");
        let flushed = PipelineSchedule::OneForwardOneBackward;
        assert_eq!(flushed.bubble(&times, micro, steps), flushed.bubble(&times, micro, 1));
    }
}

#[test]
fn a_stage_that_is_slower_leaves_the_others_idle() {
    let even = PipelineSchedule::default().bubble(&[(1.0, 1.0), (1.0, 1.0)], 8, 1);
    let uneven = PipelineSchedule::default().bubble(&[(1.0, 1.0), (3.0, 3.0)], 8, 1);
    assert!(uneven > even + 0.2, "{even}, {uneven}");
}

#[test]
fn overlapping_minibatches_keep_more_in_earlier_stages() {
    for stages in 2..=64 {
        for micro in [stages, stages + 1, stages + 3, 2 * stages, 8 * stages] {
            let kept: Vec<usize> =
                (0..stages).map(|s| PipelineSchedule::DoubleBuffered.kept(s, stages, micro)).collect();
            assert!(kept.is_sorted_by(|a, b| a > b) && kept[0] <= micro, "{stages}, {micro}: {kept:?}");
            assert_eq!(kept[stages - 1], 1);
        }
    }
}

proptest! {
    #[test]
    fn every_micro_batch_goes_forward_once_then_back_once_in_order(
        stages in 1usize..9, micro in 1usize..20, steps in 1usize..4, which in 0usize..3,
    ) {
        let schedule = ALL[which];
        let all = steps * micro;
        for stage in 0..stages {
            let works = schedule.works(stage, stages, micro, steps);
            let of = |forward: bool| -> Vec<usize> {
                works.iter().filter(|w| w.0 == forward).map(|w| w.1).collect()
            };
            prop_assert_eq!(of(true), (0..all).collect::<Vec<_>>());
            prop_assert_eq!(of(false), (0..all).collect::<Vec<_>>());
            let (mut kept, mut most) = (0usize, 0);
            for (forward, _) in &works {
                kept = if *forward { kept + 1 } else { kept - 1 };
                most = most.max(kept);
            }
            prop_assert_eq!(most, schedule.kept(stage, stages, micro));
        }
        // The schedule terminates.
        prop_assert!(schedule.bubble(&vec![(1.0, 1.0); stages], micro, steps) < 1.0);
    }

    #[test]
    fn minibatches_that_are_of_different_lengths_go_through_too(
        stages in 1usize..9, lens in prop::collection::vec(1usize..12, 1..6),
    ) {
        for stage in 0..stages {
            let kept = PipelineSchedule::DoubleBuffered.kept(stage, stages, 12);
            let (mut ahead, mut within) = (0, 0usize);
            for (i, micro_batches) in lens.iter().copied().enumerate() {
                let window =
                    Window { kept, ahead, micro_batches, next: lens.get(i + 1).copied().unwrap_or(0) };
                let works = window.works();
                for work in &works {
                    within = if matches!(work, Work::Backward(_)) { within - 1 } else { within + 1 };
                    prop_assert!(within <= kept);
                }
                prop_assert_eq!(works.last(), Some(&Work::Backward(micro_batches - 1)));
                ahead = window.ahead_forwards();
                prop_assert_eq!(within, ahead);
            }
            prop_assert_eq!(within, 0);
        }
    }
}
