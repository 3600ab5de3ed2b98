//! A net on a GPU that holds some layers at a time. The worker keeps the parameters in host memory: some layers
//! (`memory.resident`), or those of its stages (`parallel`). Each layer is uploaded before its computation. Its
//! gradient is downloaded while the device computes the next layer.

use crate::{
    Batch, Evaluation, Flat, Forward, Layer, Model, ModelError, Pass, Slice, SliceRanks, Sliced, Weights,
    net::{Net, NetResult, check_edge, forward_pass},
};
use paraft_common::layout::TensorSpec;
use paraft_compute::{
    CpuDevice,
    cuda::{CudaDevice, CudaOptions, Gradient, Keep, Params, Precision, Shelf},
};
use std::{collections::VecDeque, sync::Arc};

/// See the module.
pub struct Layered {
    // Declared in drop order: the device last.
    net: Box<dyn Net<CudaDevice>>,
    shelf: Shelf,
    layers: Vec<Layer>,
    /// Samples of the largest pass of a training step.
    largest: usize,
    evaluations: u64,
    options: CudaOptions,
    keep: Keep,
    device: CudaDevice,
}

impl Layered {
    /// Opens the device; `build` creates its net. `keep`: how many of the layers' parameters stay there.
    pub fn new(
        options: CudaOptions,
        keep: impl FnOnce(&[Layer]) -> Keep,
        build: impl FnOnce(&CudaDevice) -> Result<Box<dyn Net<CudaDevice>>, ModelError>,
    ) -> Result<Self, ModelError> {
        if options.precision == Precision::F16 {
            return Err(ModelError::new(
                "train.precision = \"f16\": a gradient that leaves layer by layer can't be scaled and tried again; take bf16",
            ));
        }
        let device = CudaDevice::new(options)?;
        let net = build(&device)?;
        let keep = keep(&net.layers());
        Self::on(net, device, options, keep)
    }

    fn on(
        net: Box<dyn Net<CudaDevice>>,
        device: CudaDevice,
        options: CudaOptions,
        keep: Keep,
    ) -> Result<Self, ModelError> {
        let layers = net.layers();
        let params: Vec<_> = layers.iter().map(|l| l.params.clone()).collect();
        let shelf = Shelf::new(&device, &params, keep)?;
        Ok(Self { net, shelf, layers, largest: 1, evaluations: 0, options, keep, device })
    }

    /// Runs a step, or its backward pass, and downloads the whole gradient.
    fn with_gradient<T>(
        &mut self,
        flat: &mut dyn Flat<CpuDevice>,
        first: usize,
        compute: impl FnOnce(&mut dyn Net<CudaDevice>, &mut CudaDevice, &mut dyn Flat<CudaDevice>) -> NetResult<T>,
    ) -> NetResult<T> {
        let Self { net, shelf, device, layers, .. } = self;
        shelf.begin()?;
        let ready = layers.iter().flat_map(|l| &l.params).map(|p| p.end).max().unwrap_or_default();
        let mut back = BackwardBuffers { host: flat, shelf, waits: VecDeque::new(), ready, sent: 0, come: 0 };
        let made = compute(&mut **net, device, &mut back)?;
        back.end(first)?;
        Ok(made)
    }
}

/// Uploads parameters.
struct ForwardWeights<'a> {
    host: &'a mut dyn Weights<CpuDevice>,
    shelf: &'a mut Shelf,
}

impl Weights<CudaDevice> for ForwardWeights<'_> {
    fn params(&mut self, layer: usize) -> NetResult<&Params> {
        bring(self.host, self.shelf, layer)
    }
}

fn bring<'s, W: Weights<CpuDevice> + ?Sized>(
    host: &mut W,
    shelf: &'s mut Shelf,
    layer: usize,
) -> NetResult<&'s Params> {
    let edition = host.edition(layer)?;
    let weights = if shelf.has(layer, edition) { None } else { Some(host.params(layer)?) };
    shelf.bring(layer, edition, weights)
}

/// Uploads parameters and downloads the gradient.
struct BackwardBuffers<'a> {
    host: &'a mut dyn Flat<CpuDevice>,
    shelf: &'a mut Shelf,
    /// Number of parts after whose arrival the host's gradient is complete from this offset on.
    waits: VecDeque<(usize, usize)>,
    /// The last such offset.
    ready: usize,
    /// Parts sent, and parts received.
    sent: usize,
    come: usize,
}

impl Weights<CudaDevice> for BackwardBuffers<'_> {
    fn params(&mut self, layer: usize) -> NetResult<&Params> {
        bring(&mut *self.host, self.shelf, layer)
    }
}

