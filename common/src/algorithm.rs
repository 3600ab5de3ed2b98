//! Algorithms: what a shard does about a gradient that comes late.
//!
//! In the asynchronous modes a worker computes its gradient from weights that others have changed by the time it is
//! applied. Plain asynchronous SGD applies it all the same; the others correct it, shrink the rate, or give each worker a
//! momentum of its own. One file each, with the paper; all of them behind [`Algorithm`].
//!
//! ```text
//!  push ─▶ scale, clip ─▶ [`Algorithm::correct`] ─▶ optimizer at [`Algorithm::rate`] ─▶ weights ─▶ [`Algorithm::moved`]
//!                          │ the weights that the worker pulled     │ the bucket's state vectors, or the worker's own
//!  pull ◀── [`Algorithm::look_ahead`] ◀── weights
//! ```
//!
//! What an algorithm keeps is said by [`Algorithm::keeps`] and is replicated with the bucket, so the rules of
//! [`crate::optim`] hold here too: `+ - * /` and square roots in a fixed order, nothing else.
//!
//! A lock-step round has no delay. There the corrections change nothing; state that is a worker's own is then the
//! fleet's.
//!
//! What it is not: when a round closes and what workers do between two pushes are other questions.

mod asgd;
mod dana;
mod dc_asgd;
mod gap_aware;
mod multi_asgd;
mod staleness_aware;

#[cfg(test)]
mod identities;

pub use asgd::Asgd;
pub use dana::DanaZero;
pub use dc_asgd::{DcAsgdA, DcAsgdC};
pub use gap_aware::GapAware;
pub use multi_asgd::MultiAsgd;
pub use staleness_aware::StalenessAware;

use crate::{
    codec::value_bytes,
    encoding::{Encoding, Values},
    optim::{Gradient, Hyper, OptimError, OptimizerConfig},
};
use serde::Serialize;

/// The `[algorithm]` table of a job: `kind` and the options of that kind.
///
/// ```
/// use paraft_common::algorithm::AlgorithmConfig;
/// let a: AlgorithmConfig = toml::from_str("kind = \"dc-asgd-c\"\nlambda = 0.1").expect("valid");
/// assert!(a.algorithm().keeps().pulled);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum AlgorithmConfig {
    /// Gradients are applied as they come.
    Asgd(Asgd),
    /// The rate falls with the delay.
    StalenessAware(StalenessAware),
    /// Delay compensation with a constant weight.
    DcAsgdC(DcAsgdC),
    /// Delay compensation with an adaptive weight.
    DcAsgdA(DcAsgdA),
    /// Each value of the gradient shrinks with the way that its weight has gone meanwhile.
    GapAware(GapAware),
    /// The optimizer's state is each worker's own.
    MultiAsgd(MultiAsgd),
    /// Each worker's momentum on the shard; pulls look ahead.
    DanaZero(DanaZero),
}

crate::kinds!(AlgorithmConfig {
    "asgd" => Self::Asgd,
    "staleness-aware" => Self::StalenessAware,
    "dc-asgd-c" => Self::DcAsgdC,
    "dc-asgd-a" => Self::DcAsgdA,
    "gap-aware" => Self::GapAware,
    "multi-asgd" => Self::MultiAsgd,
    "dana-zero" => Self::DanaZero,
});

impl Default for AlgorithmConfig {
    fn default() -> Self {
        Self::Asgd(Asgd {})
    }
}

impl AlgorithmConfig {
    /// As the job file writes it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Asgd(_) => "asgd",
            Self::StalenessAware(_) => "staleness-aware",
            Self::DcAsgdC(_) => "dc-asgd-c",
            Self::DcAsgdA(_) => "dc-asgd-a",
            Self::GapAware(_) => "gap-aware",
            Self::MultiAsgd(_) => "multi-asgd",
            Self::DanaZero(_) => "dana-zero",
        }
    }

    /// Its behaviour.
    pub fn algorithm(&self) -> &dyn Algorithm {
        match self {
            Self::Asgd(a) => a,
            Self::StalenessAware(a) => a,
            Self::DcAsgdC(a) => a,
            Self::DcAsgdA(a) => a,
            Self::GapAware(a) => a,
            Self::MultiAsgd(a) => a,
            Self::DanaZero(a) => a,
        }
    }
}

