//! A net on a GPU: parameters and gradient stay there, and only data to or from the servers passes through the
//! host.

mod model;
mod parts;
mod rule;

use crate::{
    Batch, Evaluation, ModelError,
    net::{Net, NetResult},
    replay::{Cuts, LoadedStep, Replays},
    resident::{Part, Resident},
};
use paraft_common::{
    layout::TensorSpec,
    optim::{Hyper, OptimizerConfig, norm_factor},
};
use paraft_compute::cuda::{
    CudaDevice, CudaOptions, Gradient, GradientPart, Inbox, Nccl, Outbox, PinnedBytes, Precision, Slots,
    StepResult, UniqueId, Update,
};
use paraft_compute::device::Losses;
use parts::{runs, wire};
use rule::rule;
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Scales of the loss in f16 (Micikevicius et al., 2018): gradients below f16's smallest number would be lost. The
/// scale is halved when a gradient overflows, and the step is repeated; it is doubled after this many good steps.
const FIRST_SCALE: f32 = 65_536.0;
const GOOD_STEPS: u32 = 2_000;

/// Values that a group reduces in one collective, unless one part has more. Starting a collective takes about as
/// long as reducing one mebibyte; and during a long collective finished parts could already be downloaded.
const REDUCE_VALUES: usize = 2 << 20;

/// A net on a GPU.
pub struct OnCuda {
    // Declared in drop order: the device last.
    net: Box<dyn Net<CudaDevice>>,
    replays: Replays,
    inbox: Inbox,
    outbox: Outbox,
    gradient: Gradient,
    params_len: usize,
    scale: f32,
    good: u32,
    /// The optimizer's slots, if this rank has an optimizer.
    slots: Option<Slots>,
    /// The result of a step that is not applied.
    pending: Option<StepResult>,
    /// Whether parameters and slots are complete and valid on this rank, whatever happens to its group.
    own: bool,
    device: CudaDevice,
}

