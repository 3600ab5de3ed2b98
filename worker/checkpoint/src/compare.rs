//! Norms of the tensors of a file, and the differences between two.

use crate::{
    CheckpointError,
    tensors::{Entry, TensorFile},
};
use std::collections::BTreeMap;

/// Statistics of one tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Euclidean norm.
    pub norm: f64,
    /// The largest absolute value.
    pub max_abs: f64,
    /// Number of values that are not finite.
    pub not_finite: u64,
}

/// Reads one tensor.
pub fn stats(file: &TensorFile, name: &str) -> Result<Stats, CheckpointError> {
    let (mut squares, mut s) = (0f64, Stats::default());
    file.chunks(name, |values| {
        for v in values {
            let v = f64::from(*v);
            if v.is_finite() {
                squares += v * v;
                s.max_abs = s.max_abs.max(v.abs());
            } else {
                s.not_finite += 1;
            }
        }
    })?;
    s.norm = squares.sqrt();
    Ok(s)
}

/// The difference of one tensor between two files.
#[derive(Clone, Debug, PartialEq)]
pub enum Difference {
    /// Bitwise equal values.
    Equal,
    /// The same shape, different values.
    Values {
        /// The largest absolute difference; infinite if one side is not finite.
        max_abs: f64,
        /// The largest difference, relative to the larger of both tensors' largest absolute values.
        relative: f64,
        /// Number of different values.
        count: u64,
    },
    /// Different shapes.
    Shape(Vec<usize>, Vec<usize>),
    /// Only in the first file.
    OnlyFirst,
    /// Only in the second file.
    OnlySecond,
}

/// Compares two files tensor by tensor, in name order. It skips tensors that are not floating-point (BatchNorm's
/// counters).
pub fn diff(a: &TensorFile, b: &TensorFile) -> Result<Vec<(String, Difference)>, CheckpointError> {
    let of = |f: &TensorFile| -> BTreeMap<String, Entry> {
        f.entries().into_iter().filter(Entry::is_float).map(|e| (e.name.clone(), e)).collect()
    };
    let (in_a, in_b) = (of(a), of(b));
    let mut names: Vec<&String> = in_a.keys().chain(in_b.keys()).collect();
    names.sort();
    names.dedup();
    names
        .into_iter()
        .map(|name| {
            let d = match (in_a.get(name), in_b.get(name)) {
                (Some(x), Some(y)) if x.shape != y.shape => {
                    Difference::Shape(x.shape.clone(), y.shape.clone())
                }
                (Some(x), Some(_)) => values(a, b, name, x.len())?,
                (Some(_), None) => Difference::OnlyFirst,
                (None, _) => Difference::OnlySecond,
            };
            Ok((name.clone(), d))
        })
        .collect()
}

fn values(a: &TensorFile, b: &TensorFile, name: &str, len: usize) -> Result<Difference, CheckpointError> {
    // Read one side completely: files of different types have pieces of different lengths.
    let mut first = vec![0.0; len];
    a.read(name, &mut first)?;
    let (mut at, mut count, mut max_abs, mut largest) = (0, 0, 0f64, 0f64);
    b.chunks(name, |second| {
        for (x, y) in first[at..].iter().zip(second) {
            largest = largest.max(f64::from(x.abs())).max(f64::from(y.abs()));
            if x.to_bits() != y.to_bits() {
                count += 1;
                let apart = (f64::from(*x) - f64::from(*y)).abs();
                max_abs = max_abs.max(if apart.is_nan() { f64::INFINITY } else { apart });
            }
        }
        at += second.len();
    })?;
    let relative = if max_abs == 0.0 { 0.0 } else { max_abs / largest.max(f64::MIN_POSITIVE) };
    Ok(if count == 0 { Difference::Equal } else { Difference::Values { max_abs, relative, count } })
}
