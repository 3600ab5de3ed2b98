//! Algorithms for late gradients, as the shards run them.
//!
//! In asynchronous modes other workers change the weights between the pull of a worker and the update
//! with its gradient. Plain asynchronous SGD applies the gradient unchanged. The other algorithms
//! correct it, reduce the rate, or give each worker its own momentum. Each has one file, which names
//! its paper, and implements [`Algorithm`].
//!
//! ```text
//!  push ─▶ scale, clip ─▶ [`Algorithm::correct`] ─▶ optimizer at [`Algorithm::rate`] ─▶ weights ─▶ [`Algorithm::moved`]
//!                          │ the weights that the worker pulled     │ the bucket's state vectors, or the worker's own
//!  pull ◀── [`Algorithm::look_ahead`] ◀── weights
//! ```
//!
//! [`Algorithm::keeps`] names an algorithm's state, which is replicated with the bucket. So the rules
//! of [`crate::optim`] apply here too: `+ - * /` and square roots in a fixed order, and no other
//! operation.
//!
//! A lock-step round has no delay, so the corrections change nothing there, and state per worker is
//! state of the fleet.
//!
//! Other modules decide when a round closes and what workers do between two pushes.

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
    /// Applies gradients unchanged.
    Asgd(Asgd),
    /// The rate falls with the delay.
    StalenessAware(StalenessAware),
    /// Delay compensation with a constant weight.
    DcAsgdC(DcAsgdC),
    /// Delay compensation with an adaptive weight.
    DcAsgdA(DcAsgdA),
    /// Each value of the gradient shrinks with the distance that its weight has moved since the pull.
    GapAware(GapAware),
    /// Each worker has its own optimizer state.
    MultiAsgd(MultiAsgd),
    /// The shard keeps each worker's momentum; pulls look ahead.
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
    /// The kind's name in the job file.
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

    /// The implementation.
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

/// Why a job cannot use an algorithm.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AlgorithmError {
    /// An option is outside its range.
    #[error(transparent)]
    Option(#[from] OptimError),
    /// The algorithm does not support the job's optimizer.
    #[error(
        "[algorithm] kind = \"{algorithm}\" needs {needs}; this job has optimizer.kind = \"{optimizer}\""
    )]
    Optimizer {
        /// The algorithm's name in the job file.
        algorithm: &'static str,
        /// The optimizers that it supports, for people.
        needs: &'static str,
        /// The job's optimizer.
        optimizer: &'static str,
    },
}

/// The replicated state of an algorithm for a bucket of trained values, beside its weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keeps {
    /// Names of its state vectors, each as long as the bucket. They follow the optimizer's.
    pub slots: &'static [&'static str],
    /// Keeps the weights of each worker's last pull: one copy of the bucket per worker.
    pub pulled: bool,
    /// Each worker has its own copy of the optimizer's state vectors.
    pub own_slots: bool,
}

impl Keeps {
    /// Whether part of the state belongs to single workers.
    pub fn of_workers(&self) -> bool {
        self.pulled || self.own_slots
    }
}

/// A push right before its update.
#[derive(Clone, Copy, Debug)]
pub struct Late<'a> {
    /// Updates of the bucket since the pull that the gradient was computed from.
    pub delay: u64,
    /// The bucket's current weights.
    pub weights: &'a [f32],
    /// The weights that the worker pulled; `None` if they are not kept, or if they are the current
    /// weights.
    pub pulled: Option<&'a [f32]>,
    /// The rate of this update.
    pub lr: f32,
    /// The base rate, before the schedule.
    pub base_lr: f32,
    /// The number of the bucket's update, from 1.
    pub t: u64,
}

/// An algorithm for late gradients. Every method has a default that does nothing.
pub trait Algorithm {
    /// Validates the options, and the combination with the optimizer.
    fn validate(&self, _optimizer: &OptimizerConfig) -> Result<(), AlgorithmError> {
        Ok(())
    }

    /// Its state for a bucket.
    fn keeps(&self) -> Keeps {
        Keeps::default()
    }

    /// The optimizer that the shard applies; by default the job's.
    fn on_shard(&self, optimizer: &OptimizerConfig) -> OptimizerConfig {
        optimizer.clone()
    }

    /// The factor on the learning rate for an update of this delay.
    fn rate(&self, _delay: u64) -> f32 {
        1.0
    }

    /// Changes the scaled and clipped gradient before the optimizer. `slots` are the algorithm's state
    /// vectors.
    fn correct(&self, _push: &Late<'_>, _slots: &mut [Vec<f32>], _gradient: &mut [f32]) {}

    /// Whether to call [`Self::correct`] for this push (its weights are not given here). The call
    /// requires an extra pass that decodes the gradient.
    fn corrects(&self, _push: &Late<'_>) -> bool {
        false
    }

    /// Called after an update, which moved the weights from [`Late::weights`] to `weights`.
    fn moved(&self, _push: &Late<'_>, _weights: &[f32], _slots: &mut [Vec<f32>]) {}

    /// Whether to call [`Self::moved`]. The call requires a copy of the weights before the update.
    fn watches(&self) -> bool {
        false
    }

    /// Called before (`enter` is false) and after (`enter` is true) a worker's own vectors change, and
    /// before they are dropped.
    fn own_changes(&self, _own: &[&[f32]], _enter: bool, _slots: &mut [Vec<f32>]) {}

    /// Writes the weights that a pull returns to `out`, if they differ from the bucket's. `lr` is the
    /// rate of the next update, `optimizer` the job's.
    fn look_ahead(
        &self,
        _optimizer: &OptimizerConfig,
        _lr: f32,
        _weights: &[f32],
        _slots: &[Vec<f32>],
        _out: &mut [f32],
    ) {
    }

    /// Whether pulls return the result of [`Self::look_ahead`].
    fn looks_ahead(&self) -> bool {
        false
    }
}

/// The state of a bucket of trained values before an update.
#[derive(Debug)]
pub struct State<'a> {
    /// The weights.
    pub weights: &'a mut [f32],
    /// The bucket's state vectors: the optimizer's (unless each worker has its own), then the
    /// algorithm's.
    pub slots: &'a mut [Vec<f32>],
    /// This worker's own state vectors, if each worker has its own.
    pub own: Option<&'a mut [Vec<f32>]>,
    /// The weights that the worker pulled, if they are kept and differ.
    pub pulled: Option<&'a [f32]>,
}

/// The number and the rates of an update.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Rate and count for the optimizer. The count is per worker if the optimizer's state is.
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
    ///
    /// If the gradient or a vector does not match the weights, as [`OptimizerConfig::apply`].
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

/// The vectors as slices.
fn slices(vectors: &[Vec<f32>]) -> Vec<&[f32]> {
    vectors.iter().map(Vec::as_slice).collect()
}

/// The decoded gradient, scaled and clipped.
fn prepared(gradient: &Gradient<'_>, hyper: &Hyper, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    let read =
        Values::new(gradient.payload, gradient.encoding, len).expect("payload and bucket differ in length");
    let (mut read, limit) = (read, hyper.clip_value.unwrap_or(f32::INFINITY));
    let _ = read.read(&mut values); // its length is checked
    values.iter_mut().for_each(|v| *v = crate::optim::clip::by_value(*v * gradient.scale, limit));
    values
}

/// Returns the uncorrected gradient if the correction is infinite or NaN.
fn finite_or(corrected: f32, gradient: f32) -> f32 {
    if corrected.is_finite() { corrected } else { gradient }
}

const ALGORITHM: crate::optim::Check = crate::optim::Check("algorithm");
