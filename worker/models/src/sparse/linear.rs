//! The linear part of several models: a bias, a weight for each plain value, and a table with a weight for each id.

use super::SparseInput;
use paraft_common::TensorSpec;

/// `bias + dense · weight + Σ x w[id]`. In the flat vector the bias comes first, then the weights of plain values.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    dense: usize,
}

impl Linear {
    pub fn new(dense: usize) -> Self {
        Self { dense }
    }

    pub fn tensors(self) -> Vec<TensorSpec> {
        let mut tensors = vec![TensorSpec::param("bias", &[1])];
        if self.dense > 0 {
            tensors.push(TensorSpec::param("dense.weight", &[1, self.dense]));
        }
        tensors
    }

    /// Values in the flat vector.
    pub fn len(self) -> usize {
        1 + self.dense
    }

    /// Writes each sample's sum. `rows`: `[rows, 1]`.
    pub fn forward(self, params: &[f32], rows: &[f32], input: &SparseInput, scores: &mut Vec<f32>) {
        scores.clear();
        for i in 0..input.len() {
            let mut score = params[0];
            let values = &input.dense[i * self.dense..][..self.dense];
            for (x, w) in values.iter().zip(&params[1..]) {
                score += x * w;
            }
            for (place, x) in input.fields.iter().flat_map(|f| f.of(i)) {
                score += x * rows[place];
            }
            scores.push(score);
        }
    }

    /// Overwrites the gradient of the tensors, and adds that of the rows, from the gradient of each score.
    pub fn backward(self, slopes: &[f32], input: &SparseInput, grads: &mut [f32], row_grads: &mut [f32]) {
        grads[..self.len()].fill(0.0);
        for (i, slope) in slopes.iter().enumerate() {
            grads[0] += slope;
            let values = &input.dense[i * self.dense..][..self.dense];
            for (g, x) in grads[1..].iter_mut().zip(values) {
                *g += slope * x;
            }
        }
        for field in &input.fields {
            for (i, slope) in slopes.iter().enumerate() {
                field.of(i).for_each(|(place, x)| row_grads[place] += slope * x);
            }
        }
    }
}
