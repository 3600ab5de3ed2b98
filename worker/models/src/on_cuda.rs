//! A net on a GPU: its parameters and its gradient stay there, and only what goes to or comes from the servers passes through
//! the host.

use crate::{
    Batch, Evaluation, Model, ModelError,
    net::{Net, NetResult},
};
use paraft_common::{Encoding, layout::TensorSpec};
use paraft_compute::cuda::{
    CudaDevice, CudaOptions, Gradient, Inbox, Outbox, Parcel, PinnedBytes, Precision, Wire,
};
use paraft_compute::device::Losses;
use std::{collections::VecDeque, ops::Range};

/// A part of the flat gradient that is pushed by itself, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its values.
    pub range: Range<usize>,
    /// How they are written.
    pub encoding: Encoding,
}

/// A model whose parameters and gradient are on a device. What is pulled lands in [`Self::host_mut`]; what is to be pushed is
/// ready for the network where the device has copied it to.
pub trait Resident {
    /// The parameters as the last pull left them.
    fn host(&self) -> &[f32];

    /// The same, for the next pull to write.
    fn host_mut(&mut self) -> Result<&mut [f32], ModelError>;

    /// These parts of [`Self::host_mut`] are new. They are used from the next step or evaluation on.
    fn landed(&mut self, ranges: &[Range<usize>]) -> Result<(), ModelError>;

    /// One training step; see [`Model::step`]. `parts` cover the vector, in its order; `push(i, bytes)` is called once for each,
    /// the last one first, as soon as its gradient is on the host, while the device goes on with the others.
    fn step_resident(
        &mut self,
        batch: &Batch,
        parts: &[Part],
        push: &mut dyn FnMut(usize, PinnedBytes),
    ) -> Result<f32, ModelError>;

    /// Loss and accuracy with what has landed; see [`Model::evaluate`].
    fn evaluate_resident(&mut self, batch: &Batch) -> Result<Evaluation, ModelError>;
}

/// Scales of the loss in f16 (Micikevicius et al., 2018): gradients below f16's smallest number would be lost. Halved when a
/// gradient overflows, and the step is made again; doubled after as many good steps.
const FIRST_SCALE: f32 = 65_536.0;
const GOOD_STEPS: u32 = 2_000;

/// A net on a GPU.
pub struct OnCuda<N> {
    // In the order in which they are given back: the device last.
    net: N,
    inbox: Inbox,
    outbox: Outbox,
    gradient: Gradient,
    params_len: usize,
    scale: f32,
    good: u32,
    device: CudaDevice,
}

impl<N: Net<CudaDevice>> OnCuda<N> {
    /// Opens the device and makes room there; `build` makes the net for it.
    pub fn new(
        options: CudaOptions,
        build: impl FnOnce(&CudaDevice) -> Result<N, ModelError>,
    ) -> Result<Self, ModelError> {
        let device = CudaDevice::new(options)?;
        let net = build(&device)?;
        let len = net.takes().len;
        let params = |t: &TensorSpec| t.kind == paraft_common::TensorKind::Param;
        let params_len = net.tensors().iter().filter(|t| params(t)).map(TensorSpec::len).sum();
        Ok(Self {
            inbox: Inbox::new(&device, len)?,
            outbox: Outbox::new(&device)?,
            gradient: Gradient::new(&device, len)?,
            params_len,
            scale: FIRST_SCALE,
            good: 0,
            net,
            device,
        })
    }

    /// The device.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Begins the backward pass; `ready` as in [`Net::step`].
    fn begin(
        &mut self,
        batch: &Batch,
        ready: &mut dyn FnMut(&mut Outbox, usize, &Gradient) -> NetResult,
    ) -> NetResult {
        let Self { net, inbox, outbox, gradient, device, .. } = self;
        inbox.swap(device)?;
        outbox.begin(device.stream())?;
        let stream = device.stream().clone();
        let mut ready = |offset: usize, gradient: &Gradient| {
            outbox.mark(&stream)?;
            ready(outbox, offset, gradient)
        };
        net.step(device, inbox.params(), gradient, batch, &mut ready)
    }

