//! In which order a stage of a model computes its micro-batches, and how long that leaves it idle.
//!
//! ```text
//!  GPipe (Huang et al. 2019)             1F1B with flush (PipeDream-Flush, Narayanan et al. 2021)
//!  stage 0  F0 F1 F2 F3 . . . B0 B1..    stage 0  F0 F1 . . B0 F2 . B1 F3 ...
//!  stage 1  . F0 F1 F2 F3 . B0 B1 ..     stage 1  . F0 B0 F1 B1 F2 B2 F3 B3
//! ```
//!
//! Both go back through the micro-batches in the order of the way there, so that the gradient's sums are in the same order: the same bits.
//! They differ in how many micro-batches a stage keeps activations of.

use serde::{Deserialize, Serialize};

/// The order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PipelineSchedule {
    /// All micro-batches forward, then all back.
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one back, as soon as the last stage has one: a stage keeps as many as there are stages from it on.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
}

/// What a stage does with a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Forward.
    Forward(usize),
    /// Back.
    Backward(usize),
}

impl PipelineSchedule {
    /// As a job file names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
        }
    }

    /// How many micro-batches, of so many, a stage keeps at most between their ways forward and back.
    pub fn kept(self, stage: usize, stages: usize, micro_batches: usize) -> usize {
        match self {
            Self::GPipe => micro_batches,
            Self::OneForwardOneBackward => micro_batches.min(stages.saturating_sub(stage)),
        }
    }

    /// What a stage does in a step.
    pub fn works(self, stage: usize, stages: usize, micro_batches: usize) -> Vec<Work> {
        let kept = self.kept(stage, stages, micro_batches);
        let mut works: Vec<Work> = (0..kept).map(Work::Forward).collect();
        for back in 0..micro_batches {
            works.push(Work::Backward(back));
            if kept + back < micro_batches {
                works.push(Work::Forward(kept + back));
            }
        }
        works
    }

    /// The share of a step's time in which a stage is idle, of all stages: a micro-batch takes a stage so long forward, and so long back.
    /// Nothing is counted for what goes from stage to stage.
    ///
    /// Of equal stages it is (P − 1) / (M + P − 1), for P stages and M micro-batches.
    pub fn bubble(self, times: &[(f64, f64)], micro_batches: usize) -> f64 {
        let stages = times.len();
        let works: Vec<Vec<Work>> = (0..stages).map(|s| self.works(s, stages, micro_batches)).collect();
        let mut next = vec![0; stages];
        let mut free = vec![0.0f64; stages];
        // When a stage was done with a micro-batch, forward and back.
        let mut forward: Vec<Vec<Option<f64>>> = vec![vec![None; micro_batches]; stages];
        let mut backward = forward.clone();
        // Each round has at least one stage do something: what it waits for is done by an earlier work of a neighbour.
        while next.iter().zip(&works).any(|(n, w)| *n < w.len()) {
            let before = next.clone();
            for stage in 0..stages {
                while let Some(work) = works[stage].get(next[stage]) {
                    let (ready, m, time) = match *work {
                        Work::Forward(m) if stage == 0 => (Some(0.0), m, times[stage].0),
                        Work::Forward(m) => (forward[stage - 1][m], m, times[stage].0),
                        Work::Backward(m) if stage + 1 == stages => (forward[stage][m], m, times[stage].1),
                        Work::Backward(m) => (backward[stage + 1][m], m, times[stage].1),
                    };
                    let Some(ready) = ready else { break };
                    free[stage] = free[stage].max(ready) + time;
                    let done = if matches!(work, Work::Forward(_)) { &mut forward } else { &mut backward };
                    done[stage][m] = Some(free[stage]);
                    next[stage] += 1;
                }
            }
            if before == next {
                return 1.0; // no order of works: nobody ever goes on
            }
        }
        let whole = free.iter().copied().fold(0.0, f64::max) * stages as f64;
        let busy: f64 = times.iter().map(|(f, b)| (f + b) * micro_batches as f64).sum();
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOTH: [PipelineSchedule; 2] = [PipelineSchedule::GPipe, PipelineSchedule::OneForwardOneBackward];

    #[test]
    fn equal_stages_are_idle_as_the_papers_say() {
        for schedule in BOTH {
            for (stages, micro) in [(1, 1), (1, 8), (2, 1), (2, 8), (4, 4), (4, 16), (8, 64), (64, 256)] {
                let bubble = schedule.bubble(&vec![(1.0, 2.0); stages], micro);
                let want = (stages - 1) as f64 / (micro + stages - 1) as f64;
                assert!((bubble - want).abs() < 1e-9, "{schedule:?}, {stages}, {micro}: {bubble} for {want}");
            }
        }
    }

    #[test]
    fn a_stage_that_is_slower_leaves_the_others_idle() {
        let even = PipelineSchedule::default().bubble(&[(1.0, 1.0), (1.0, 1.0)], 8);
        let uneven = PipelineSchedule::default().bubble(&[(1.0, 1.0), (3.0, 3.0)], 8);
        assert!(uneven > even + 0.2, "{even}, {uneven}");
    }

    proptest! {
        #[test]
        fn every_micro_batch_goes_forward_once_then_back_once_in_order(
            stages in 1usize..9, micro in 1usize..20, which in 0usize..2,
        ) {
            let schedule = BOTH[which];
            for stage in 0..stages {
                let works = schedule.works(stage, stages, micro);
                let of = |forward: bool| -> Vec<usize> {
                    works.iter().filter_map(|w| match *w {
                        Work::Forward(m) if forward => Some(m),
                        Work::Backward(m) if !forward => Some(m),
                        _ => None,
                    }).collect()
                };
                prop_assert_eq!(of(true), (0..micro).collect::<Vec<_>>());
                prop_assert_eq!(of(false), (0..micro).collect::<Vec<_>>());
                let (mut kept, mut most) = (0usize, 0);
                for w in &works {
                    match w {
                        Work::Forward(_) => kept += 1,
                        Work::Backward(_) => kept -= 1,
                    }
                    most = most.max(kept);
                }
                prop_assert_eq!(most, schedule.kept(stage, stages, micro));
            }
            // It comes to an end.
            prop_assert!(schedule.bubble(&vec![(1.0, 1.0); stages], micro) < 1.0);
        }
    }
}
