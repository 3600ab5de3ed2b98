//! A small convolutional net for square grey images: the second layer stack of many MNIST tutorials.
//!
//! ```text
//!  1 x S x S --conv 5x5--> 16 x S x S --norm, relu, pool--> 16 x S/2 x S/2
//!            --conv 5x5--> 32 x S/2 x S/2 --norm, relu, pool--> 32 x S/4 x S/4 --linear--> classes
//! ```
//!
//! Names count as in PyTorch's `nn.Sequential(Unflatten, Conv2d, BatchNorm2d, ReLU, MaxPool2d, Conv2d,
//! BatchNorm2d, ReLU, MaxPool2d, Flatten, Linear)`; `num_batches_tracked` is left out.
//!
//! The running statistics are buffers. Their "gradient" is `momentum * (running - batch)`, so that subtracting
//! it is PyTorch's update, and averaging it over workers averages the workers' statistics.

mod stage;

use crate::batch::Takes;
use crate::init::Init;
use crate::{Batch, Evaluation, Model, ModelError};
use paraft_common::layout::{TensorKind, TensorSpec};
use paraft_compute::blocked::{Geometry, Planes, blocks};
use paraft_compute::conv::{ConvShape, ConvWeights, forward_block};
use paraft_compute::{Cpu, Lane, head, loss};
use stage::Stage;
use std::ops::Range;

const KERNEL: usize = 5;
const PAD: usize = 2;
const CHANNELS: [usize; 2] = [16, 32];
/// Smaller than for other models: a sample's planes take a hundred times its input.
const EVALUATION_CHUNK: usize = 128;

/// The net and its workspaces.
#[derive(Debug)]
pub struct ConvNet {
    cpu: Cpu,
    takes: Takes,
    classes: usize,
    input: Planes,
    first: Stage,
    second: Stage,
    /// From the second convolution's output to its input.
    back: ConvWeights,
    weight: Range<usize>,
    bias: Range<usize>,
    /// `[block][class]` vectors, and the same as `[n, classes]`, with the gradient.
    outputs: Vec<Lane>,
    logits: Vec<f32>,
    dlogits: Vec<f32>,
}

impl ConvNet {
    /// For images of `input_len` values, the square of a side that is divisible by 4.
    pub fn new(input_len: usize, classes: usize) -> Result<Self, ModelError> {
        Self::on(Cpu::detect(), input_len, classes)
    }

    /// The same with certain instructions; for comparisons.
    pub fn on(cpu: Cpu, input_len: usize, classes: usize) -> Result<Self, ModelError> {
        let side = input_len.isqrt();
        if side * side != input_len || side == 0 || !side.is_multiple_of(4) {
            return Err(ModelError(format!(
                "convnet needs square one-channel images with a side divisible by 4, the data's samples have \
                 {input_len} values{}",
                if side * side == input_len { format!(" (side {side})") } else { String::new() }
            )));
        }
        if classes == 0 {
            return Err(ModelError::new("convnet needs at least one class"));
        }
        let shape = |inputs, outputs| ConvShape { inputs, outputs, kernel: KERNEL, pad: PAD };
        let (one, two) = (shape(1, CHANNELS[0]), shape(CHANNELS[0], CHANNELS[1]));
        let features = CHANNELS[1] * (side / 4) * (side / 4);

        // Parameters of both stages, the head, then the buffers of both stages: `tensors` has the same order.
        let head = Stage::params_len(one) + Stage::params_len(two);
        let weight = head..head + features * classes;
        let bias = weight.end..weight.end + classes;
        let buffers = bias.end;
        let len = buffers + 2 * (CHANNELS[0] + CHANNELS[1]);
        // The second stage's output has a border, since its gradient is convolved; the first one's has none.
        let input = Geometry::new(1, side, side, PAD);
        let first = Stage::new(one, side, 0, PAD, 0, buffers);
        let second = Stage::new(two, side / 2, PAD, 0, Stage::params_len(one), buffers + 2 * CHANNELS[0]);
        Ok(Self {
            cpu,
            takes: Takes { len, inputs: input_len, classes: Some(classes) },
            classes,
            input: Planes::new(input),
            first,
            second,
            back: ConvWeights::new(two.transposed()),
            weight,
            bias,
            outputs: Vec::new(),
            logits: Vec::new(),
            dlogits: Vec::new(),
        })
    }

    fn reserve(&mut self, n: usize) {
        self.input.reserve(n);
        self.first.reserve(n);
        self.second.reserve(n);
        self.outputs.resize(blocks(n) * self.classes, Lane::ZERO);
        self.logits.resize(n * self.classes, 0.0);
        self.dlogits.resize(n * self.classes, 0.0);
    }

