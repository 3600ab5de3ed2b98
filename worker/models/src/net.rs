//! What a built-in model is: arithmetic over a [`Device`], written once for all of them; and [`OnCpu`], which makes a
//! [`Model`] of it.

use crate::{
    Batch, Evaluation, Model, ModelError,
    batch::InputSpec,
    slice::{NetSlice, Slice, SliceRanks, Sliced},
};
use paraft_common::layout::TensorSpec;
use paraft_compute::{CpuDevice, Device, DeviceError, collective::RankSums, device::Buffers};
use std::{ops::Range, sync::Arc};

/// Of a net's work on its device.
pub type NetResult<T = ()> = Result<T, DeviceError>;

/// Says that the flat gradient from an offset on is (or, once what was begun is done, will be) complete.
pub type Ready<'a, D> = dyn FnMut(usize, &<D as Buffers>::Grads) -> NetResult + 'a;

/// A part of a model that is computed at once, with the parameters that it needs there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layer {
    /// Where they are in the flat vector, in rising order. What layers share is in each of them.
    pub params: Vec<Range<usize>>,
    /// What its forward pass of one sample takes, in floating-point operations or anything that is as much for the others.
    pub cost: f64,
    /// Values that it gives to the next layer, of one sample.
    pub outputs: usize,
    /// Values that it keeps of one sample between its forward and its backward pass.
    pub keeps: usize,
    /// Values beside, of one sample, that layers of a rank use one after the other.
    pub works: usize,
    /// Values that a tensor slice of it gives each of the others, forward and back, of one sample; none of the layer as a whole.
    pub sums: usize,
}

impl Layer {
    /// With parameters in one range, keeping what it gives.
    pub fn of(params: Range<usize>, cost: f64, outputs: usize) -> Self {
        Self { params: std::iter::once(params).collect(), cost, outputs, keeps: outputs, works: 0, sums: 0 }
    }
}

/// What a forward pass ends with.
#[derive(Clone, Debug, PartialEq)]
pub enum Forward {
    /// What its last layer gives to the next one: `[n, outputs]`.
    Edge(Vec<f32>),
    /// The mean loss over the samples.
    Loss(f32),
    /// Of an evaluation.
    Evaluated(Evaluation),
}

/// A pass of some samples through some layers, forward or back. What the first leaves for the second lies in a slot, of which a model has
/// as many as are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Of [`Model::layers`].
    pub layers: Range<usize>,
    /// Of these samples, until they are back.
    pub slot: usize,
    /// Samples.
    pub n: usize,
    /// There is no way back: losses are added up as in an evaluation.
    pub evaluates: bool,
}

/// The flat parameters, as a net goes through its layers.
pub trait Weights<D: Buffers> {
    /// The vector, in which the parameters of this layer ([`Net::layers`]) are there.
    ///
    /// # Errors
    /// They can't be brought.
    fn params(&mut self, layer: usize) -> NetResult<&D::Params>;

    /// Has them there, and says which they are: with the same number, which rises, the same. 0: they may be others each time.
    ///
    /// # Errors
    /// They can't be brought.
    fn edition(&mut self, _layer: usize) -> NetResult<u64> {
        Ok(0)
    }
}

/// What a step reads and writes.
pub trait Flat<D: Buffers>: Weights<D> {
    /// As [`Weights::params`], with the flat gradient.
    ///
    /// # Errors
    /// The parameters can't be brought.
    fn layer(&mut self, layer: usize) -> NetResult<(&D::Params, &mut D::Grads)>;

    /// The gradient from this offset on is complete, or will be once what was begun is done. Offsets fall; the last one is 0.
    ///
    /// # Errors
    /// It can't be handed on.
    fn ready(&mut self, offset: usize) -> NetResult;
}

/// Parameters that are all there.
pub(crate) struct WholeParams<'a, D: Buffers>(pub &'a D::Params);

impl<D: Buffers> Weights<D> for WholeParams<'_, D> {
    fn params(&mut self, _: usize) -> NetResult<&D::Params> {
        Ok(self.0)
    }
}

/// Both vectors whole.
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

