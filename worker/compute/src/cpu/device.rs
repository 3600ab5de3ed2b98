//! The CPU as a [`Device`](crate::Device).

mod convolutions;

use crate::{
    collective::RankSums,
    cpu::{
        activation, attention, embedding, linear, loss, row_norm,
        simd::{Cpu, Lane},
        threads::Threads,
    },
    device::{Attentions, Buffers, Embeddings, Linears, Losses, RowNorms, Sums},
    error::Result,
    shape::{
        Activation, AttentionShape, EmbeddingAt, EmbeddingShape, LinearAt, LinearShape, NormAt, NormShape,
    },
};
use std::sync::Arc;

/// The threads of this machine. It computes in f32; every operator is complete when it returns. Only operators that
/// share statistics with a group can fail.
#[derive(Debug)]
pub struct CpuDevice {
    threads: Threads,
    loss: f32,
    sums: Sums,
    /// Losses, and norm gradients, of blocks of rows.
    losses: Vec<f64>,
    norms: Vec<f32>,
    /// `[block][class]` vectors of a linear layer over images.
    lanes: Vec<Lane>,
    /// The group with shared batch statistics.
    ranks: Option<Arc<dyn RankSums>>,
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::on(Cpu::detect())
    }
}

impl CpuDevice {
    /// With a given instruction set, for comparisons.
    pub fn on(cpu: Cpu) -> Self {
        Self::with(Threads::one(cpu))
    }

    /// On these threads.
    pub fn with(threads: Threads) -> Self {
        Self {
            threads,
            loss: 0.0,
            sums: Sums::default(),
            losses: Vec::new(),
            norms: Vec::new(),
            lanes: Vec::new(),
            ranks: None,
        }
    }

    /// Another device on the same threads.
    pub fn another(&self) -> Self {
        Self::with(self.threads.clone())
    }

    /// Shares batch statistics in training with all ranks of a group from now on.
    pub fn join(&mut self, ranks: Option<Arc<dyn RankSums>>) {
        self.ranks = ranks;
    }
}

/// A linear layer's weight and bias; the bias may be empty.
fn of(params: &[f32], shape: LinearShape, at: LinearAt) -> (&[f32], &[f32]) {
    (&params[at.weight..][..shape.weight_len()], at.bias.map_or(&[], |b| &params[b..][..shape.outputs]))
}

/// The gradients of a weight and its bias, which may lie in either order.
fn of_mut(grads: &mut [f32], shape: LinearShape, at: LinearAt) -> (&mut [f32], &mut [f32]) {
    let (weight, len) = (at.weight, shape.weight_len());
    match at.bias {
        None => (&mut grads[weight..][..len], &mut []),
        Some(bias) if bias >= weight + len => {
            let (before, after) = grads.split_at_mut(bias);
            (&mut before[weight..][..len], &mut after[..shape.outputs])
        }
        Some(bias) => {
            let (before, after) = grads.split_at_mut(weight);
            (&mut after[..len], &mut before[bias..][..shape.outputs])
        }
    }
}

fn sized(values: &mut Vec<f32>, len: usize) -> &mut [f32] {
    values.resize(len, 0.0);
    values
}

impl Buffers for CpuDevice {
    type Params = [f32];
    type Grads = [f32];
    type Values = Vec<f32>;
    type Floats = Vec<f32>;
    type Ids = Vec<u32>;

    fn load_values(&mut self, from: &[f32], to: &mut Vec<f32>) -> Result {
        to.clear();
        to.extend_from_slice(from);
        Ok(())
    }

    fn load_ids(&mut self, from: &[u32], to: &mut Vec<u32>) -> Result {
        to.clear();
        to.extend_from_slice(from);
        Ok(())
    }

    fn read(&mut self, values: &Vec<f32>) -> Result<Vec<f32>> {
        Ok(values.clone())
    }
}

impl Linears for CpuDevice {
    fn linear(
        &mut self,
        shape: LinearShape,
        x: &Vec<f32>,
        params: &[f32],
        at: LinearAt,
        activation: Activation,
        y: &mut Vec<f32>,
        before: Option<&mut Vec<f32>>,
    ) -> Result {
        let (weight, bias) = of(params, shape, at);
        let len = shape.n * shape.outputs;
        match before {
            Some(before) if activation == Activation::Gelu => {
                linear::forward(&self.threads, shape, x, weight, bias, activation, sized(before, len));
                activation::gelu(&self.threads, before, sized(y, len));
            }
            _ => {
                assert!(activation != Activation::Gelu, "a GELU needs room for its argument");
                linear::forward(&self.threads, shape, x, weight, bias, activation, sized(y, len));
            }
        }
        Ok(())
    }

    fn linear_backward_weight(
        &mut self,
        shape: LinearShape,
        x: &Vec<f32>,
        dy: &Vec<f32>,
        at: LinearAt,
        grads: &mut [f32],
    ) -> Result {
        let (dweight, dbias) = of_mut(grads, shape, at);
        linear::backward_weight(&self.threads, shape, x, dy, dweight, dbias);
        Ok(())
    }

    fn linear_backward_input(
        &mut self,
        shape: LinearShape,
        dy: &Vec<f32>,
        params: &[f32],
        at: LinearAt,
        dx: &mut Vec<f32>,
    ) -> Result {
        linear::backward_input(
            &self.threads,
            shape,
            of(params, shape, at).0,
            dy,
            sized(dx, shape.n * shape.inputs),
        );
        Ok(())
    }

