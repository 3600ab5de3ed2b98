//! The rules of all optimizers.

use super::{
    AdadeltaRule, AdagradRule, AdamRule, AdamaxRule, MomentumRule, NAdamRule, NesterovRule, RAdamRule,
    RmsPropRule, gradient::Prepared, sgd,
};
use std::ops::Range;

/// The per-value rule of an update, with its constants. The formulas are in the optimizers' files.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// See [`Sgd`](super::Sgd).
    Sgd {
        /// The learning rate.
        lr: f32,
    },
    /// See [`Momentum`](super::Momentum).
    Momentum(MomentumRule),
    /// See [`Nesterov`](super::Nesterov).
    Nesterov(NesterovRule),
    /// See [`Adagrad`](super::Adagrad).
    Adagrad(AdagradRule),
    /// See [`RmsProp`](super::RmsProp).
    RmsProp(RmsPropRule),
    /// See [`Adam`](super::Adam) and [`AdamW`](super::AdamW).
    Adam(AdamRule),
    /// See [`Adadelta`](super::Adadelta).
    Adadelta(AdadeltaRule),
    /// See [`Adamax`](super::Adamax).
    Adamax(AdamaxRule),
    /// See [`NAdam`](super::NAdam).
    NAdam(NAdamRule),
    /// See [`RAdam`](super::RAdam).
    RAdam(RAdamRule),
}

/// Each loop reads a value's weight and slots, then computes, then writes. A read after a write to
/// another vector would load the value again, which halved the speed of Adam.
impl Rule {
    /// Updates `weights`, which start at `at` in the bucket, and the same range of the slots.
    #[inline(always)]
    pub(super) fn run(
        self,
        weights: &mut [f32],
        slots: &mut [Vec<f32>],
        at: Range<usize>,
        grad: Prepared<'_>,
    ) {
        match (self, slots) {
            (Rule::Sgd { lr }, _) => sgd::plain(weights, grad, lr),
            (Rule::Momentum(r), [buf]) => r.run(weights, &mut buf[at], grad),
            (Rule::Nesterov(r), [buf]) => r.run(weights, &mut buf[at], grad),
            (Rule::Adagrad(r), [sum]) => r.run(weights, &mut sum[at], grad),
            (Rule::RmsProp(r), slots) => r.run(weights, slots, at, grad),
            (Rule::Adam(r), [m, v]) => r.run(weights, &mut m[at.clone()], &mut v[at], grad),
            (Rule::Adam(r), [m, v, most]) => {
                let slots = (&mut m[at.clone()], &mut v[at.clone()], &mut most[at]);
                r.run_by_most(weights, slots, grad);
            }
            (Rule::Adadelta(r), [s, a]) => r.run(weights, &mut s[at.clone()], &mut a[at], grad),
            (Rule::Adamax(r), [m, u]) => r.run(weights, &mut m[at.clone()], &mut u[at], grad),
            (Rule::NAdam(r), [m, v]) => r.run(weights, &mut m[at.clone()], &mut v[at], grad),
            (Rule::RAdam(r), [m, v]) => r.run(weights, &mut m[at.clone()], &mut v[at], grad),
            _ => unreachable!("the number of slots was checked by the caller"),
        }
    }
}
