//! The operands of a product.

/// A read-only matrix, with the strides of its rows and columns, one of which is 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(super) values: &'a [f32],
    pub(super) row: usize,
    pub(super) col: usize,
}

impl<'a> Matrix<'a> {
    /// Consecutive rows at this distance.
    pub(crate) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row: stride, col: 1 }
    }

    /// Columns likewise: the transpose of [`Self::rows`].
    pub(crate) fn columns(values: &'a [f32], stride: usize) -> Self {
        Self { values, row: 1, col: stride }
    }

    /// The submatrix from a row and a column on.
    #[inline(always)]
    pub(super) fn from(self, row: usize, col: usize) -> Self {
        Self { values: &self.values[row * self.row + col * self.col..], ..self }
    }

    pub(super) fn holds(self, rows: usize, cols: usize) -> bool {
        rows == 0 || cols == 0 || (rows - 1) * self.row + (cols - 1) * self.col < self.values.len()
    }
}

/// The initial value of a product's sums, and what follows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProductStart<'a> {
    /// Zero: `c` is not read.
    Zero,
    /// The value of `c`.
    Sum,
    /// A bias, one value per column.
    Bias(&'a [f32]),
    /// The same, and negative results become zero.
    BiasRelu(&'a [f32]),
}

impl<'a> ProductStart<'a> {
    pub(super) fn columns(self, from: usize) -> Self {
        match self {
            Self::Bias(b) => Self::Bias(&b[from..]),
            Self::BiasRelu(b) => Self::BiasRelu(&b[from..]),
            other => other,
        }
    }

    /// For a part of the sum.
    pub(super) fn part(self, first: bool, last: bool) -> (Self, bool) {
        let relu = last && matches!(self, Self::BiasRelu(_));
        let start = match self {
            _ if !first => Self::Sum,
            Self::BiasRelu(b) => Self::Bias(b),
            other => other,
        };
        (start, relu)
    }
}
