//! The interface of a built-in model: arithmetic over a [`Device`], written once for all devices; and [`OnCpu`],
//! which turns a net into a [`Model`].

use crate::{
    Batch, Evaluation, Model, ModelError,
    batch::{EVALUATION_CHUNK, InputSpec},
    slice::{NetSlice, Slice, SliceRanks, Sliced},
};
use paraft_common::layout::TensorSpec;
use paraft_compute::{CpuDevice, Device, DeviceError, collective::RankSums, device::Buffers};
use std::{ops::Range, sync::Arc};

/// The result of a net's work on its device.
pub type NetResult<T = ()> = Result<T, DeviceError>;

/// Reports that the flat gradient from an offset on is complete, or will be when pending work is done.
pub type Ready<'a, D> = dyn FnMut(usize, &<D as Buffers>::Grads) -> NetResult + 'a;

/// A part of a model that is computed as one unit, with its parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layer {
    /// Their ranges in the flat vector, in rising order. Shared parameters appear in each layer.
    pub params: Vec<Range<usize>>,
    /// Cost of a sample's forward pass: floating-point operations, or any unit that is proportional for all layers.
    pub cost: f64,
    /// Output values per sample.
    pub outputs: usize,
    /// Values per sample that it keeps between forward and backward pass.
    pub keeps: usize,
    /// Additional values per sample that a rank's layers use one after another.
    pub works: usize,
    /// Values per sample that a tensor slice sends to each other slice, forward and backward; 0 for a whole layer.
    pub sums: usize,
}

impl Layer {
    /// A layer with parameters in one range, which keeps its output.
    pub fn of(params: Range<usize>, cost: f64, outputs: usize) -> Self {
        Self { params: std::iter::once(params).collect(), cost, outputs, keeps: outputs, works: 0, sums: 0 }
    }
}

/// The result of a forward pass.
#[derive(Clone, Debug, PartialEq)]
pub enum Forward {
    /// The last layer's output: `[n, outputs]`.
    Edge(Vec<f32>),
    /// The mean loss over the samples.
    Loss(f32),
    /// The result of an evaluation.
    Evaluated(Evaluation),
}

/// A forward or backward pass of some samples through some layers. A slot keeps the forward pass's activations for
/// the backward pass; a model has as many slots as passes name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Indices into [`Model::layers`].
    pub layers: Range<usize>,
    /// The slot of these samples until their backward pass.
    pub slot: usize,
    /// Samples.
    pub n: usize,
    /// No backward pass follows: losses are summed as in an evaluation.
    pub evaluates: bool,
}

/// The flat parameters, for a net that visits its layers.
pub trait Weights<D: Buffers> {
    /// The vector, with the parameters of this layer ([`Net::layers`]) present.
    ///
    /// # Errors
    /// They cannot be loaded.
    fn params(&mut self, layer: usize) -> NetResult<&D::Params>;

    /// Loads them and returns their version: equal, rising numbers mean equal parameters. 0: they may differ each
    /// time.
    ///
    /// # Errors
    /// They cannot be loaded.
    fn edition(&mut self, _layer: usize) -> NetResult<u64> {
        Ok(0)
    }
}

/// A step's parameters and gradient.
pub trait Flat<D: Buffers>: Weights<D> {
    /// Like [`Weights::params`], with the flat gradient.
    ///
    /// # Errors
    /// The parameters cannot be loaded.
    fn layer(&mut self, layer: usize) -> NetResult<(&D::Params, &mut D::Grads)>;

    /// The gradient from this offset on is complete, or will be when pending work is done. Offsets fall; the last
    /// one is 0.
    ///
    /// # Errors
    /// It cannot be passed on.
    fn ready(&mut self, offset: usize) -> NetResult;
}

/// Parameters that are all present.
pub(crate) struct WholeParams<'a, D: Buffers>(pub &'a D::Params);

impl<D: Buffers> Weights<D> for WholeParams<'_, D> {
    fn params(&mut self, _: usize) -> NetResult<&D::Params> {
        Ok(self.0)
    }
}

