//! A small convolutional net for square grey images: the second layer stack of many MNIST tutorials.
//!
//! ```text
//!  1 x S x S --conv 5x5--> 16 x S x S --norm, relu, pool--> 16 x S/2 x S/2
//!            --conv 5x5--> 32 x S/2 x S/2 --norm, relu, pool--> 32 x S/4 x S/4 --linear--> classes
//! ```
//!
//! Names are numbered as in PyTorch's `nn.Sequential(Unflatten, Conv2d, BatchNorm2d, ReLU, MaxPool2d, Conv2d,
//! BatchNorm2d, ReLU, MaxPool2d, Flatten, Linear)`; `num_batches_tracked` is left out.
//!
//! The running statistics are buffers. Their "gradient" is `momentum * (running - batch)`, so that subtracting it
//! is PyTorch's update, and averaging it over workers averages the workers' statistics.

use crate::batch::{InputSpec, Sample};
use crate::init::Init;
use crate::net::{Flat, Layer, Net, NetResult};
use crate::{Batch, Evaluation, ModelError};
use paraft_common::layout::TensorSpec;
use paraft_compute::{
    Device,
    shape::{ConvBlockAt, ConvBlockShape, ConvShape, LinearAt, LinearShape},
};

const KERNEL: usize = 5;
const PAD: usize = 2;
const CHANNELS: [usize; 2] = [16, 32];
/// Smaller than for other models: a sample's planes take a hundred times the memory of its input.
const EVALUATION_CHUNK: usize = 128;

/// One convolution with its norm, ReLU and pooling: its place in the flat vector and its workspace.
struct Stage<D: Device> {
    shape: ConvShape,
    at: ConvBlockAt,
    block: D::ConvBlock,
}

impl<D: Device> Stage<D> {
    fn conv(inputs: usize, outputs: usize) -> ConvShape {
        ConvShape { inputs, outputs, kernel: KERNEL, pad: PAD }
    }

    /// Number of values of weight, bias, gamma and beta.
    fn params_len(shape: ConvShape) -> usize {
        shape.weight_len() + 3 * shape.outputs
    }

    /// The place of gamma.
    fn norm(&self) -> usize {
        self.at.params + self.shape.weight_len() + self.shape.outputs
    }

    /// The parameters, given the names of the convolution and of the norm.
    fn params(&self, conv: &str, norm: &str) -> Vec<TensorSpec> {
        let s = self.shape;
        vec![
            TensorSpec::param(format!("{conv}.weight"), &[s.outputs, s.inputs, KERNEL, KERNEL]),
            TensorSpec::param(format!("{conv}.bias"), &[s.outputs]),
            TensorSpec::param(format!("{norm}.weight"), &[s.outputs]),
            TensorSpec::param(format!("{norm}.bias"), &[s.outputs]),
        ]
    }

    /// Draws the initial weights and sets the statistics to mean 0 and variance 1.
    fn init(&self, init: &mut Init, params: &mut [f32]) {
        let (fan_in, c) = (self.shape.inputs * KERNEL * KERNEL, self.shape.outputs);
        let (weight, rest) = params[self.at.params..].split_at_mut(self.shape.weight_len());
        init.uniform(fan_in, weight);
        init.uniform(fan_in, &mut rest[..c]);
        rest[c..2 * c].fill(1.0);
        rest[2 * c..3 * c].fill(0.0);
        params[self.at.buffers..][..c].fill(0.0);
        params[self.at.buffers + c..][..c].fill(1.0);
    }
}

/// The net and its workspaces.
pub struct ConvNet<D: Device> {
    side: usize,
    classes: usize,
    len: usize,
    input: D::Images,
    labels: D::Ids,
    first: Stage<D>,
    second: Stage<D>,
    features: usize,
    head: LinearAt,
    /// `[n, classes]`; after the loss, its gradient.
    logits: D::Values,
}

impl<D: Device> ConvNet<D> {
    /// For images of `input_len` values, the square of a side that is divisible by 4. `device` is where it will
    /// compute.
    pub fn new(device: &D, input_len: usize, classes: usize) -> Result<Self, ModelError> {
        let side = input_len.isqrt();
        if side * side != input_len || side == 0 || !side.is_multiple_of(4) {
            return Err(ModelError::new(format!(
                "convnet needs square one-channel images with a side divisible by 4, the data's samples have \
                 {input_len} values{}",
                if side * side == input_len { format!(" (side {side})") } else { String::new() }
            )));
        }
        if classes == 0 {
            return Err(ModelError::new("convnet needs at least one class"));
        }
        let (one, two) = (Stage::<D>::conv(1, CHANNELS[0]), Stage::<D>::conv(CHANNELS[0], CHANNELS[1]));
        let features = CHANNELS[1] * (side / 4) * (side / 4);

        // The parameters of both stages and the head, then the buffers of both stages, as in `tensors`.
        let weight = Stage::<D>::params_len(one) + Stage::<D>::params_len(two);
        let bias = weight + features * classes;
        let buffers = bias + classes;
        let stage = |shape, side, border, input_gradient, params, buffers| {
            let at = ConvBlockAt { params, buffers };
            let block = ConvBlockShape { conv: shape, height: side, width: side, border, input_gradient };
            Stage { shape, at, block: device.conv_block(block, at) }
        };
        let first = stage(one, side, PAD, false, 0, buffers);
        let second = stage(two, side / 2, 0, true, Stage::<D>::params_len(one), buffers + 2 * CHANNELS[0]);
        Ok(Self {
            side,
            classes,
            len: buffers + 2 * (CHANNELS[0] + CHANNELS[1]),
            input: device.images(1, side, side, PAD),
            labels: Default::default(),
            first,
            second,
            features,
            head: LinearAt { weight, bias: Some(bias) },
            logits: Default::default(),
        })
    }

