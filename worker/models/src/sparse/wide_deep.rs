//! Wide and deep: the linear part, plus layers over the fields' rows and the plain values. (Cheng et al., "Wide & Deep
//! Learning for Recommender Systems", DLRS 2016.)

use super::{
    Predicts, SparseInput, SparseModel, SparseShape,
    linear::Linear,
    loss,
    mlp::{Mlp, bags, bags_backward},
};
use crate::{ModelError, init::Init};
use paraft_common::TensorSpec;
use paraft_compute::{Cpu, CpuDevice, Threads};

pub struct WideDeep {
    device: CpuDevice,
    linear: Linear,
    deep: Mlp,
    dense: usize,
    dim: usize,
    /// Inputs of the layers: the plain values, then each field's row.
    width: usize,
    scores: Vec<f32>,
}

impl WideDeep {
    pub fn new(threads: usize, shape: SparseShape, dim: usize, hidden: &[usize]) -> Result<Self, ModelError> {
        let (linear, width) = (Linear::new(shape.dense), shape.dense + shape.fields * dim);
        let deep = Mlp::new("deep", [&[width], hidden, &[1]].concat(), false, linear.len());
        let device = CpuDevice::with(Threads::new(Cpu::detect(), threads)?);
        Ok(Self { device, linear, deep, dense: shape.dense, dim, width, scores: Vec::new() })
    }
}

impl SparseModel for WideDeep {
    fn predicts(&self) -> Predicts {
        Predicts::Clicks
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        [self.linear.tensors(), self.deep.tensors()].concat()
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        params[..self.linear.len()].fill(0.0);
        self.deep.init(&mut Init::new(seed), params);
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
        let loss = loss::mean(Predicts::Clicks, input, &mut slopes);
        self.linear.backward(&slopes, input, grads, &mut row_grads[0]);
        let of_inputs = self.deep.backward(&mut self.device, params, (input.len(), &slopes), grads)?;
        bags_backward(of_inputs, self.dim, input, (self.width, self.dense), &mut row_grads[1]);
        self.scores = slopes;
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
        let (n, place) = (input.len(), (self.width, self.dense));
        let values = self.deep.input();
        values.resize(n * self.width, 0.0);
        for (to, from) in values.chunks_exact_mut(self.width).zip(input.dense.chunks(self.dense.max(1))) {
            to[..self.dense].copy_from_slice(from);
        }
        bags(&rows[1], self.dim, input, place, values);
        let deep = self.deep.forward(&mut self.device, params, n)?;
        scores.iter_mut().zip(deep).for_each(|(score, deep)| *score += deep);
        Ok(())
    }
}
