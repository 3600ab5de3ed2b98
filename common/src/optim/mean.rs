//! The servers' part where the workers run the optimizer: the mean gradient itself.

use super::{
    Gradient,
    gradient::{Stages, runs},
};
use crate::simd::wide;

/// Sets the values to the gradient, scaled and clipped by value.
///
/// # Panics
/// When the lengths differ, as [`super::OptimizerConfig::apply`].
pub fn take_mean(values: &mut [f32], grad: Gradient<'_>, clip_value: Option<f32>) {
    let stages = Stages { scale: grad.scale, limit: clip_value.unwrap_or(f32::INFINITY), decay: 0.0 };
    runs(grad, values.len(), stages, |at, grad| {
        let values = &mut values[at];
        wide(
            #[inline(always)]
            || values.iter_mut().zip(grad.words()).for_each(|(v, word)| *v = grad.value(word, 0.0)),
        );
    });
}

/// Sets the values to a result that a worker has written, bit by bit.
///
/// # Panics
/// When the lengths differ.
pub fn take_result(values: &mut [f32], written: Gradient<'_>) {
    runs(written, values.len(), Stages { scale: 1.0, limit: f32::INFINITY, decay: 0.0 }, |at, written| {
        values[at].iter_mut().zip(written.words()).for_each(|(v, word)| *v = f32::from_le_bytes(*word));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{codec::value_bytes, encoding::Encoding};

    #[test]
    fn a_result_keeps_every_bit() {
        let bits = [-0.0f32, f32::MIN_POSITIVE / 4.0, 1.5, -3.25e-12];
        let payload = value_bytes(bits.to_vec()).into();
        let mut values = [1.0; 4];
        take_result(&mut values, Gradient { payload: &payload, encoding: Encoding::F32, scale: 1.0 });
        assert_eq!(values.map(f32::to_bits), bits.map(f32::to_bits));
    }

    #[test]
    fn a_mean_is_scaled_then_clipped() {
        let payload = value_bytes(vec![4.0f32, -1.0, 0.5]).into();
        let mut values = [7.0; 3];
        take_mean(
            &mut values,
            Gradient { payload: &payload, encoding: Encoding::F32, scale: 0.5 },
            Some(1.0),
        );
        assert_eq!(values, [1.0, -0.5, 0.25]);
    }
}