/// Complete parameters and gradient.
pub(crate) struct WholeVectors<'a, 'r, D: Buffers> {
    pub params: &'a D::Params,
    pub grads: &'a mut D::Grads,
    pub ready: &'a mut Ready<'r, D>,
}

impl<D: Buffers> Weights<D> for WholeVectors<'_, '_, D> {
    fn params(&mut self, _: usize) -> NetResult<&D::Params> {
        Ok(self.params)
    }
}

impl<D: Buffers> Flat<D> for WholeVectors<'_, '_, D> {
    fn layer(&mut self, _: usize) -> NetResult<(&D::Params, &mut D::Grads)> {
        Ok((self.params, self.grads))
    }

    fn ready(&mut self, offset: usize) -> NetResult {
        (self.ready)(offset, self.grads)
    }
}

/// A model's arithmetic on a device. The flat vectors are those of [`Model`]; batches must match [`Net::takes`].
pub trait Net<D: Device>: Send {
    /// See [`Model::tensors`].
    fn tensors(&self) -> Vec<TensorSpec>;
    /// See [`Model::init`].
    fn init(&self, seed: u64, params: &mut [f32]);
    /// The requirements on batches.
    fn takes(&self) -> InputSpec;
    /// The layers, in forward order.
    fn layers(&self) -> Vec<Layer>;
    /// Copies a training batch to the device.
    fn load(&mut self, device: &mut D, slot: usize, batch: &Batch) -> NetResult;
    /// See [`Model::step`], for the `n` loaded samples; the loss is read from the device. It must start the same
    /// work for every batch of a size: a CUDA graph records that work and replays it without this call.
    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult;
    /// The mean loss of the last step; waits for it.
    fn loss(&mut self, device: &mut D) -> NetResult<f32> {
        device.loss()
    }
    /// See [`Model::evaluate`]; by passes through all layers, unless a net has a shorter way.
    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        let layers = self.layers().len();
        for part in batch.parts(EVALUATION_CHUNK) {
            self.load(device, 0, &part)?;
            let pass = Pass { layers: 0..layers, slot: 0, n: part.n, evaluates: true };
            self.forward_pass(device, &mut WholeParams::<D>(params), &pass, None)?;
        }
        self.evaluated(device, batch.n)
    }
    /// The sums of the evaluation of this many samples.
    fn evaluated(&mut self, device: &mut D, n: usize) -> NetResult<Evaluation> {
        let sums = device.sums()?;
        Ok(Evaluation { loss_sum: sums.loss, correct: sums.correct, count: n as u64 })
    }
    /// One tensor slice of the net, with its own flat vectors, and the places of its values in this net's. Its
    /// [`Net::tensors`] are those of the whole net.
    fn slice(&self, _slice: Slice, _ranks: Arc<dyn SliceRanks>) -> Result<NetSlice<D>, ModelError> {
        Err(not_in_slices())
    }
    /// The forward pass of some layers: from the previous layer's output, or the loaded batch, to the next layer's
    /// input, or the loss.
    fn forward_pass(
        &mut self,
        _device: &mut D,
        _weights: &mut dyn Weights<D>,
        _pass: &Pass,
        _input: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        Err(whole_only())
    }
    /// The backward pass of some layers: from the gradient of their output, or the loss, to the gradient of their
    /// input. The gradient of parameters shared with layers outside the pass must be zero before.
    fn backward_pass(
        &mut self,
        _device: &mut D,
        _flat: &mut dyn Flat<D>,
        _pass: &Pass,
        _gradient: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        Err(whole_only())
    }
}

pub(crate) fn not_in_slices() -> ModelError {
    ModelError::new(
        "this model can't be cut in tensor slices; transformer can, and with classes mlp and logistic-regression",
    )
}

fn whole_only() -> DeviceError {
    DeviceError::Unsupported("this model is computed as a whole".into())
}

/// A net on the CPU.
pub struct OnCpu {
    net: Box<dyn Net<CpuDevice>>,
    device: CpuDevice,
}