/// Why a job cannot have an algorithm.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AlgorithmError {
    /// An option is outside its range.
    #[error(transparent)]
    Option(#[from] OptimError),
    /// It does not go with the job's optimizer.
    #[error(
        "[algorithm] kind = \"{algorithm}\" needs {needs}; this job has optimizer.kind = \"{optimizer}\""
    )]
    Optimizer {
        /// As the job file writes it.
        algorithm: &'static str,
        /// What the optimizer must be, in words.
        needs: &'static str,
        /// What it is.
        optimizer: &'static str,
    },
}

/// What an algorithm keeps of a bucket of trained values, beside its weights. Replicated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keeps {
    /// Names of its state vectors, each as long as the bucket; they come after the optimizer's.
    pub slots: &'static [&'static str],
    /// The weights that each worker has pulled last: a copy of the bucket for each worker.
    pub pulled: bool,
    /// The optimizer's state vectors are each worker's own.
    pub own_slots: bool,
}

impl Keeps {
    /// Whether anything of it is a worker's.
    pub fn of_workers(&self) -> bool {
        self.pulled || self.own_slots
    }
}

/// A push that is about to be applied.
#[derive(Clone, Copy, Debug)]
pub struct Late<'a> {
    /// Updates of the bucket between the pull that its gradient was computed from and now.
    pub delay: u64,
    /// The bucket's weights now.
    pub weights: &'a [f32],
    /// Those that the worker pulled; `None` where they are not kept, or nothing lies between.
    pub pulled: Option<&'a [f32]>,
    /// The rate of this update.
    pub lr: f32,
    /// The base rate, which schedules multiply.
    pub base_lr: f32,
    /// The number of the bucket's update, from 1.
    pub t: u64,
}

/// What an algorithm does. Everything has a default that does nothing.
pub trait Algorithm {
    /// Checks its options, and that it goes with the optimizer.
    fn validate(&self, _optimizer: &OptimizerConfig) -> Result<(), AlgorithmError> {
        Ok(())
    }

    /// What it keeps of a bucket.
    fn keeps(&self) -> Keeps {
        Keeps::default()
    }

    /// The optimizer that the shard applies, where it is not the job's as it stands.
    fn on_shard(&self, optimizer: &OptimizerConfig) -> OptimizerConfig {
        optimizer.clone()
    }

    /// Multiplies the rate of an update of this delay.
    fn rate(&self, _delay: u64) -> f32 {
        1.0
    }

    /// Changes the gradient (scaled and clipped) before the optimizer gets it. `slots` are its own.
    fn correct(&self, _push: &Late<'_>, _slots: &mut [Vec<f32>], _gradient: &mut [f32]) {}

    /// Whether [`Self::correct`] is to be called for this push (its weights are not given here). Decoding the gradient first
    /// is a pass over it.
    fn corrects(&self, _push: &Late<'_>) -> bool {
        false
    }

    /// Hears how an update has moved the weights, from [`Late::weights`] to `weights`.
    fn moved(&self, _push: &Late<'_>, _weights: &[f32], _slots: &mut [Vec<f32>]) {}

    /// Whether [`Self::moved`] is to be called. Keeping the weights as they were is a copy of them.
    fn watches(&self) -> bool {
        false
    }

    /// A worker's own vectors are about to change (before), have changed (after, `enter`), or are dropped.
    fn own_changes(&self, _own: &[&[f32]], _enter: bool, _slots: &mut [Vec<f32>]) {}

    /// Where pulls do not get the weights as they are: writes what they get to `out`. `lr` is the rate that the next
    /// update would have, `optimizer` the job's.
    fn look_ahead(
        &self,
        _optimizer: &OptimizerConfig,
        _lr: f32,
        _weights: &[f32],
        _slots: &[Vec<f32>],
        _out: &mut [f32],
    ) {
    }

    /// Whether pulls get what [`Self::look_ahead`] gives.
    fn looks_ahead(&self) -> bool {
        false
    }
}

/// A bucket of trained values, as an update finds it.
#[derive(Debug)]
pub struct State<'a> {
    /// The weights.
    pub weights: &'a mut [f32],
    /// The bucket's state vectors: the optimizer's, unless they are the workers' own, then the algorithm's.
    pub slots: &'a mut [Vec<f32>],
    /// Where they are the workers' own: this worker's.
    pub own: Option<&'a mut [Vec<f32>]>,
    /// The weights that the worker pulled, where they are kept and differ.
    pub pulled: Option<&'a [f32]>,
}

/// Which update it is, and at which rates.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Rate and count for the optimizer. The count is the worker's where its state is.
    pub hyper: Hyper,
    /// The base rate.
    pub base_lr: f32,
    /// The number of the bucket's update, from 1.
    pub t: u64,
    /// Updates since the pull.
    pub delay: u64,
}

