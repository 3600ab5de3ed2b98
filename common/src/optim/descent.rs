//! How gradients move the weights of a whole model in one memory: an optimizer, a schedule and clipping, as the shards apply
//! them bucket by bucket.
//!
//! For who has all of the model: a rank of an all-reduce job, and a worker between two pushes ([`crate::local`]). The bits are
//! those of the shards, since an optimizer works value by value and the norm is summed in the same order.

use super::{
    ClipConfig, Gradient, Hyper, OptimError, OptimizerConfig, ScheduleConfig, apply_buffer, norm_factor,
};
use crate::{
    codec::F32_BYTES,
    encoding::{Encoding, sum_of_squares},
    payload::Payload,
};
use bytes::Bytes;

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Descent {
    /// What a gradient does to a weight.
    pub optimizer: OptimizerConfig,
    /// How the rate changes.
    pub schedule: ScheduleConfig,
    /// Bounds on a gradient.
    pub clip: ClipConfig,
}

/// A gradient that holds an infinity or what is no number; nothing was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its gradient is not finite: training has diverged (lower the rate, or clip)")]
pub struct NotFinite;

impl Descent {
    /// Checks all options; the error names the key.
    pub fn validate(&self) -> Result<(), OptimError> {
        self.optimizer.validate()?;
        self.schedule.validate()?;
        self.clip.validate()
    }

    /// Rate and number of update `t` (from 1), with the schedule at `clock` (0 for the first).
    pub fn hyper(&self, clock: u64, t: u64) -> Hyper {
        let lr = self.optimizer.lr() * self.schedule.factor(clock as f64, 1);
        Hyper { lr: lr as f32, t, clip_value: self.clip.value }
    }

    /// Applies one gradient: `params_len` trained values, then running statistics, all as little-endian f32 like `weights`.
    /// Running statistics move by what their part says, as on the servers. `slots` are the optimizer's, each of
    /// `params_len` values.
    ///
    /// # Panics
    /// When the gradient or a slot does not fit the weights.
    pub fn apply(
        &self,
        hyper: &Hyper,
        params_len: usize,
        weights: &mut [f32],
        slots: &mut [Vec<f32>],
        gradient: &Bytes,
    ) -> Result<(), NotFinite> {
        let part = |range: std::ops::Range<usize>| Payload::from(gradient.slice(range));
        let (params, buffers) =
            (part(0..params_len * F32_BYTES), part(params_len * F32_BYTES..gradient.len()));
        let squares = sum_of_squares(&params, Encoding::F32, params_len).map_err(|_| NotFinite)?;
        if !squares.is_finite() {
            return Err(NotFinite);
        }
        let scale = self.clip.norm.map_or(1.0, |max| norm_factor(max, squares));
        let (trained, rest) = weights.split_at_mut(params_len);
        let gradient = Gradient { payload: &params, encoding: Encoding::F32, scale };
        self.optimizer.apply(hyper, trained, slots, gradient);
        apply_buffer(rest, Gradient { payload: &buffers, encoding: Encoding::F32, scale: 1.0 });
        Ok(())
    }
}
