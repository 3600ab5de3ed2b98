//! Tensor slices (Shoeybi et al., 2019, "Megatron-LM"): some ranks compute each layer together, each with a part of
//! its parameters.
//!
//! ```text
//!  x ──▶ columns 0 ─▶ act ─▶ rows 0 ──▶ partial 0 ─┐
//!  x ──▶ columns 1 ─▶ act ─▶ rows 1 ──▶ partial 1 ─┴─▶ sum = y, on both        (and back: the gradient of x is such a sum)
//! ```
//!
//! A slice has its own flat vector: its parts of the split tensors, and complete copies of the others that it
//! needs. [`Run`]s map its values to the model's vector. Values outside all runs are always zero: a bias that
//! another slice adds, a row for other slices' tokens.
//!
//! Slices communicate only through [`SliceRanks::gather`]: each sums what it receives in the order of the slices,
//! so all obtain the same bits.

mod member;

pub(crate) use member::SliceMember;

use crate::{Layer, Model, ModelError, net::Net};
use paraft_compute::DeviceError;
use std::{fmt::Debug, ops::Range, sync::Arc};

/// One of the slices of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Its index, from 0.
    pub at: usize,
    /// The number of slices, at least one.
    pub of: usize,
}

impl Slice {
    /// Its part of `n` consecutive items.
    pub fn part(&self, n: usize) -> Range<usize> {
        n * self.at / self.of..n * (self.at + 1) / self.of
    }

    /// Whether this is the first slice, which also holds the unsliced parts.
    pub fn is_first(&self) -> bool {
        self.at == 0
    }
}

/// The ranks with the slices of one model. All call it at the same points of the same program.
pub trait SliceRanks: Send + Sync + Debug {
    /// The values of each slice, in slice order; all of one length.
    ///
    /// # Errors
    /// A rank is gone, or has sent something else.
    fn gather(&self, own: &[f32]) -> Result<Vec<Vec<f32>>, DeviceError>;
}

/// A slice's values that exist in the model's flat vector: rows of one length, adjacent in the slice's vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First index in the model's vector.
    pub whole: usize,
    /// First index in the slice's vector.
    pub local: usize,
    /// Number of rows.
    pub rows: usize,
    /// Values per row.
    pub len: usize,
    /// Distance of rows in the model's vector.
    pub stride: usize,
    /// All slices have these values and their gradient; the first slice's counts.
    pub shared: bool,
}

impl Run {
    /// Values that are all present, at their places in the model's vector.
    pub fn whole(values: Range<usize>) -> Self {
        let (at, len) = (values.start, values.len());
        Self { whole: at, local: at, rows: 1, len, stride: len, shared: false }
    }

    /// Whether the first row of `next` continues this run.
    pub fn is_followed_by(&self, next: &Self) -> bool {
        let whole = self.whole + self.rows * self.stride;
        let local = self.local + self.rows * self.len;
        (whole, local, self.len, self.stride, self.shared)
            == (next.whole, next.local, next.len, next.stride, next.shared)
    }

    /// Each row's range in the model's vector and in the slice's.
    pub fn each(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        let Self { whole, local, len, stride, .. } = *self;
        (0..self.rows).map(move |row| {
            let (whole, local) = (whole + row * stride, local + row * len);
            (whole..whole + len, local..local + len)
        })
    }
}

/// A slice of a net, and the places of its values in the net's vector.
pub type NetSlice<D> = (Box<dyn Net<D>>, Vec<Run>);

/// The layers of a model as the first of `of` slices has them, in the slice's flat vector.
///
/// # Errors
/// The model cannot be split so; the text is for users.
pub fn layers_of_slice(model: &dyn Model, of: usize) -> Result<Vec<Layer>, ModelError> {
    match of {
        1 => Ok(model.layers()),
        _ => Ok(model.slice(Slice { at: 0, of }, Arc::new(NoRanks))?.model.layers()),
    }
}

/// For a slice that computes nothing.
#[derive(Debug)]
struct NoRanks;

impl SliceRanks for NoRanks {
    fn gather(&self, _: &[f32]) -> Result<Vec<Vec<f32>>, DeviceError> {
        Err(DeviceError::Group("a slice without the others".into()))
    }
}

/// One slice of a model.
pub struct Sliced {
    /// Computes the slice: [`Model::forward_pass`] and [`Model::backward_pass`], over the slice's flat vectors.
    pub model: Box<dyn Model>,
    /// Length of the slice's flat vector.
    pub len: usize,
    /// Its values' places in the model's vector.
    pub runs: Vec<Run>,
}

impl Sliced {
    /// Copies the slice's part of the model's values.
    pub fn cut(&self, whole: &[f32], local: &mut [f32]) {
        for (from, to) in self.runs.iter().flat_map(Run::each) {
            local[to].copy_from_slice(&whole[from]);
        }
    }

    /// Copies the slice's part of a gradient to its place in the model's vector.
    pub fn join(&self, slice: Slice, local: &[f32], whole: &mut [f32]) {
        let own = self.runs.iter().filter(|r| slice.is_first() || !r.shared);
        for (to, from) in own.flat_map(Run::each) {
            whole[to].copy_from_slice(&local[from]);
        }
    }
}

/// Collects the runs of a slice, tensor by tensor.
#[derive(Debug, Default)]
pub(crate) struct Runs(pub Vec<Run>);

impl Runs {
    /// Values that are consecutive in both vectors.
    pub fn part(&mut self, whole: usize, local: usize, len: usize) {
        self.rows((whole, len), local, 1, len);
    }

    /// Likewise, for values that all slices hold completely.
    pub fn shared(&mut self, whole: usize, local: usize, len: usize) {
        self.part(whole, local, len);
        self.0.iter_mut().rev().take(1).for_each(|run| run.shared = true);
    }

    /// A part of each row of a matrix.
    pub fn rows(&mut self, (whole, stride): (usize, usize), local: usize, rows: usize, len: usize) {
        if len > 0 && rows > 0 {
            self.0.push(Run { whole, local, rows, len, stride, shared: false });
        }
    }
}

#[cfg(test)]
#[path = "slice_tests.rs"]
mod tests;