impl Flat<CudaDevice> for BackwardBuffers<'_> {
    fn layer(&mut self, layer: usize) -> NetResult<(&Params, &mut Gradient)> {
        bring(&mut *self.host, self.shelf, layer)?;
        self.take(layer, false)?;
        self.shelf.with_gradient(layer)
    }

    fn ready(&mut self, offset: usize) -> NetResult {
        self.sent += self.shelf.send(offset)?;
        // A part across the offset is incomplete.
        let from = self.shelf.complete_from(offset);
        if from < self.ready {
            self.ready = from;
            self.waits.push_back((from, self.sent));
        }
        Ok(())
    }
}

impl BackwardBuffers<'_> {
    /// Writes the received parts to the host's gradient, for `layer`.
    fn take(&mut self, layer: usize, all: bool) -> NetResult {
        while let Some(come) = self.shelf.come(all)? {
            come.write(self.host.layer(layer)?.1);
            self.shelf.took(come);
            self.come += 1;
            self.tell()?;
        }
        if all { self.tell() } else { Ok(()) }
    }

    /// Reports what is complete on the host.
    fn tell(&mut self) -> NetResult {
        while let Some((offset, sent)) = self.waits.front().copied()
            && sent <= self.come
        {
            self.waits.pop_front();
            self.host.ready(offset)?;
        }
        Ok(())
    }

    fn end(mut self, first: usize) -> NetResult {
        self.take(first, true)?;
        // For parameters that other stages own there is no report of completion.
        self.shelf.send_all()?;
        self.take(first, true)
    }
}

/// The host's parameters, all of one edition.
struct All<'a>(&'a [f32], u64);

impl Weights<CpuDevice> for All<'_> {
    fn params(&mut self, _: usize) -> NetResult<&[f32]> {
        Ok(self.0)
    }

    fn edition(&mut self, _: usize) -> NetResult<u64> {
        Ok(self.1)
    }
}

impl Model for Layered {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.net.tensors()
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.net.init(seed, params);
    }

    fn step(
        &mut self,
        _params: &[f32],
        _grads: &mut [f32],
        _batch: &Batch,
        _ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        Err(ModelError::new("it is computed layer by layer: Model::step_by_layers"))
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.net.takes().check(params, batch)?;
        self.evaluations += 1;
        let mut weights = All(params, u64::MAX - self.evaluations);
        if let [_] = &self.layers[..] {
            let params = bring(&mut weights, &mut self.shelf, 0)?;
            return Ok(self.net.evaluate(&mut self.device, params, batch)?);
        }
        let mut sum = Evaluation::default();
        for part in batch.parts(self.largest) {
            let pass = Pass { layers: 0..self.layers.len(), slot: 0, n: part.n, evaluates: true };
            let Forward::Evaluated(e) = self.forward_pass(&mut weights, &pass, &part, None)? else {
                return Err(ModelError::new("it trains in an evaluation"));
            };
            sum += e;
        }
        Ok(sum)
    }

    fn layers(&self) -> Vec<Layer> {
        self.layers.clone()
    }

    fn step_by_layers(&mut self, flat: &mut dyn Flat<CpuDevice>, batch: &Batch) -> Result<f32, ModelError> {
        self.net.takes().check_step_batch(batch)?;
        self.largest = self.largest.max(batch.n);
        self.net.load(&mut self.device, 0, batch)?;
        self.with_gradient(flat, 0, |net, device, flat| net.step(device, flat, batch.n))?;
        Ok(self.net.loss(&mut self.device)?)
    }

    fn forward_pass(
        &mut self,
        weights: &mut dyn Weights<CpuDevice>,
        pass: &Pass,
        batch: &Batch,
        input: Option<&[f32]>,
    ) -> Result<Forward, ModelError> {
        let mut forth = ForwardWeights { host: weights, shelf: &mut self.shelf };
        forward_pass(&mut *self.net, &mut self.device, &mut forth, pass, (batch, input))
    }

    fn backward_pass(
        &mut self,
        flat: &mut dyn Flat<CpuDevice>,
        pass: &Pass,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        check_edge(gradient, &self.layers, pass.layers.end, pass.n)?;
        let first = pass.layers.start;
        Ok(self.with_gradient(flat, first, |net, device, flat| {
            net.backward_pass(device, flat, pass, gradient)
        })?)
    }

    fn slice(&self, slice: Slice, ranks: Arc<dyn SliceRanks>) -> Result<Sliced, ModelError> {
        let (net, runs) = self.net.slice(slice, ranks)?;
        let len = net.takes().len;
        let device = CudaDevice::new(self.options)?;
        Ok(Sliced { model: Box::new(Layered::on(net, device, self.options, self.keep)?), len, runs })
    }
}