    /// Logits of `n` samples into `self.logits`. `train` says whose statistics the norms use.
    fn forward(&mut self, params: &[f32], inputs: &[f32], n: usize, train: bool) {
        self.reserve(n);
        let cpu = self.cpu;
        self.first.load(params);
        self.second.load(params);
        // Block by block, as far as the norms allow: a block's planes are still in the cache when the next
        // operator reads them.
        for b in 0..blocks(n) {
            self.input.pack_block(b, inputs, n);
            self.first.convolve(cpu, &self.input, (b, n), train);
        }
        self.first.set_norms(params, train);
        for b in 0..blocks(n) {
            self.first.pool(cpu, (b, n));
            self.second.convolve(cpu, &self.first.pooled, (b, n), train);
        }
        self.second.set_norms(params, train);
        let (weight, bias) = (&params[self.weight.clone()], &params[self.bias.clone()]);
        for (b, y) in self.outputs.chunks_exact_mut(self.classes).enumerate() {
            self.second.pool(cpu, (b, n));
            head::forward_block(cpu, &self.second.pooled, b, weight, bias, y);
        }
        head::unpack(&self.outputs, self.classes, &mut self.logits);
    }
}

impl Model for ConvNet {
    fn tensors(&self) -> Vec<TensorSpec> {
        let mut all = [self.first.params("1", "2"), self.second.params("5", "6")].concat();
        let features = self.weight.len() / self.classes;
        all.push(TensorSpec::param("10.weight", &[self.classes, features]));
        all.push(TensorSpec::param("10.bias", &[self.classes]));
        for (name, channels) in ["2", "6"].into_iter().zip(CHANNELS) {
            all.push(TensorSpec::buffer(format!("{name}.running_mean"), &[channels]));
            all.push(TensorSpec::buffer(format!("{name}.running_var"), &[channels]));
        }
        debug_assert!(all.iter().rev().take(4).all(|t| t.kind == TensorKind::Buffer));
        all
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        let mut init = Init::new(seed);
        self.first.init(&mut init, params);
        self.second.init(&mut init, params);
        let features = self.weight.len() / self.classes;
        init.uniform(features, &mut params[self.weight.clone()]);
        init.uniform(features, &mut params[self.bias.clone()]);
    }

    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.takes.check_step(params, grads, batch)?;
        let (cpu, n) = (self.cpu, batch.n);
        self.forward(params, &batch.inputs, n, true);
        self.first.write_buffers(params, grads);
        self.second.write_buffers(params, grads);

        let loss = loss::softmax_cross_entropy(&self.logits, &batch.labels, self.classes, &mut self.dlogits);
        head::pack(&self.dlogits, self.classes, &mut self.outputs);
        let (dweight, dbias) = grads[self.weight.start..self.bias.end].split_at_mut(self.weight.len());
        head::backward_weight(cpu, n, &self.second.pooled, &self.outputs, dweight, dbias);
        ready(self.weight.start, grads);

        let weight = &params[self.weight.clone()];
        for (b, dy) in self.outputs.chunks_exact(self.classes).enumerate() {
            head::backward_block(cpu, dy, weight, &mut self.second.dpooled, b);
            self.second.reduce(cpu, (b, n));
        }
        ready(self.second.write_norm(grads), grads);
        for b in 0..blocks(n) {
            self.second.differentiate(cpu, &self.first.pooled, (b, n));
        }
        ready(self.second.write_conv(cpu, grads), grads);

        self.back.set_transposed(self.second.weight(params));
        for b in 0..blocks(n) {
            forward_block(cpu, &self.back, &self.second.y, &mut self.first.dpooled, (b, n));
            self.first.reduce(cpu, (b, n));
        }
        ready(self.first.write_norm(grads), grads);
        for b in 0..blocks(n) {
            self.first.differentiate(cpu, &self.input, (b, n));
        }
        ready(self.first.write_conv(cpu, grads), grads);
        Ok(loss)
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.takes.check(params, batch)?;
        let mut total = Evaluation { count: batch.n as u64, ..Evaluation::default() };
        let parts = batch.inputs.chunks(EVALUATION_CHUNK * self.takes.inputs);
        for (inputs, labels) in parts.zip(batch.labels.chunks(EVALUATION_CHUNK)) {
            self.forward(params, inputs, labels.len(), false);
            let (loss, correct) = loss::cross_entropy_sum(&self.logits, labels, self.classes);
            total.loss_sum += loss;
            total.correct += correct;
        }
        Ok(total)
    }
}
