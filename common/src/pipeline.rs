//! In which order a stage of a model computes its micro-batches, and how long that leaves it idle.
//!
//! ```text
//!  GPipe (Huang et al. 2019)             1F1B with flush (PipeDream-Flush, Narayanan et al. 2021)
//!  stage 0  F0 F1 F2 F3 . . . B0 B1..    stage 0  F0 F1 . . B0 F2 . B1 F3 ...
//!  stage 1  . F0 F1 F2 F3 . B0 B1 ..     stage 1  . F0 B0 F1 B1 F2 B2 F3 B3
//!
//!  PipeDream-2BW (Narayanan et al. 2021): as 1F1B, and the next step's minibatch (f0 f1 ...) goes in behind this one's
//!  stage 0  F0 F1 F2 . B0 F3 . B1 f0 B2 f1 B3 | f2 B0 f3 B1 ...
//!  stage 1  . F0 B0 F1 B1 F2 B2 F3 B3        | f0 B0 f1 B1 ...
//! ```
//!
//! All go back through the micro-batches in the order of the way there, so that the gradient's sums are in the same order: the same bits.
//! They differ in how many micro-batches a stage keeps activations of, and in whether it is idle at a step's end.

use serde::{Deserialize, Serialize};

/// The order of micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PipelineSchedule {
    /// All micro-batches forward, then all backward.
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward (1F1B) once the last stage has a micro-batch. A stage holds as many
    /// micro-batches as stages remain from it on.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B without a flush: a minibatch starts before the previous gradient is pushed, at the weights
    /// before that push. Each stage has two versions of its weights.
    #[serde(rename = "2bw")]
    DoubleBuffered,
}

/// One task of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Forward pass of a micro-batch.
    Forward(usize),
    /// Backward pass of a micro-batch.
    Backward(usize),
    /// Forward pass of a micro-batch of the next step.
    Ahead(usize),
}

/// The tasks from the last backward pass of one step to that of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Micro-batches that a stage holds at most between their forward and backward passes.
    pub kept: usize,
    /// Micro-batches of the step whose forward pass is done before the window.
    pub ahead: usize,
    /// Micro-batches of the step.
    pub micro_batches: usize,
    /// Micro-batches of the next step if it overlaps, else 0.
    pub next: usize,
}

impl Window {
    /// Micro-batches of the next step whose forward pass is in this window. Not all of them, so the
    /// first stage starts them one step before the last stage finishes them.
    pub fn goes_ahead(&self) -> usize {
        self.next.min(self.kept).saturating_sub(1)
    }

    /// The tasks of a stage in the window.
    pub fn works(&self) -> Vec<Work> {
        let ahead = (0..self.goes_ahead()).map(Work::Ahead);
        let mut forward = (self.ahead..self.micro_batches).map(Work::Forward).chain(ahead);
        let (mut works, mut kept, mut back) = (Vec::new(), self.ahead, 0);
        while back < self.micro_batches {
            let next = if kept < self.kept { forward.next() } else { None };
            match next {
                Some(next) => {
                    kept += 1;
                    works.push(next);
                }
                None => {
                    works.push(Work::Backward(back));
                    (back, kept) = (back + 1, kept.saturating_sub(1));
                }
            }
        }
        works
    }
}