impl AlgorithmConfig {
    /// Applies one push to a bucket of trained values.
    ///
    /// # Panics
    /// Where the gradient or a vector does not fit the weights, as [`OptimizerConfig::apply`].
    pub fn apply(
        &self,
        optimizer: &OptimizerConfig,
        update: &Update,
        state: State<'_>,
        gradient: Gradient<'_>,
    ) {
        let algorithm = self.algorithm();
        let optimizer = &algorithm.on_shard(optimizer);
        let State { weights, slots, mut own, pulled } = state;
        let (shared, slots) = slots.split_at_mut(if own.is_some() { 0 } else { optimizer.slots() });
        let mut hyper = update.hyper;
        if update.delay > 0 {
            hyper.lr *= algorithm.rate(update.delay);
        }
        let before = if algorithm.watches() { weights.to_vec() } else { Vec::new() };
        let Update { base_lr, t, delay, .. } = *update;
        let late = Late { delay, weights: &[], pulled, lr: hyper.lr, base_lr, t };
        if let Some(own) = &own {
            algorithm.own_changes(&slices(own), false, slots);
        }
        let own_or_shared = own.as_deref_mut().unwrap_or(shared);
        if algorithm.corrects(&late) {
            let mut values = prepared(&gradient, &hyper, weights.len());
            algorithm.correct(&Late { weights, ..late }, slots, &mut values);
            let payload = value_bytes(values).into();
            let corrected = Gradient { payload: &payload, encoding: Encoding::F32, scale: 1.0 };
            optimizer.apply(&Hyper { clip_value: None, ..hyper }, weights, own_or_shared, corrected);
        } else {
            optimizer.apply(&hyper, weights, own_or_shared, gradient);
        }
        if algorithm.watches() {
            algorithm.moved(&Late { weights: &before, ..late }, weights, slots);
        }
        if let Some(own) = &own {
            algorithm.own_changes(&slices(own), true, slots);
        }
    }
}

/// Vectors, to be read.
fn slices(vectors: &[Vec<f32>]) -> Vec<&[f32]> {
    vectors.iter().map(Vec::as_slice).collect()
}

/// The gradient as values, scaled and clipped.
fn prepared(gradient: &Gradient<'_>, hyper: &Hyper, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    let read =
        Values::new(gradient.payload, gradient.encoding, len).expect("payload and bucket differ in length");
    let (mut read, limit) = (read, hyper.clip_value.unwrap_or(f32::INFINITY));
    let _ = read.read(&mut values); // its length is checked
    values.iter_mut().for_each(|v| *v = crate::optim::clip::by_value(*v * gradient.scale, limit));
    values
}

/// A gradient that a correction has made infinite or no number stays as it was.
fn finite_or(corrected: f32, gradient: f32) -> f32 {
    if corrected.is_finite() { corrected } else { gradient }
}

const ALGORITHM: crate::optim::Check = crate::optim::Check("algorithm");