    fn activation_backward(&mut self, activation: Activation, saved: &Vec<f32>, dy: &mut Vec<f32>) -> Result {
        match activation {
            Activation::None => {}
            Activation::Relu => activation::relu_backward(&self.threads, saved, dy),
            Activation::Gelu => activation::gelu_backward(&self.threads, saved, dy),
        }
        Ok(())
    }

    fn add(&mut self, a: &Vec<f32>, b: &Vec<f32>, sum: &mut Vec<f32>) -> Result {
        assert_eq!(a.len(), b.len(), "add: lengths");
        for ((s, a), b) in sized(sum, a.len()).iter_mut().zip(a).zip(b) {
            *s = a + b;
        }
        Ok(())
    }
}

impl Losses for CpuDevice {
    fn softmax_cross_entropy(
        &mut self,
        rows: usize,
        classes: usize,
        logits: &mut Vec<f32>,
        labels: &Vec<u32>,
    ) -> Result {
        assert_eq!((logits.len(), labels.len()), (rows * classes, rows), "cross entropy: sizes");
        self.loss = loss::softmax_cross_entropy(&self.threads, logits, labels, classes, &mut self.losses);
        Ok(())
    }

    fn mse(&mut self, y: &Vec<f32>, target: &Vec<f32>, dy: &mut Vec<f32>) -> Result {
        self.loss = loss::mse(&self.threads, y, target, sized(dy, y.len()), &mut self.losses);
        Ok(())
    }

    fn cross_entropy_sum(
        &mut self,
        rows: usize,
        classes: usize,
        logits: &Vec<f32>,
        labels: &Vec<u32>,
    ) -> Result {
        let (loss, correct) = loss::cross_entropy_sum(&logits[..rows * classes], labels, classes);
        self.sums.loss += loss;
        self.sums.correct += correct;
        Ok(())
    }

    fn squared_difference(&mut self, y: &Vec<f32>, target: &Vec<f32>) -> Result {
        self.sums.loss += loss::squared_difference(y, target);
        Ok(())
    }

    fn loss(&mut self) -> Result<f32> {
        Ok(self.loss)
    }

    fn sums(&mut self) -> Result<Sums> {
        Ok(std::mem::take(&mut self.sums))
    }
}

impl RowNorms for CpuDevice {
    fn norm(
        &mut self,
        shape: NormShape,
        x: &Vec<f32>,
        add: Option<(&Vec<f32>, &mut Vec<f32>)>,
        params: &[f32],
        at: NormAt,
        y: &mut Vec<f32>,
        stats: &mut Vec<f32>,
    ) -> Result {
        let x: &[f32] = match add {
            None => x,
            Some((other, sum)) => {
                self.add(x, other, sum)?;
                sum
            }
        };
        let (gamma, beta) = params[at.gamma..][..2 * shape.cols].split_at(shape.cols);
        let stats = sized(stats, shape.rows * row_norm::STATS);
        row_norm::forward(&self.threads, shape, x, gamma, beta, sized(y, shape.rows * shape.cols), stats);
        Ok(())
    }

    fn norm_backward(
        &mut self,
        shape: NormShape,
        dy: &Vec<f32>,
        x: &Vec<f32>,
        stats: &Vec<f32>,
        params: &[f32],
        at: NormAt,
        add: Option<&Vec<f32>>,
        dx: &mut Vec<f32>,
        grads: &mut [f32],
    ) -> Result {
        let gamma = &params[at.gamma..][..shape.cols];
        let (dgamma, dbeta) = grads[at.gamma..][..2 * shape.cols].split_at_mut(shape.cols);
        let add = add.map_or(&[][..], |v| v);
        let dx = sized(dx, shape.rows * shape.cols);
        let sums = &mut self.norms;
        row_norm::backward(&self.threads, shape, dy, x, stats, gamma, add, dx, dgamma, dbeta, sums);
        Ok(())
    }
}

impl Attentions for CpuDevice {
    fn attention(
        &mut self,
        s: AttentionShape,
        qkv: &Vec<f32>,
        out: &mut Vec<f32>,
        stats: &mut Vec<f32>,
    ) -> Result {
        let (out, stats) = (sized(out, s.rows() * s.width()), sized(stats, s.rows() * s.heads));
        attention::forward(&self.threads, s, qkv, out, stats);
        Ok(())
    }

    fn attention_backward(
        &mut self,
        s: AttentionShape,
        qkv: &Vec<f32>,
        out: &Vec<f32>,
        stats: &Vec<f32>,
        dout: &Vec<f32>,
        dqkv: &mut Vec<f32>,
    ) -> Result {
        let dqkv = sized(dqkv, s.rows() * s.width() * 3);
        attention::backward(&self.threads, s, (qkv, out, stats), dout, dqkv);
        Ok(())
    }
}

impl Embeddings for CpuDevice {
    fn embedding(
        &mut self,
        s: EmbeddingShape,
        tokens: &Vec<u32>,
        params: &[f32],
        at: EmbeddingAt,
        y: &mut Vec<f32>,
    ) -> Result {
        let (table, positions) = (&params[at.tokens..], &params[at.positions..]);
        embedding::forward(s, tokens, table, positions, sized(y, s.batch * s.time * s.cols));
        Ok(())
    }

    fn embedding_backward(
        &mut self,
        s: EmbeddingShape,
        tokens: &Vec<u32>,
        dy: &Vec<f32>,
        at: EmbeddingAt,
        grads: &mut [f32],
    ) -> Result {
        embedding::backward_tokens(s, tokens, dy, &mut grads[at.tokens..][..s.vocab * s.cols]);
        embedding::backward_positions(s, dy, &mut grads[at.positions..][..s.context * s.cols]);
        Ok(())
    }
}
