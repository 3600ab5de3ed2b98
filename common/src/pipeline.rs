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
    pub fn ahead_forwards(&self) -> usize {
        self.next.min(self.kept).saturating_sub(1)
    }

    /// The tasks of a stage in the window.
    pub fn works(&self) -> Vec<Work> {
        let ahead = (0..self.ahead_forwards()).map(Work::Ahead);
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
    pub fn overlaps_minibatches(self) -> bool {
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
    /// flushes: one step, or all steps if they [overlap](Self::overlaps_minibatches).
    pub fn bubble(self, times: &[(f64, f64)], micro_batches: usize, steps: usize) -> f64 {
        // With flushes all steps are equal, so one suffices.
        let steps = if self.overlaps_minibatches() { steps.max(1) } else { 1 };
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
            ahead = window.ahead_forwards();
        }
        works
    }
}

#[cfg(test)]
#[path = "pipeline_tests.rs"]
mod tests;