impl PipelineSchedule {
    /// The name in a job file.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::DoubleBuffered => "2bw",
        }
    }

    /// Whether a step's minibatch starts before the previous one has finished.
    pub fn goes_on(self) -> bool {
        self == Self::DoubleBuffered
    }

    /// How many of `micro_batches` a stage holds at most between their forward and backward passes.
    pub fn kept(self, stage: usize, stages: usize, micro_batches: usize) -> usize {
        match self {
            Self::GPipe => micro_batches,
            Self::OneForwardOneBackward => micro_batches.min(stages.saturating_sub(stage)),
            // One more than a strict order needs, so a stage has work while the next stage is late.
            // Each stage must hold more than the next one, or both would wait for the same micro-batch.
            Self::DoubleBuffered => {
                let spare = usize::from(stage + 1 < stages && micro_batches > stages);
                micro_batches.min(stages.saturating_sub(stage) + spare)
            }
        }
    }

    /// The share of the time that the stages are idle, over all stages and `steps` steps. `times` holds
    /// each stage's forward and backward time of a micro-batch. Transfers between stages, and pushes
    /// and pulls between steps, take no time here.
    ///
    /// For equal stages it is (P − 1) / (N + P − 1), for P stages and N micro-batches between two
    /// flushes: one step, or all steps if they [overlap](Self::goes_on).
    pub fn bubble(self, times: &[(f64, f64)], micro_batches: usize, steps: usize) -> f64 {
        // With flushes all steps are equal, so one suffices.
        let steps = if self.goes_on() { steps.max(1) } else { 1 };
        let (stages, all) = (times.len(), steps * micro_batches);
        let works: Vec<Vec<(bool, usize)>> =
            (0..stages).map(|s| self.works(s, stages, micro_batches, steps)).collect();
        let mut next = vec![0; stages];
        let mut free = vec![0.0f64; stages];
        // The time when a stage finished a micro-batch, forward and backward.
        let mut forward: Vec<Vec<Option<f64>>> = vec![vec![None; all]; stages];
        let mut backward = forward.clone();
        // In each round at least one stage makes progress: a neighbour's earlier task provides its
        // input.
        while next.iter().zip(&works).any(|(n, w)| *n < w.len()) {
            let before = next.clone();
            for stage in 0..stages {
                while let Some((goes_forward, m)) = works[stage].get(next[stage]).copied() {
                    let (ready, time) = match goes_forward {
                        true if stage == 0 => (Some(0.0), times[stage].0),
                        true => (forward[stage - 1][m], times[stage].0),
                        false if stage + 1 == stages => (forward[stage][m], times[stage].1),
                        false => (backward[stage + 1][m], times[stage].1),
                    };
                    let Some(ready) = ready else { break };
                    free[stage] = free[stage].max(ready) + time;
                    let done = if goes_forward { &mut forward } else { &mut backward };
                    done[stage][m] = Some(free[stage]);
                    next[stage] += 1;
                }
            }
            if before == next {
                return 1.0; // no valid order: every stage waits
            }
        }
        let whole = free.iter().copied().fold(0.0, f64::max) * stages as f64;
        let busy: f64 = times.iter().map(|(f, b)| (f + b) * all as f64).sum();
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }

    /// [`Self::bubble`] of stages with these costs: a backward pass takes about twice as long as a
    /// forward pass.
    pub fn bubble_of(self, costs: &[f64], micro_batches: usize, steps: usize) -> f64 {
        let times: Vec<(f64, f64)> = costs.iter().map(|cost| (*cost, 2.0 * cost)).collect();
        self.bubble(&times, micro_batches, steps)
    }

    /// The tasks of a stage over `steps` steps: whether forward, and the number of the micro-batch
    /// among all.
    fn works(self, stage: usize, stages: usize, micro_batches: usize, steps: usize) -> Vec<(bool, usize)> {
        let kept = self.kept(stage, stages, micro_batches);
        let (mut works, mut ahead) = (Vec::new(), 0);
        for step in 0..steps {
            let next = if step + 1 < steps { micro_batches } else { 0 };
            let window = Window { kept, ahead, micro_batches, next };
            let before = step * micro_batches;
            works.extend(window.works().into_iter().map(|w| match w {
                Work::Forward(m) => (true, before + m),
                Work::Ahead(m) => (true, before + micro_batches + m),
                Work::Backward(m) => (false, before + m),
            }));
            ahead = window.goes_ahead();
        }
        works
    }
}

#[cfg(test)]
mod tests {
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
                    ahead = window.goes_ahead();
                    prop_assert_eq!(within, ahead);
                }
                prop_assert_eq!(within, 0);
            }
        }
    }
}