impl OnCpu {
    /// Uses the machine's best instruction set.
    pub fn new(net: impl Net<CpuDevice> + 'static) -> Self {
        Self::on(Box::new(net), CpuDevice::default())
    }

    /// On a given device.
    pub fn on(net: Box<dyn Net<CpuDevice>>, device: CpuDevice) -> Self {
        Self { net, device }
    }
}

impl Model for OnCpu {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.net.tensors()
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.net.init(seed, params);
    }

    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.net.takes().check_step(params, grads, batch)?;
        let mut ready = |offset: usize, grads: &[f32]| {
            ready(offset, grads);
            Ok(())
        };
        self.net.load(&mut self.device, 0, batch)?;
        self.net.step(&mut self.device, &mut WholeVectors { params, grads, ready: &mut ready }, batch.n)?;
        Ok(self.net.loss(&mut self.device)?)
    }

    fn layers(&self) -> Vec<Layer> {
        self.net.layers()
    }

    fn step_by_layers(&mut self, flat: &mut dyn Flat<CpuDevice>, batch: &Batch) -> Result<f32, ModelError> {
        self.net.takes().check_step_batch(batch)?;
        self.net.load(&mut self.device, 0, batch)?;
        self.net.step(&mut self.device, flat, batch.n)?;
        Ok(self.net.loss(&mut self.device)?)
    }

    fn forward_pass(
        &mut self,
        weights: &mut dyn Weights<CpuDevice>,
        pass: &Pass,
        batch: &Batch,
        input: Option<&[f32]>,
    ) -> Result<Forward, ModelError> {
        forward_pass(&mut *self.net, &mut self.device, weights, pass, (batch, input))
    }

    fn backward_pass(
        &mut self,
        flat: &mut dyn Flat<CpuDevice>,
        pass: &Pass,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        check_edge(gradient, &self.net.layers(), pass.layers.end, pass.n)?;
        Ok(self.net.backward_pass(&mut self.device, flat, pass, gradient)?)
    }

    fn slice(&self, slice: Slice, ranks: Arc<dyn SliceRanks>) -> Result<Sliced, ModelError> {
        let (net, runs) = self.net.slice(slice, ranks)?;
        let (len, device) = (net.takes().len, self.device.another());
        Ok(Sliced { model: Box::new(OnCpu::on(net, device)), len, runs })
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.net.takes().check(params, batch)?;
        Ok(self.net.evaluate(&mut self.device, params, batch)?)
    }

    fn share_statistics(&mut self, ranks: Option<Arc<dyn RankSums>>) {
        self.device.join(ranks);
    }
}

/// [`Model::forward_pass`] of a net on its device.
pub(crate) fn forward_pass<D: Device>(
    net: &mut dyn Net<D>,
    device: &mut D,
    weights: &mut dyn Weights<D>,
    pass: &Pass,
    (batch, input): (&Batch, Option<&[f32]>),
) -> Result<Forward, ModelError> {
    let layers = net.layers();
    check_edge(input, &layers, pass.layers.start, pass.n)?;
    if pass.layers.start == 0 || pass.layers.end == layers.len() {
        net.takes().check_step_batch(batch)?;
        net.load(device, pass.slot, batch)?;
    }
    Ok(match net.forward_pass(device, weights, pass, input)? {
        Some(edge) => Forward::Edge(edge),
        None if pass.evaluates => Forward::Evaluated(net.evaluated(device, pass.n)?),
        None => Forward::Loss(net.loss(device)?),
    })
}

/// Checks the number of values between two layers, which may come from another process.
pub(crate) fn check_edge(
    values: Option<&[f32]>,
    layers: &[Layer],
    layer: usize,
    n: usize,
) -> Result<(), ModelError> {
    let inner = layer > 0 && layer < layers.len();
    let want = inner.then(|| layers[layer - 1].outputs * n);
    match values.map(<[f32]>::len) == want {
        true => Ok(()),
        false => Err(ModelError::new(format!(
            "{:?} values between layers {} and {layer} for {n} samples, where there are {want:?}",
            values.map(<[f32]>::len),
            layer.saturating_sub(1)
        ))),
    }
}