    fn head_shape(&self, n: usize) -> LinearShape {
        LinearShape { n, inputs: self.features, outputs: self.classes }
    }

    /// Computes the logits of the loaded batch. `train`: the norms use the batch's statistics.
    fn forward(&mut self, device: &mut D, params: &D::Params, n: usize, train: bool) -> NetResult {
        device.conv_block_forward(&mut self.first.block, &self.input, n, params, train)?;
        let x = D::conv_block_output(&self.first.block);
        device.conv_block_forward(&mut self.second.block, x, n, params, train)?;
        let shape = self.head_shape(n);
        device.image_linear(shape, &self.second.block, params, self.head, &mut self.logits)
    }
}

impl<D: Device> Net<D> for ConvNet<D>
where
    Self: Send,
{
    fn tensors(&self) -> Vec<TensorSpec> {
        let mut all = [self.first.params("1", "2"), self.second.params("5", "6")].concat();
        all.push(TensorSpec::param("10.weight", &[self.classes, self.features]));
        all.push(TensorSpec::param("10.bias", &[self.classes]));
        for (name, channels) in ["2", "6"].into_iter().zip(CHANNELS) {
            all.push(TensorSpec::buffer(format!("{name}.running_mean"), &[channels]));
            all.push(TensorSpec::buffer(format!("{name}.running_var"), &[channels]));
        }
        all
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        let mut init = Init::new(seed);
        self.first.init(&mut init, params);
        self.second.init(&mut init, params);
        let (weight, bias) = (self.head.weight, self.head.weight + self.features * self.classes);
        init.uniform(self.features, &mut params[weight..bias]);
        init.uniform(self.features, &mut params[bias..bias + self.classes]);
    }

    fn takes(&self) -> InputSpec {
        let sample = Sample::Values(self.side * self.side);
        InputSpec { len: self.len, sample, classes: Some(self.classes), targets: false }
    }

    /// One layer: the images are large, the parameters few.
    fn layers(&self) -> Vec<Layer> {
        vec![Layer::of(0..self.len, 1.0, 0)]
    }

    fn load(&mut self, device: &mut D, _slot: usize, batch: &Batch) -> NetResult {
        device.load_images(&batch.inputs, batch.n, &mut self.input)?;
        device.load_ids(&batch.labels, &mut self.labels)
    }

    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        self.forward(device, flat.params(0)?, n, true)?;
        let (params, grads) = flat.layer(0)?;
        let (first, second) = (&mut self.first.block, &mut self.second.block);
        device.conv_block_buffers(first, params, grads)?;
        device.conv_block_buffers(second, params, grads)?;

        let shape = LinearShape { n, inputs: self.features, outputs: self.classes };
        device.softmax_cross_entropy(n, self.classes, &mut self.logits, &self.labels)?;
        device.image_linear_backward_weight(shape, second, &self.logits, self.head, grads)?;
        flat.ready(self.head.weight)?;

        let (params, grads) = flat.layer(0)?;
        device.image_linear_backward_input(shape, &self.logits, params, self.head, second)?;
        device.conv_block_backward_norm(second, n, params, grads)?;
        flat.ready(self.second.norm())?;
        let (params, grads) = flat.layer(0)?;
        let second = &mut self.second.block;
        device.conv_block_backward_weight(second, D::conv_block_output(first), n, params, grads)?;
        flat.ready(self.second.at.params)?;

        let (params, grads) = flat.layer(0)?;
        device.conv_block_backward_input(&mut self.second.block, n, params, first)?;
        device.conv_block_backward_norm(first, n, params, grads)?;
        flat.ready(self.first.norm())?;
        let (params, grads) = flat.layer(0)?;
        device.conv_block_backward_weight(&mut self.first.block, &self.input, n, params, grads)?;
        flat.ready(self.first.at.params)
    }

    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        for part in batch.parts(EVALUATION_CHUNK) {
            self.load(device, 0, &part)?;
            self.forward(device, params, part.n, false)?;
            device.cross_entropy_sum(part.n, self.classes, &self.logits, &self.labels)?;
        }
        self.evaluated(device, batch.n)
    }
}
