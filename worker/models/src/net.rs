//! What a built-in model is: arithmetic over a [`Device`], written once for all of them; and [`OnCpu`], which makes a
//! [`Model`] of it.

use crate::{Batch, Evaluation, Model, ModelError, batch::Takes};
use paraft_common::layout::TensorSpec;
use paraft_compute::{
    CpuDevice, Device, DeviceError,
    collective::RankSums,
    device::{Buffers, Losses},
};
use std::{ops::Range, sync::Arc};

/// Of a net's work on its device.
pub type NetResult<T = ()> = Result<T, DeviceError>;

/// Says that the flat gradient from an offset on is (or, once what was begun is done, will be) complete.
pub type Ready<'a, D> = dyn FnMut(usize, &<D as Buffers>::Grads) -> NetResult + 'a;

/// A part of a model that is computed at once, with the parameters that it needs there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layer {
    /// Where they are in the flat vector, in rising order. What layers share is in each of them.
    pub params: Vec<Range<usize>>,
}

impl Layer {
    /// Of one range.
    pub fn of(params: Range<usize>) -> Self {
        Self { params: std::iter::once(params).collect() }
    }
}

/// The flat parameters, as a net goes through its layers.
pub trait Weights<D: Buffers> {
    /// The vector, in which the parameters of this layer ([`Net::layers`]) are there.
    ///
    /// # Errors
    /// They can't be brought.
    fn params(&mut self, layer: usize) -> NetResult<&D::Params>;
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
pub(crate) struct There<'a, D: Buffers>(pub &'a D::Params);

impl<D: Buffers> Weights<D> for There<'_, D> {
    fn params(&mut self, _: usize) -> NetResult<&D::Params> {
        Ok(self.0)
    }
}

/// Both vectors whole.
pub(crate) struct Whole<'a, 'r, D: Buffers> {
    pub params: &'a D::Params,
    pub grads: &'a mut D::Grads,
    pub ready: &'a mut Ready<'r, D>,
}

impl<D: Buffers> Weights<D> for Whole<'_, '_, D> {
    fn params(&mut self, _: usize) -> NetResult<&D::Params> {
        Ok(self.params)
    }
}

impl<D: Buffers> Flat<D> for Whole<'_, '_, D> {
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
    fn takes(&self) -> Takes;
    /// What is computed at once, in the order of the forward pass.
    fn layers(&self) -> Vec<Layer>;
    /// Brings a training batch to the device.
    fn load(&mut self, device: &mut D, batch: &Batch) -> NetResult;
    /// See [`Model::step`], for the `n` samples that were loaded; the loss is read from the device. It begins the same work for
    /// every batch of a size: it is written down, and begun again without this being called.
    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult;
    /// See [`Model::evaluate`].
    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation>;
}

impl<D: Device, N: Net<D> + ?Sized> Net<D> for Box<N> {
    fn tensors(&self) -> Vec<TensorSpec> {
        (**self).tensors()
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        (**self).init(seed, params);
    }

    fn takes(&self) -> Takes {
        (**self).takes()
    }

    fn layers(&self) -> Vec<Layer> {
        (**self).layers()
    }

    fn load(&mut self, device: &mut D, batch: &Batch) -> NetResult {
        (**self).load(device, batch)
    }

    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        (**self).step(device, flat, n)
    }

    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        (**self).evaluate(device, params, batch)
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
        self.net.load(&mut self.device, batch)?;
        self.net.step(&mut self.device, &mut Whole { params, grads, ready: &mut ready }, batch.n)?;
        Ok(self.device.loss()?)
    }

    fn layers(&self) -> Vec<Layer> {
        self.net.layers()
    }

    fn step_by_layers(&mut self, flat: &mut dyn Flat<CpuDevice>, batch: &Batch) -> Result<f32, ModelError> {
        self.net.takes().check_step_batch(batch)?;
        self.net.load(&mut self.device, batch)?;
        self.net.step(&mut self.device, flat, batch.n)?;
        Ok(self.device.loss()?)
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.net.takes().check(params, batch)?;
        Ok(self.net.evaluate(&mut self.device, params, batch)?)
    }

    fn share_statistics(&mut self, ranks: Option<Arc<dyn RankSums>>) {
        self.device.join(ranks);
    }
}
