//! Gradient clipping.
//!
//! By value, as `torch.nn.utils.clip_grad_value_`: each value is limited to `[-c, c]`. A bucket's update does
//! this alone. By norm, as `torch.nn.utils.clip_grad_norm_` (Pascanu, Mikolov, Bengio 2013, "On the difficulty
//! of training recurrent neural networks"): the gradient is multiplied by `min(1, c / (norm + 1e-6))`. The norm
//! is over the whole gradient, which no single shard sees, so the factor is computed elsewhere and comes in
//! through [`super::Gradient::scale`].

use super::{Check, OptimError};
use serde::{Deserialize, Serialize};

/// The `[clip]` table of a job. Both may be set: the norm's factor is applied first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClipConfig {
    /// Bound on the size of each gradient value; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f32>,
    /// Bound on the Euclidean norm of the whole gradient; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm: Option<f32>,
}

impl ClipConfig {
    /// Checks the bounds; the error names the key.
    pub fn validate(&self) -> Result<(), OptimError> {
        for (key, bound) in [("value", self.value), ("norm", self.norm)] {
            if let Some(c) = bound {
                Check("clip").that(key, f64::from(c), c > 0.0, "a finite number above 0")?;
            }
        }
        Ok(())
    }
}

/// What to multiply a gradient by so that its norm is at most `max_norm`; `sum_of_squares` is the square of
/// its norm now. Between 0 and 1; 0 where the norm is infinite or not a number, so that a broken gradient
/// cannot pass as a small one.
pub fn norm_factor(max_norm: f32, sum_of_squares: f64) -> f32 {
    let factor = f64::from(max_norm) / (sum_of_squares.sqrt() + 1e-6);
    if factor >= 1.0 {
        1.0
    } else if factor > 0.0 {
        factor as f32
    } else {
        0.0
    }
}

/// `g` limited to `[-limit, limit]`. Written as comparisons: they compile to `minps`/`maxps`, which `f32::clamp`
/// with its rules for NaN does not.
#[inline(always)]
pub(crate) fn by_value(g: f32, limit: f32) -> f32 {
    let g = if g > limit { limit } else { g };
    if g < -limit { -limit } else { g }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_scales_only_a_norm_above_the_bound() {
        assert_eq!(norm_factor(1.0, 0.25), 1.0);
        assert_eq!(norm_factor(1.0, 0.0), 1.0);
        let f = f64::from(norm_factor(1.0, 16.0));
        assert!((f - 1.0 / (4.0 + 1e-6)).abs() < 1e-7);
        assert_eq!(norm_factor(1.0, f64::INFINITY), 0.0);
        assert_eq!(norm_factor(1.0, f64::NAN), 0.0);
    }

    #[test]
    fn values_are_limited_on_both_sides() {
        assert_eq!([-3.0, -0.5, 0.5, 3.0].map(|g| by_value(g, 1.0)), [-1.0, -0.5, 0.5, 1.0]);
        assert_eq!(by_value(f32::MAX, f32::INFINITY), f32::MAX);
    }

    #[test]
    fn bad_bounds_are_named() {
        let bad = ClipConfig { value: None, norm: Some(0.0) };
        let text = bad.validate().expect_err("zero").to_string();
        assert_eq!(text, "[clip] norm = 0: must be a finite number above 0");
        assert!(ClipConfig { value: Some(f32::NAN), norm: None }.validate().is_err());
        assert!(toml::from_str::<ClipConfig>("max = 1.0").is_err());
    }
}
