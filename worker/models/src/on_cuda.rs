//! A net on a GPU: its parameters and its gradient stay there, and only what goes to or comes from the servers passes through
//! the host.

use crate::{
    Batch, Evaluation, Model, ModelError,
    net::{Net, NetResult},
    replay::{Cuts, Replays},
};
use paraft_common::{
    Encoding,
    layout::TensorSpec,
    optim::{self, Hyper, OptimizerConfig, norm_factor},
};
use paraft_compute::cuda::{
    CudaDevice, CudaOptions, Gradient, GradientPart, Inbox, Nccl, Outbox, PinnedBytes, Precision, Rule,
    Slots, StepResult, UniqueId, Update, Wire,
};
use paraft_compute::{DeviceError, device::Losses};
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// A part of the flat gradient that is pushed by itself, and how. Encodings that keep something of each push
/// ([`Encoding::feeds_back`]) are the host's: what is pushed so leaves the device as f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its values.
    pub range: Range<usize>,
    /// How they are written.
    pub encoding: Encoding,
}

/// A model whose parameters and gradient are on a device. What is pulled lands in [`Self::host_mut`]; what is to be pushed is
/// ready for the network where the device has copied it to.
///
/// In a group several ranks, with a device each, make one step together. All of them call [`Self::landed`] and
/// [`Self::step_resident`], in the same order and with the same ranges and parts; what differs is the batch. Only rank 0 has
/// parameters to give and gradients to push. When a rank is gone the others wait on their devices until somebody calls
/// [`Nccl::abort`] from another thread; what they were about then ends with an error that [`ModelError::is_group`], and the model
/// can be used in another group, or alone.
///
/// A job without servers in its steps has its parameters on the devices alone: [`Self::set_state`] on rank 0,
/// [`Self::share_state`], then [`Self::step_local`] and [`Self::optimize`] in turn, on all ranks alike.
pub trait Resident {
    /// The parameters as the last pull left them; in a group, on rank 0 only.
    fn host(&self) -> &[f32];

    /// The same, for the next pull to write.
    fn host_mut(&mut self) -> Result<&mut [f32], ModelError>;

    /// These parts of [`Self::host_mut`] are new. They are used from the next step or evaluation on. In a group it is rank 0's
    /// host that has them, for all ranks.
    fn landed(&mut self, ranges: &[Range<usize>]) -> Result<(), ModelError>;

    /// One training step; see [`Model::step`]. `parts` cover the vector, in its order; `push(i, bytes)` is called once for each,
    /// the last one first, as soon as its gradient is on the host, while the device goes on with the others. In a group that is
    /// the mean of the ranks' gradients; only rank 0 is called to push it. The loss is this rank's.
    fn step_resident(
        &mut self,
        batch: &Batch,
        parts: &[Part],
        push: &mut dyn FnMut(usize, PinnedBytes),
    ) -> Result<f32, ModelError>;

    /// One training step whose gradient stays on the device; in a group it becomes the mean over the ranks. The loss is this
    /// rank's.
    fn step_local(&mut self, batch: &Batch) -> Result<f32, ModelError>;

    /// Applies the gradient of the last [`Self::step_local`], once: to the parameters by the optimizer, whose slots are made when
    /// they are missing; from the buffers it is subtracted. With `clip_norm` it is brought to that norm first, as
    /// [`norm_factor`] has it. A gradient that is not finite is an error, and nothing is changed then.
    fn optimize(
        &mut self,
        optimizer: &OptimizerConfig,
        hyper: &Hyper,
        clip_norm: Option<f32>,
    ) -> Result<(), ModelError>;

    /// The parameters, buffers included, and the optimizer's slots, each as long as the trained part; none where it has not
    /// begun. After a broken step they are those of before it.
    fn state(&mut self) -> Result<(Vec<f32>, Vec<Vec<f32>>), ModelError>;

    /// The reverse: from now on these, on this rank alone. Without slots the optimizer begins anew.
    fn set_state(&mut self, weights: &[f32], slots: &[Vec<f32>]) -> Result<(), ModelError>;

    /// All ranks of the group get rank 0's parameters and slots; waits for them. Rank 0 needs parameters of its own: from
    /// [`Self::set_state`], an earlier group that did not have servers, or what has landed in this one. Alone nothing is done.
    /// When it fails, rank 0 still has its state.
    fn share_state(&mut self, optimizer: &OptimizerConfig) -> Result<(), ModelError>;

