//! DLRM: layers over the plain values give a vector as long as the rows; it and the fields' rows are multiplied pair by
//! pair; layers over that vector and the products give the score. (Naumov et al., "Deep Learning Recommendation Model for
//! Personalization and Recommendation Systems", arXiv:1906.00091, 2019.)

use super::{
    Predicts, SparseInput, SparseModel, SparseShape, loss,
    mlp::{Mlp, bags, bags_backward},
};
use crate::{ModelError, init::Init};
use paraft_common::TensorSpec;
use paraft_compute::{Cpu, CpuDevice, Threads};

pub struct Dlrm {
    device: CpuDevice,
    /// None for data without plain values.
    bottom: Option<Mlp>,
    top: Mlp,
    dense: usize,
    dim: usize,
    /// Vectors that are multiplied: the fields, and before them the bottom layers' output.
    vectors: usize,
    /// `[n, vectors, dim]`.
    all: Vec<f32>,
    /// Its gradient.
    deltas: Vec<f32>,
    scores: Vec<f32>,
}

impl Dlrm {
    pub fn new(
        threads: usize,
        shape: SparseShape,
        dim: usize,
        (bottom, top): (&[usize], &[usize]),
    ) -> Result<Self, ModelError> {
        let bottom = (shape.dense > 0).then(|| {
            let widths = [&[shape.dense], bottom, &[dim]].concat();
            Mlp::new("bot_l", widths, true, 0)
        });
        let vectors = shape.fields + usize::from(bottom.is_some());
        let inputs = vectors * (vectors - 1) / 2 + if bottom.is_some() { dim } else { 0 };
        let top =
            Mlp::new("top_l", [&[inputs], top, &[1]].concat(), false, bottom.as_ref().map_or(0, Mlp::end));
        Ok(Self {
            device: CpuDevice::with(Threads::new(Cpu::detect(), threads)?),
            bottom,
            top,
            dense: shape.dense,
            dim,
            vectors,
            all: Vec::new(),
            deltas: Vec::new(),
            scores: Vec::new(),
        })
    }

    fn forward(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
    ) -> Result<&[f32], ModelError> {
        let (n, dim, vectors) = (input.len(), self.dim, self.vectors);
        let width = vectors * dim;
        self.all.resize(n * width, 0.0);
        let mut before = 0;
        if let Some(bottom) = &mut self.bottom {
            bottom.input().clear();
            bottom.input().extend_from_slice(&input.dense[..n * self.dense]);
            let out = bottom.forward(&mut self.device, params, n)?;
            for (all, out) in self.all.chunks_exact_mut(width).zip(out.chunks_exact(dim)) {
                all[..dim].copy_from_slice(out);
            }
            before = dim;
        }
        bags(&rows[0], dim, input, (width, before), &mut self.all);
        let inputs = self.top.input();
        inputs.clear();
        for all in self.all.chunks_exact(width) {
            inputs.extend_from_slice(&all[..before]);
            for i in 1..vectors {
                for j in 0..i {
                    let (a, b) = (&all[i * dim..][..dim], &all[j * dim..][..dim]);
                    inputs.push(a.iter().zip(b).map(|(a, b)| a * b).sum());
                }
            }
        }
        self.top.forward(&mut self.device, params, n)
    }
}

impl SparseModel for Dlrm {
    fn predicts(&self) -> Predicts {
        Predicts::Clicks
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let bottom = self.bottom.as_ref().map(Mlp::tensors).unwrap_or_default();
        [bottom, self.top.tensors()].concat()
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        let mut init = Init::new(seed);
        if let Some(bottom) = &self.bottom {
            bottom.init(&mut init, params);
        }
        self.top.init(&mut init, params);
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
        slopes.clear();
        slopes.extend_from_slice(self.forward(params, rows, input)?);
        let loss = loss::mean(Predicts::Clicks, input, &mut slopes);
        let (n, dim, vectors) = (input.len(), self.dim, self.vectors);
        let (width, before) = (vectors * dim, if self.bottom.is_some() { dim } else { 0 });
        let of_inputs = self.top.backward(&mut self.device, params, (n, &slopes), grads)?;
        let inputs = before + vectors * (vectors - 1) / 2;
        self.deltas.clear();
        self.deltas.resize(n * width, 0.0);
        let samples = self.deltas.chunks_exact_mut(width).zip(self.all.chunks_exact(width));
        for ((delta, all), of) in samples.zip(of_inputs.chunks_exact(inputs)) {
            delta[..before].copy_from_slice(&of[..before]);
            let mut products = of[before..].iter();
            for i in 1..vectors {
                for j in 0..i {
                    let Some(g) = products.next() else { continue };
                    for d in 0..dim {
                        delta[i * dim + d] += g * all[j * dim + d];
                        delta[j * dim + d] += g * all[i * dim + d];
                    }
                }
            }
        }
        bags_backward(&self.deltas, dim, input, (width, before), &mut row_grads[0]);
        if let Some(bottom) = &mut self.bottom {
            let of_output: Vec<f32> =
                self.deltas.chunks_exact(width).flat_map(|d| &d[..dim]).copied().collect();
            bottom.backward(&mut self.device, params, (n, &of_output), grads)?;
        }
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
        scores.clear();
        scores.extend_from_slice(self.forward(params, rows, input)?);
        Ok(())
    }
}
