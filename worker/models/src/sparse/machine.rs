//! A factorisation machine of degree 2: the linear part, and for each pair of a sample's ids the product of their
//! factors. (Rendle, "Factorization Machines", ICDM 2010; the sum over pairs as in its lemma 3.1.)

use super::{Predicts, SparseInput, SparseModel, SparseShape, factors::row, linear::Linear, loss};
use crate::ModelError;
use paraft_common::TensorSpec;

pub struct Machine {
    linear: Linear,
    predicts: Predicts,
    mean: f32,
    dim: usize,
    /// Of the squares of the weights and factors of each use.
    l2: f32,
    scores: Vec<f32>,
    /// `[n, dim]` sums of each sample's factors.
    sums: Vec<f32>,
}

impl Machine {
    pub fn new(shape: SparseShape, dim: usize, l2: f32) -> Self {
        Self {
            linear: Linear::new(shape.dense),
            predicts: if shape.classes { Predicts::Clicks } else { Predicts::Numbers },
            mean: if shape.classes { 0.0 } else { shape.mean },
            dim,
            l2,
            scores: Vec::new(),
            sums: Vec::new(),
        }
    }
}

impl SparseModel for Machine {
    fn predicts(&self) -> Predicts {
        self.predicts
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.linear.tensors()
    }

    fn init(&self, _seed: u64, params: &mut [f32]) {
        params.fill(0.0);
        params[0] = self.mean;
    }

    fn step(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        grads: &mut [f32],
        row_grads: &mut [Vec<f32>],
    ) -> Result<f32, ModelError> {
        let mut slopes = std::mem::take(&mut self.scores);
        self.scores(params, rows, input, &mut slopes)?;
        let mut loss = f64::from(loss::mean(self.predicts, input, &mut slopes));
        let [weights, factors] = row_grads else {
            return Err(ModelError::new("it takes two tables"));
        };
        self.linear.backward(&slopes, input, grads, weights);
        for field in &input.fields {
            for (i, slope) in slopes.iter().enumerate() {
                let (sums, l2) = (&self.sums[i * self.dim..][..self.dim], self.l2 * input.share(i));
                for (place, x) in field.of(i) {
                    let v = row(&rows[1], place, self.dim);
                    for ((g, v), sum) in factors[place * self.dim..].iter_mut().zip(v).zip(sums) {
                        *g += slope * x * (sum - v * x) + 2.0 * l2 * v;
                    }
                    if l2 > 0.0 {
                        let w = rows[0][place];
                        weights[place] += 2.0 * l2 * w;
                        loss += f64::from(l2) * f64::from(w * w + v.iter().map(|v| v * v).sum::<f32>());
                    }
                }
            }
        }
        self.scores = slopes;
        Ok(loss as f32)
    }

    fn scores(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        scores: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.linear.forward(params, &rows[0], input, scores);
        self.sums.clear();
        self.sums.resize(input.len() * self.dim, 0.0);
        for (i, score) in scores.iter_mut().enumerate() {
            let sums = &mut self.sums[i * self.dim..][..self.dim];
            let mut squares = 0.0;
            for (place, x) in input.fields.iter().flat_map(|f| f.of(i)) {
                for (sum, v) in sums.iter_mut().zip(row(&rows[1], place, self.dim)) {
                    *sum += v * x;
                    squares += (v * x) * (v * x);
                }
            }
            *score += 0.5 * (sums.iter().map(|s| s * s).sum::<f32>() - squares);
        }
        Ok(())
    }
}