impl OnCuda {
    /// Opens the device and allocates memory there; `build` creates its net.
    pub fn new(
        options: CudaOptions,
        build: impl FnOnce(&CudaDevice) -> Result<Box<dyn Net<CudaDevice>>, ModelError>,
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
            slots: None,
            pending: None,
            own: false,
            replays: Replays::default(),
            net,
            device,
        })
    }

    /// The device.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Starts to copy these parameters to the device, on this rank only.
    fn take(&mut self, params: &[f32]) -> Result<(), ModelError> {
        self.inbox.host_mut()?.copy_from_slice(params);
        self.own = false;
        Ok(self.inbox.landed(&self.device, 0..params.len(), None)?)
    }

    /// Starts the step. `ready` is called as in [`Net::step`], but only when another part of the gradient between two `cuts` is
    /// complete.
    fn begin(
        &mut self,
        batch: &Batch,
        cuts: &Cuts,
        ready: &mut dyn FnMut(&mut Outbox, usize, &Gradient) -> NetResult,
    ) -> NetResult {
        let Self { net, replays, inbox, outbox, gradient, device, .. } = self;
        inbox.swap(device)?;
        outbox.begin(device.stream())?;
        net.load(device, 0, batch)?;
        let stream = device.stream().clone();
        let mut ready = |offset: usize, gradient: &Gradient| {
            outbox.mark(&stream)?;
            ready(outbox, offset, gradient)
        };
        let scale = if device.precision() == Precision::F16 { self.scale } else { 1.0 };
        let mut step =
            LoadedStep { net: &mut **net, device, params: inbox.params(), gradient, samples: batch.n, cuts };
        replays.step(&mut step, scale, &mut ready)
    }

    /// In f16 the gradient is scaled, and checked before any part leaves. A group's ranks sum the number of bad
    /// values, and started with the same scale, so they all decide alike.
    fn scaled_step(&mut self, batch: &Batch) -> NetResult {
        loop {
            self.device.set_loss_scale(self.scale);
            self.begin(batch, &Cuts::default(), &mut |_, _, _| Ok(()))?;
            let bad = self.device.unscale(&mut self.gradient, self.params_len, 1.0 / self.scale)?;
            // At scale 1 no smaller scale helps, and the servers refuse values that are not finite.
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

    /// The slots, created if missing.
    fn slots(&mut self, optimizer: &OptimizerConfig) -> Result<&Slots, ModelError> {
        if self.slots.as_ref().is_some_and(|s| s.len() != optimizer.slots()) {
            return Err(ModelError::new(format!(
                "{} has {} state vectors, and those on {} are another optimizer's",
                optimizer.kind(),
                optimizer.slots(),
                self.device.context().name()
            )));
        }
        if self.slots.is_none() {
            let first: Vec<f32> = optimizer.new_slots(1).concat();
            self.slots = Some(Slots::new(&self.device, &first, self.params_len)?);
        }
        self.slots.as_ref().ok_or_else(|| ModelError::new("no room for the optimizer's state"))
    }
}

impl Resident for OnCuda {
    fn host(&self) -> &[f32] {
        self.inbox.host()
    }

    fn host_mut(&mut self) -> Result<&mut [f32], ModelError> {
        Ok(self.inbox.host_mut()?)
    }

    fn landed(&mut self, ranges: &[Range<usize>]) -> Result<(), ModelError> {
        self.own = false;
        let group = self.device.group().map(Arc::as_ref);
        for range in ranges {
            self.inbox.landed(&self.device, range.clone(), group)?;
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
        self.pending = None;
        let mut parcels: VecDeque<(usize, GradientPart)> = VecDeque::with_capacity(parts.len());
        let mut next = parts.len();
        let group = self.device.group().cloned();
        let mut send = |outbox: &mut Outbox, offset: usize, gradient: &Gradient| {
            let complete = parts[..next].partition_point(|p| p.range.start < offset)..next;
            next = complete.start;
            for run in runs(parts, complete, REDUCE_VALUES) {
                if let Some(group) = &group {
                    let range = parts[run.start].range.start..parts[run.end - 1].range.end;
                    outbox.reduce(gradient, range, group)?;
                    if group.rank() > 0 {
                        continue;
                    }
                }
                for i in run.rev() {
                    let Part { range, encoding } = parts[i].clone();
                    parcels.push_back((i, outbox.send(gradient, range, wire(encoding)?)?));
                }
            }
            Ok(())
        };
        if self.device.precision() == Precision::F16 {
            self.scaled_step(batch)?;
            send(&mut self.outbox, 0, &self.gradient)?;
        } else {
            let cuts = Cuts(parts.iter().map(|p| p.range.start).collect());
            self.begin(batch, &cuts, &mut send)?;
        }
        if next > 0 {
            return Err(ModelError::new("it did not report its whole gradient as ready"));
        }
        for (part, parcel) in parcels {
            let bytes = parcel.wait()?;
            self.device.check_group()?;
            push(part, bytes);
        }
        let loss = self.device.loss()?;
        self.device.check_group()?;
        Ok(loss)
    }

    fn step_local(&mut self, batch: &Batch) -> Result<f32, ModelError> {
        self.net.takes().check_step_batch(batch)?;
        self.pending = None;
        let group = self.device.group().filter(|g| g.size() > 1).cloned();
        let len = self.gradient.len();
        let mut next = len;
        let mut reduce = |outbox: &mut Outbox, offset: usize, gradient: &Gradient| match &group {
            Some(group) => {
                let part = offset..next;
                next = offset;
                outbox.reduce(gradient, part, group)
            }
            None => Ok(()),
        };
        if self.device.precision() == Precision::F16 {
            self.scaled_step(batch)?;
            reduce(&mut self.outbox, 0, &self.gradient)?;
        } else {
            // Equal on all ranks, whether or not they use graphs. Without a group nothing leaves.
            let behind = (1..).map(|i| i * REDUCE_VALUES).take_while(|b| *b < len).map(|b| len - b);
            let mut cuts: Vec<usize> = behind.chain([0]).filter(|_| group.is_some()).collect();
            cuts.reverse();
            self.begin(batch, &Cuts(cuts), &mut reduce)?;
        }
        if group.is_some() && next > 0 {
            return Err(ModelError::new("it did not report its whole gradient as ready"));
        }
        // Work on the device's stream that reads the gradient waits until it is reduced.
        self.outbox.begin(self.device.stream())?;
        let result = self.device.step_result(&self.gradient, self.params_len)?;
        self.pending = Some(result);
        Ok(result.loss)
    }

    fn optimize(
        &mut self,
        optimizer: &OptimizerConfig,
        hyper: &Hyper,
        clip_norm: Option<f32>,
    ) -> Result<(), ModelError> {
        let Some(StepResult { squares, bad, .. }) = self.pending else {
            return Err(ModelError::new("there is no gradient that has not been applied"));
        };
        if bad > 0 {
            return Err(ModelError::new(format!(
                "{}: {bad} of {} values of the gradient are not finite",
                self.device.context().name(),
                self.gradient.len()
            )));
        }
        self.slots(optimizer)?;
        let Some(slots) = &self.slots else { return Ok(()) };
        let update = Update {
            scale: clip_norm.map_or(1.0, |most| norm_factor(most, squares)),
            limit: hyper.clip_value.unwrap_or(f32::INFINITY),
            decay: optimizer.decay(),
            rule: rule(optimizer, hyper)?,
        };
        self.pending = None;
        // A failed launch may have done half of the work.
        self.own = false;
        self.device.update(&mut self.inbox, &self.gradient, self.params_len, slots, &update)?;
        self.own = true;
        Ok(())
    }

    fn state(&mut self) -> Result<(Vec<f32>, Vec<Vec<f32>>), ModelError> {
        if !self.own {
            self.inbox.swap(&self.device)?;
        }
        let slots = self.slots.as_ref().map_or(Ok(Vec::new()), |s| s.read(&self.device, &mut self.inbox))?;
        // The host's copy has the parameters again.
        let weights = self.inbox.fetch(&self.device)?.to_vec();
        if !self.own {
            self.device.check_group()?;
        }
        Ok((weights, slots))
    }

    fn set_state(&mut self, weights: &[f32], slots: &[Vec<f32>]) -> Result<(), ModelError> {
        let (len, trained) = (self.gradient.len(), self.params_len);
        if weights.len() != len || slots.iter().any(|s| s.len() != trained) {
            return Err(ModelError::new(format!(
                "{} parameters with state vectors of {:?} values; the model has {len}, {trained} of them trained",
                weights.len(),
                slots.iter().map(Vec::len).collect::<Vec<_>>()
            )));
        }
        self.pending = None;
        self.own = false;
        self.slots = None;
        if !slots.is_empty() {
            self.slots = Some(Slots::of(&self.device, slots, &mut self.inbox)?);
        }
        self.take(weights)?;
        self.inbox.swap(&self.device)?;
        self.own = true;
        Ok(())
    }

    fn share_state(&mut self, optimizer: &OptimizerConfig) -> Result<(), ModelError> {
        let Some(group) = self.device.group().cloned() else { return Ok(()) };
        self.pending = None;
        if group.rank() > 0 {
            self.own = false;
            self.inbox.distrust();
            self.slots = self.slots.take().filter(|s| s.len() == optimizer.slots());
        } else if !self.own {
            self.inbox.swap(&self.device)?;
        }
        self.slots(optimizer)?;
        self.inbox.share(&self.device, &group)?;
        if let Some(slots) = &self.slots {
            slots.share(&self.device, &group)?;
        }
        self.device.stream().synchronize()?;
        group.check()?;
        self.inbox.trust();
        self.own = true;
        Ok(())
    }

    fn evaluate_resident(&mut self, batch: &Batch) -> Result<Evaluation, ModelError> {
        self.net.takes().check_batch(batch)?;
        let params = self.inbox.swap(&self.device)?;
        let evaluation = self.net.evaluate(&mut self.device, params, batch)?;
        self.device.check_group()?;
        Ok(evaluation)
    }

    fn join(&mut self, group: Option<Arc<Nccl>>) -> Result<(), ModelError> {
        self.pending = None;
        let sound = self.own || self.device.group().is_none_or(|old| old.has_left() || old.check().is_ok());
        if group.is_some() || !sound {
            self.inbox.distrust();
        }
        if group.is_some() {
            // Equal on all ranks, some of which may be new.
            (self.scale, self.good) = (FIRST_SCALE, 0);
        } else if self.own {
            // They contain nothing of a former group.
            self.inbox.trust();
        }
        // The norms' group may have changed.
        self.replays.clear();
        self.device.join(group);
        Ok(())
    }

    fn form_group(
        &mut self,
        id: &UniqueId,
        rank: usize,
        size: usize,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Arc<Nccl>, ModelError> {
        let group = Nccl::form(self.device.context(), id, rank, size, give_up)?;
        self.join(Some(group.clone()))?;
        Ok(group)
    }
}

impl Drop for OnCuda {
    fn drop(&mut self) {
        // The streams are waited for next, and their collectives may lack other ranks.
        if let Some(group) = self.device.group() {
            group.abort();
        }
    }
}