    /// Loss and accuracy with what has landed; see [`Model::evaluate`]. Each rank of a group does it by itself.
    fn evaluate_resident(&mut self, batch: &Batch) -> Result<Evaluation, ModelError>;

    /// From now on it is a rank of this group, or of none. What it has begun in the group before is over: [`Nccl::leave`] that
    /// one first, or abort it. In a new group, and alone after one that broke, all parameters have to land, be set or be shared
    /// before they are used: those on the device are nobody's.
    fn join(&mut self, group: Option<Arc<Nccl>>) -> Result<(), ModelError>;

    /// Forms a group with its device ([`Nccl::form`]) and joins it.
    fn form_group(
        &mut self,
        id: &UniqueId,
        rank: usize,
        size: usize,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Arc<Nccl>, ModelError>;
}

/// Scales of the loss in f16 (Micikevicius et al., 2018): gradients below f16's smallest number would be lost. Halved when a
/// gradient overflows, and the step is made again; doubled after as many good steps.
const FIRST_SCALE: f32 = 65_536.0;
const GOOD_STEPS: u32 = 2_000;

/// Values of the parts that a group reduces in one collective, unless one part alone has more: to begin one takes about as long as
/// to reduce a mebibyte, and what waits for the end of a long one could be on its way to the host.
const REDUCE_VALUES: usize = 2 << 20;

/// A net on a GPU.
pub struct OnCuda<N> {
    // In the order in which they are given back: the device last.
    net: N,
    replays: Replays,
    inbox: Inbox,
    outbox: Outbox,
    gradient: Gradient,
    params_len: usize,
    scale: f32,
    good: u32,
    /// Of the optimizer, where this rank has one.
    slots: Option<Slots>,
    /// Of a gradient that has not been applied.
    pending: Option<StepResult>,
    /// The device's parameters and slots are whole and this rank's own, whatever becomes of its group.
    own: bool,
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

    /// Has these parameters on their way to the device, on this rank alone.
    fn take(&mut self, params: &[f32]) -> Result<(), ModelError> {
        self.inbox.host_mut()?.copy_from_slice(params);
        self.own = false;
        Ok(self.inbox.landed(&self.device, 0..params.len(), None)?)
    }

    /// Begins the step; `ready` as in [`Net::step`], but only where the gradient comes past a cut.
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
        replays.step(net, device, inbox.params(), gradient, batch.n, scale, cuts, &mut ready)
    }