/// A model's arithmetic on a device. The flat vectors are those of [`Model`]; batches are as [`Net::takes`] wants them.
pub trait Net<D: Device>: Send {
    /// See [`Model::tensors`].
    fn tensors(&self) -> Vec<TensorSpec>;
    /// See [`Model::init`].
    fn init(&self, seed: u64, params: &mut [f32]);
    /// What batches must be like.
    fn takes(&self) -> InputSpec;
    /// What is computed at once, in the order of the forward pass.
    fn layers(&self) -> Vec<Layer>;
    /// Brings a training batch to the device.
    fn load(&mut self, device: &mut D, slot: usize, batch: &Batch) -> NetResult;
    /// See [`Model::step`], for the `n` samples that were loaded; the loss is read from the device. It begins the same work for
    /// every batch of a size: it is written down, and begun again without this being called.
    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult;
    /// The mean loss of the last step; waits for it.
    fn loss(&mut self, device: &mut D) -> NetResult<f32> {
        device.loss()
    }
    /// See [`Model::evaluate`].
    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation>;
    /// The sums of the evaluation of so many samples.
    fn evaluated(&mut self, device: &mut D, n: usize) -> NetResult<Evaluation>;
    /// One slice of it, over flat vectors of its own, and where their values are in this net's. Its [`Net::tensors`] are those of the whole.
    fn slice(&self, _slice: Slice, _ranks: Arc<dyn SliceRanks>) -> Result<NetSlice<D>, ModelError> {
        Err(not_in_slices())
    }
    /// Some layers' forward pass: from what the layer before has given, or from what was loaded, to what the next one takes, or to the
    /// loss.
    fn forward_pass(
        &mut self,
        _device: &mut D,
        _weights: &mut dyn Weights<D>,
        _pass: &Pass,
        _input: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        Err(whole_only())
    }
    /// Their backward pass: from the gradient of what they gave, or from the loss, to that of what they took. What a layer of the pass
    /// shares with one that isn't in it is zero in the gradient before.
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
    ModelError::new("this model can't be cut in tensor slices; transformer, mlp and logistic-regression can")
}

fn whole_only() -> DeviceError {
    DeviceError::Unsupported("this model is computed as a whole".into())
}

impl<D: Device, N: Net<D> + ?Sized> Net<D> for Box<N> {
    fn tensors(&self) -> Vec<TensorSpec> {
        (**self).tensors()
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        (**self).init(seed, params);
    }

    fn takes(&self) -> InputSpec {
        (**self).takes()
    }

    fn layers(&self) -> Vec<Layer> {
        (**self).layers()
    }

    fn load(&mut self, device: &mut D, slot: usize, batch: &Batch) -> NetResult {
        (**self).load(device, slot, batch)
    }

    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        (**self).step(device, flat, n)
    }

    fn loss(&mut self, device: &mut D) -> NetResult<f32> {
        (**self).loss(device)
    }

    fn slice(&self, slice: Slice, ranks: Arc<dyn SliceRanks>) -> Result<NetSlice<D>, ModelError> {
        (**self).slice(slice, ranks)
    }

    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        (**self).evaluate(device, params, batch)
    }

    fn evaluated(&mut self, device: &mut D, n: usize) -> NetResult<Evaluation> {
        (**self).evaluated(device, n)
    }

    fn forward_pass(
        &mut self,
        device: &mut D,
        weights: &mut dyn Weights<D>,
        pass: &Pass,
        input: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        (**self).forward_pass(device, weights, pass, input)
    }

    fn backward_pass(
        &mut self,
        device: &mut D,
        flat: &mut dyn Flat<D>,
        pass: &Pass,
        gradient: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        (**self).backward_pass(device, flat, pass, gradient)
    }
}

/// A net on the CPU.
#[derive(Debug)]
pub struct OnCpu<N> {
    net: N,
    device: CpuDevice,
}

impl<N> OnCpu<N> {
    /// On what the machine can do best.
    pub fn new(net: N) -> Self {
        Self::on(net, CpuDevice::default())
    }

    /// On a device in hand.
    pub fn on(net: N, device: CpuDevice) -> Self {
        Self { net, device }
    }
}

impl<N: Net<CpuDevice>> Model for OnCpu<N> {
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
        forward_pass(&mut self.net, &mut self.device, weights, pass, (batch, input))
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
pub(crate) fn forward_pass<D: Device, N: Net<D>>(
    net: &mut N,
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

/// Whether there are as many values as pass between the layers before and from `layer` on, which may come from another process.
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