    /// In f16 the gradient is scaled, and known to be good, before any of it may leave.
    fn scaled_step(&mut self, batch: &Batch) -> NetResult {
        loop {
            self.device.set_loss_scale(self.scale);
            self.begin(batch, &mut |_, _, _| Ok(()))?;
            let bad = self.device.unscale(&mut self.gradient, self.params_len, 1.0 / self.scale)?;
            // At scale 1 the gradient is what it is, and the servers refuse what is not finite.
            if bad == 0 || self.scale <= 1.0 {
                break;
            }
            tracing::debug!(
                scale = self.scale,
                bad,
                "the gradient overflows f16; the loss is scaled by half of that"
            );
            self.scale /= 2.0;
            self.good = 0;
        }
        self.good += 1;
        if self.good == GOOD_STEPS {
            self.scale *= 2.0;
            self.good = 0;
        }
        let stream = self.device.stream().clone();
        self.outbox.mark(&stream)
    }
}

fn wire(encoding: Encoding) -> Wire {
    match encoding {
        Encoding::F32 => Wire::F32,
        Encoding::Bf16 => Wire::Bf16,
        Encoding::F16 => Wire::F16,
        Encoding::Int8 => Wire::Int8,
    }
}

impl<N: Net<CudaDevice>> Resident for OnCuda<N> {
    fn host(&self) -> &[f32] {
        self.inbox.host()
    }

    fn host_mut(&mut self) -> Result<&mut [f32], ModelError> {
        Ok(self.inbox.host_mut()?)
    }

    fn landed(&mut self, ranges: &[Range<usize>]) -> Result<(), ModelError> {
        for range in ranges {
            self.inbox.landed(&self.device, range.clone())?;
        }
        Ok(())
    }

    fn step_resident(
        &mut self,
        batch: &Batch,
        parts: &[Part],
        push: &mut dyn FnMut(usize, PinnedBytes),
    ) -> Result<f32, ModelError> {
        self.net.takes().check_step_batch(batch)?;
        let mut parcels: VecDeque<(usize, Parcel)> = VecDeque::with_capacity(parts.len());
        let mut next = parts.len();
        let mut send = |outbox: &mut Outbox, offset: usize, gradient: &Gradient| {
            while next > 0 && parts[next - 1].range.start >= offset {
                next -= 1;
                let Part { range, encoding } = parts[next].clone();
                parcels.push_back((next, outbox.send(gradient, range, wire(encoding))?));
            }
            Ok(())
        };
        if self.device.precision() == Precision::F16 {
            self.scaled_step(batch)?;
            send(&mut self.outbox, 0, &self.gradient)?;
        } else {
            self.begin(batch, &mut send)?;
        }
        if next > 0 {
            return Err(ModelError::new("it did not report its whole gradient as ready"));
        }
        for (part, parcel) in parcels {
            push(part, parcel.wait()?);
        }
        Ok(self.device.loss()?)
    }

    fn evaluate_resident(&mut self, batch: &Batch) -> Result<Evaluation, ModelError> {
        self.net.takes().check_batch(batch)?;
        let params = self.inbox.swap(&self.device)?;
        Ok(self.net.evaluate(&mut self.device, params, batch)?)
    }
}

/// With parameters and gradients of the host's: everything is copied, in one piece.
impl<N: Net<CudaDevice>> Model for OnCuda<N> {
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
        self.host_mut()?.copy_from_slice(params);
        self.landed(std::slice::from_ref(&(0..params.len())))?;
        if self.device.precision() == Precision::F16 {
            self.scaled_step(batch)?;
        } else {
            self.begin(batch, &mut |_, _, _| Ok(()))?;
        }
        let loss = self.device.loss()?;
        grads.copy_from_slice(&self.device.read_gradient(&self.gradient)?);
        ready(0, grads);
        Ok(loss)
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.net.takes().check(params, batch)?;
        self.host_mut()?.copy_from_slice(params);
        self.landed(std::slice::from_ref(&(0..params.len())))?;
        self.evaluate_resident(batch)
    }

    fn resident(&mut self) -> Option<&mut dyn Resident> {
        Some(self)
    }
}