    /// In f16 the gradient is scaled, and known to be good, before any of it may leave. A group's ranks count what is bad
    /// together, and began with the same scale: they decide alike.
    fn scaled_step(&mut self, batch: &Batch) -> NetResult {
        loop {
            self.device.set_loss_scale(self.scale);
            self.begin(batch, &Cuts::default(), &mut |_, _, _| Ok(()))?;
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

    /// The slots, made where there are none.
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

/// An update's rule, as the device's kernels take it.
fn rule(optimizer: &OptimizerConfig, hyper: &Hyper) -> Result<Rule, ModelError> {
    Ok(match optimizer.rule(hyper) {
        optim::Rule::Sgd { lr } => Rule::Sgd { lr },
        optim::Rule::Momentum(r) => Rule::Momentum { lr: r.lr, mu: r.mu, enter: r.enter },
        optim::Rule::Nesterov(r) => Rule::Nesterov { lr: r.lr, mu: r.mu },
        optim::Rule::DelayedNesterov(_) => {
            return Err(ModelError::new(
                "delayed-nesterov is for gradients that come late: servers apply it, ranks do not",
            ));
        }
        optim::Rule::Adadelta(_) | optim::Rule::Adamax(_) | optim::Rule::NAdam(_) | optim::Rule::RAdam(_) => {
            return Err(ModelError::new(format!(
                "a GPU has no kernel of {}: train on the CPU, or with servers",
                optimizer.kind()
            )));
        }
        optim::Rule::Adagrad(r) => Rule::Adagrad { lr: r.lr, eps: r.eps },
        optim::Rule::RmsProp(r) => Rule::RmsProp {
            lr: r.lr,
            keep: r.n.keep,
            enter: r.n.enter,
            eps: r.n.eps,
            mu: r.mu,
            mean: r.centered,
            momentum: optimizer.slots() > 1 + usize::from(r.centered),
        },
        optim::Rule::Adam(r) => Rule::Adam {
            shrink: r.shrink,
            enter1: r.enter1,
            keep2: r.keep2,
            enter2: r.enter2,
            step: r.step,
            unbias2: r.unbias2,
            eps: r.eps,
        },
    })
}

/// Those of the parts, in runs of at most so many values (or one part), the last one first.
fn runs(parts: &[Part], of: Range<usize>, most: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for i in of.rev() {
        match runs.last_mut() {
            Some(run) if parts[run.end - 1].range.end - parts[i].range.start <= most => run.start = i,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

fn wire(encoding: Encoding) -> Result<Wire, DeviceError> {
    match encoding {
        Encoding::F32 => Ok(Wire::F32),
        Encoding::Bf16 => Ok(Wire::Bf16),
        Encoding::F16 => Ok(Wire::F16),
        Encoding::Int8 => Ok(Wire::Int8),
        _ => Err(DeviceError::Unsupported(format!(
            "a device does not write {encoding}: ask it for f32, and encode that on the host"
        ))),
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
            // The same on all ranks, whether they begin graphs or not. Alone nothing leaves.
            let behind = (1..).map(|i| i * REDUCE_VALUES).take_while(|b| *b < len).map(|b| len - b);
            let mut cuts: Vec<usize> = behind.chain([0]).filter(|_| group.is_some()).collect();
            cuts.reverse();
            self.begin(batch, &Cuts(cuts), &mut reduce)?;
        }
        if group.is_some() && next > 0 {
            return Err(ModelError::new("it did not report its whole gradient as ready"));
        }
        // What reads the gradient on the device's stream waits until it is reduced.
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
        // Where a launch fails half of it may be done.
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
        // The host's copy is of the parameters again.
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
            // The same on all ranks, some of which may have only just begun.
            (self.scale, self.good) = (FIRST_SCALE, 0);
        } else if self.own {
            // Nothing of a group's is in them.
            self.inbox.trust();
        }
        // Norms may be over others now.
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
        let group = Nccl::form(&self.device, id, rank, size, give_up)?;
        self.join(Some(group.clone()))?;
        Ok(group)
    }
}

impl<N> Drop for OnCuda<N> {
    fn drop(&mut self) {
        // Streams are waited for next, and collectives on them may be without their other ranks.
        if let Some(group) = self.device.group() {
            group.abort();
        }
    }
}

/// With parameters and gradients of the host's: everything is copied, in one piece. In a group each rank uses the parameters
/// that it is given, and gets the mean of the gradients.
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
        self.pending = None;
        self.take(params)?;
        if self.device.precision() == Precision::F16 {
            self.scaled_step(batch)?;
        } else {
            self.begin(batch, &Cuts::default(), &mut |_, _, _| Ok(()))?;
        }
        let loss = self.device.loss()?;
        if let Some(group) = self.device.group() {
            let stream = self.device.stream().clone();
            self.outbox.mark(&stream)?;
            self.outbox.reduce(&self.gradient, 0..grads.len(), group)?;
            self.outbox.begin(&stream)?;
        }
        let mean = self.device.read_gradient(&self.gradient)?;
        self.device.check_group()?;
        grads.copy_from_slice(&mean);
        ready(0, grads);
        Ok(loss)
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.net.takes().check(params, batch)?;
        self.take(params)?;
        self.evaluate_resident(batch)
    }

    fn resident(&mut self) -> Option<&mut dyn Resident> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_of_so_many_values_or_of_one_part() {
        let parts: Vec<Part> = [0..4, 4..6, 6..20, 20..22, 22..24, 24..25]
            .map(|range| Part { range, encoding: Encoding::F32 })
            .to_vec();
        assert_eq!(runs(&parts, 0..6, 5), [3..6, 2..3, 1..2, 0..1]);
        assert_eq!(runs(&parts, 1..5, 4), [3..5, 2..3, 1..2]);
        assert_eq!(runs(&parts, 0..6, 25), std::slice::from_ref(&(0..6)));
        assert_eq!(runs(&parts, 3..3, 25), []);
    }
}
