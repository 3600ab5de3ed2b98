//! Sparse logistic regression: a weight for each id. With `ftrl` as the table's optimizer it is that of McMahan et al.,
//! "Ad Click Prediction: a View from the Trenches", KDD 2013.

use super::{Predicts, SparseInput, SparseModel, SparseShape, linear::Linear, loss};
use crate::ModelError;
use paraft_common::TensorSpec;

pub struct Logistic {
    linear: Linear,
    scores: Vec<f32>,
}

impl Logistic {
    pub fn new(shape: SparseShape) -> Self {
        Self { linear: Linear::new(shape.dense), scores: Vec::new() }
    }
}

impl SparseModel for Logistic {
    fn predicts(&self) -> Predicts {
        Predicts::Clicks
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.linear.tensors()
    }

    fn init(&self, _seed: u64, params: &mut [f32]) {
        params.fill(0.0);
    }

    fn step(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        grads: &mut [f32],
        row_grads: &mut [Vec<f32>],
    ) -> Result<f32, ModelError> {
        self.linear.forward(params, &rows[0], input, &mut self.scores);
        let loss = loss::mean(Predicts::Clicks, input, &mut self.scores);
        self.linear.backward(&self.scores, input, grads, &mut row_grads[0]);
        Ok(loss)
    }

    fn scores(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        scores: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.linear.forward(params, &rows[0], input, scores);
        Ok(())
    }
}
