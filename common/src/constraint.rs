//! Constraints on trained values. The servers project a bucket's values into the allowed set after each
//! update, as a script would after each `optimizer.step()` (projected gradient descent: Goldstein,
//! "Convex programming in Hilbert space", 1964).
//!
//! Each rule depends only on the values, in `f32` with sums in `f64` in a fixed order, so all replicas
//! have the same bits.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A constraint on a range of the flat vector.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constraint {
    /// First value, counted from the start of the flat vector.
    pub offset: usize,
    /// Number of values, from 1; all are parameters.
    pub values: usize,
    /// The rule.
    pub rule: Rule,
}

/// A rule for values, or for rows of values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Rule {
    /// Each value is within `min` and `max`, as after `torch.clamp_`. A NaN stays NaN.
    Clamp {
        /// `None`: no bound. (Checkpoints are JSON, which has no infinity.)
        #[serde(default, skip_serializing_if = "Option::is_none")]
        min: Option<f32>,
        /// `None`: no bound. Not below `min`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max: Option<f32>,
    },
    /// Each row of `row` values has the Euclidean norm 1. A row of zeros stays zero.
    UnitNorm {
        /// Values in a row, from 1.
        row: usize,
    },
    /// Each row of `row` values has at most this Euclidean norm, as after `torch.renorm(p=2, dim=0)`.
    MaxNorm {
        /// Values in a row, from 1.
        row: usize,
        /// Above 0.
        max: f32,
    },
}

impl Rule {
    /// The length of a row, which no bucket may cut.
    pub fn row(&self) -> usize {
        match self {
            Self::Clamp { .. } => 1,
            Self::UnitNorm { row } | Self::MaxNorm { row, .. } => *row,
        }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// The invalid number, for people.
    pub fn validate(&self) -> Result<(), String> {
        match self {
            Self::Clamp { min, max } => {
                let (min, max) = bounds(*min, *max);
                match min <= max && min < f32::INFINITY && max > f32::NEG_INFINITY {
                    true => Ok(()),
                    false => {
                        Err(format!("clamp [{min}, {max}] holds no value: write the smaller bound first"))
                    }
                }
            }
            Self::UnitNorm { row: 0 } | Self::MaxNorm { row: 0, .. } => {
                Err("a row has at least one value".into())
            }
            Self::MaxNorm { max, .. } if !(max.is_finite() && *max > 0.0) => {
                Err(format!("max_norm {max} is not a finite number above 0"))
            }
            Self::UnitNorm { .. } | Self::MaxNorm { .. } => Ok(()),
        }
    }

    /// Projects values; rows must be whole.
    fn apply(&self, values: &mut [f32]) {
        match *self {
            Self::Clamp { min, max } => {
                let (min, max) = bounds(min, max);
                values.iter_mut().for_each(|v| {
                    if *v < min {
                        *v = min;
                    } else if *v > max {
                        *v = max;
                    }
                });
            }
            Self::UnitNorm { row } => values.chunks_exact_mut(row.max(1)).for_each(|row| {
                let norm = norm(row);
                if norm > 0.0 && norm.is_finite() {
                    scale(row, 1.0 / norm);
                }
            }),
            Self::MaxNorm { row, max } => values.chunks_exact_mut(row.max(1)).for_each(|row| {
                let (norm, max) = (norm(row), f64::from(max));
                if norm > max && norm.is_finite() {
                    scale(row, max / (norm + RENORM_EPSILON));
                }
            }),
        }
    }
}

fn bounds(min: Option<f32>, max: Option<f32>) -> (f32, f32) {
    (min.unwrap_or(f32::NEG_INFINITY), max.unwrap_or(f32::INFINITY))
}

/// `torch.renorm` adds this to a norm before the division.
const RENORM_EPSILON: f64 = 1e-7;

/// The Euclidean norm. Eight independent sums run in parallel; their order is fixed.
fn norm(row: &[f32]) -> f64 {
    let mut sums = [0.0f64; 8];
    let square = |v: f32| f64::from(v) * f64::from(v);
    let mut chunks = row.chunks_exact(8);
    for chunk in &mut chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *sum += square(*v);
        }
    }
    for (sum, v) in sums.iter_mut().zip(chunks.remainder()) {
        *sum += square(*v);
    }
    sums.iter().sum::<f64>().sqrt()
}

fn scale(row: &mut [f32], by: f64) {
    row.iter_mut().for_each(|v| *v = (f64::from(*v) * by) as f32);
}

/// The maximal number of rules in a job.
pub const MAX_CONSTRAINTS: usize = 4096;

impl Constraint {
    fn range(&self) -> Range<usize> {
        self.offset..self.offset.saturating_add(self.values)
    }
}

/// Applies the rules of a bucket, which is at `here` in the flat vector, in order; [`check`] has passed for all of them.
pub fn apply(constraints: &[Constraint], here: Range<usize>, values: &mut [f32]) {
    let first = constraints.partition_point(|c| c.range().end <= here.start);
    for c in constraints[first..].iter().take_while(|c| c.offset < here.end) {
        let (from, to) = (c.range().start.max(here.start), c.range().end.min(here.end));
        if let Some(values) =
            (from < to).then(|| values.get_mut(from - here.start..to - here.start)).flatten()
        {
            c.rule.apply(values);
        }
    }
}

/// Checks the rules of a job with this many parameters.
///
/// # Errors
///
/// The reason, for people.
pub fn check(constraints: &[Constraint], params_len: usize) -> Result<(), String> {
    if constraints.len() > MAX_CONSTRAINTS {
        return Err(format!("{} constraints; a job has at most {MAX_CONSTRAINTS}", constraints.len()));
    }
    for c in constraints {
        let Range { start, end } = c.range();
        if start >= end || end > params_len {
            return Err(format!("a constraint is of values {start} to {end}, and {params_len} are trained"));
        }
        c.rule.validate()?;
        if !c.values.is_multiple_of(c.rule.row()) {
            return Err(format!("{} values are not rows of {}", c.values, c.rule.row()));
        }
    }
    let in_order = |pair: &[Constraint]| {
        let [a, b] = [pair[0].range(), pair[1].range()];
        a.start <= b.start && a.end <= b.end
    };
    if !constraints.windows(2).all(in_order) {
        return Err("the constraints are not in the order of the values".into());
    }
    let mut end = 0;
    for c in constraints.iter().filter(|c| c.rule.row() > 1) {
        if c.offset < end {
            return Err("two constraints of rows are of the same values".into());
        }
        end = c.range().end;
    }
    Ok(())
}

/// The end of each part of the parameters, with its row length, as the rules on rows divide them.
pub(crate) fn row_ends(constraints: &[Constraint], params_len: usize) -> Vec<(usize, usize)> {
    let (mut ends, mut at) = (Vec::new(), 0);
    for c in constraints.iter().filter(|c| c.rule.row() > 1) {
        if c.offset > at {
            ends.push((c.offset, 1));
        }
        at = c.range().end;
        ends.push((at, c.rule.row()));
    }
    if at < params_len {
        ends.push((params_len, 1));
    }
    ends
}

#[cfg(test)]
#[path = "constraint_tests.rs"]
mod tests;
