//! Optimizers on the device, for jobs without servers: a rank updates its parameters itself, and its optimizer's
//! state stays on the device.
//!
//! The rules equal the servers', bit for bit; the caller computes their constants. Only sums (the norm of a
//! gradient) have another order than on the host.

use crate::{
    cuda::{
        device::CudaDevice,
        flat::Gradient,
        inbox::{Inbox, fetch},
        kernels::Unit,
        launch::{Arg, Geometry, long},
        memory::Buffer,
        nccl::Nccl,
    },
    error::{DeviceError, Result},
};

/// An update's rule per value, with its constants, as in `optim.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "as the kernels' arguments, in their order")]
pub enum Rule {
    Sgd { lr: f32 },
    Momentum { lr: f32, mu: f32, enter: f32 },
    Nesterov { lr: f32, mu: f32 },
    Adagrad { lr: f32, eps: f32 },
    RmsProp { lr: f32, keep: f32, enter: f32, eps: f32, mu: f32, mean: bool, momentum: bool },
    Adam { shrink: f32, enter1: f32, keep2: f32, enter2: f32, step: f32, unbias2: f32, eps: f32 },
}

impl Rule {
    /// Number of its state vectors.
    fn slots(&self) -> usize {
        match self {
            Self::Sgd { .. } => 0,
            Self::Momentum { .. } | Self::Nesterov { .. } | Self::Adagrad { .. } => 1,
            Self::RmsProp { mean, momentum, .. } => 1 + usize::from(*mean) + usize::from(*momentum),
            Self::Adam { .. } => 2,
        }
    }
}

/// One update of all parameters: `g = clip(gradient * scale, ±limit) + decay * w`, followed by the rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Factor of the gradient.
    pub scale: f32,
    /// Bound of each value after that; infinite for none.
    pub limit: f32,
    /// Factor of the weight that is added.
    pub decay: f32,
    /// The rule for the result.
    pub rule: Rule,
}

/// An optimizer's state: vectors as long as the trained part of the parameters.
#[derive(Debug)]
pub struct Slots {
    values: Vec<Buffer<f32>>,
}

impl Slots {
    /// Creates vectors, each filled with its value.
    pub fn new(device: &CudaDevice, first: &[f32], len: usize) -> Result<Self> {
        let make = |value: &f32| {
            let slot = Buffer::new(device.context(), len, "the optimizer's state")?;
            if len > 0 {
                // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
                unsafe {
                    device.launch(
                        Unit::Elementwise,
                        "fill_f32",
                        Geometry::flat(len),
                        &[("x", Arg::At(slot.at(0))), ("value", Arg::Float(*value)), ("n", long(len))],
                    )
                }?;
            }
            Ok(slot)
        };
        Ok(Self { values: first.iter().map(make).collect::<Result<_>>()? })
    }

    /// Creates vectors with these values, at most as many as parameters; waits for the copy. It overwrites the
    /// host's copy of the parameters.
    pub fn of(device: &CudaDevice, from: &[Vec<f32>], by: &mut Inbox) -> Result<Self> {
        let host = by.borrow_host()?;
        let copy = |values: &Vec<f32>| {
            let slot = Buffer::new(device.context(), values.len(), "the optimizer's state")?;
            host.as_mut_slice()?[..values.len()].copy_from_slice(values);
            let copied = slot.upload(device.stream(), host, 0..values.len(), 0);
            // Wait even after an error: the memory must not be used otherwise during a copy.
            device.stream().synchronize()?;
            copied.map(|()| slot)
        };
        Ok(Self { values: from.iter().map(copy).collect::<Result<_>>()? })
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Copies the vectors to the host; waits for it. It overwrites the host's copy of the parameters.
    pub fn read(&self, device: &CudaDevice, by: &mut Inbox) -> Result<Vec<Vec<f32>>> {
        let host = by.borrow_host()?;
        self.values.iter().map(|s| fetch(device, s, host).map(<[f32]>::to_vec)).collect()
    }

    /// Starts to copy rank 0's vectors to all ranks.
    pub fn share(&self, device: &CudaDevice, group: &Nccl) -> Result {
        self.values.iter().try_for_each(|s| group.broadcast(s, 0..s.len(), device.stream()))
    }

    fn at(&self, index: usize) -> Arg {
        Arg::At(self.values[index].at(0))
    }
}

impl CudaDevice {
    /// Starts an update of the operators' parameters: of the first `trained` by the rule, and of the buffers after
    /// them by subtraction. Later work on the device's stream sees the result.
    pub fn update(
        &self,
        inbox: &mut Inbox,
        gradient: &Gradient,
        trained: usize,
        slots: &Slots,
        update: &Update,
    ) -> Result {
        let Update { scale, limit, decay, rule } = *update;
        let sized = slots.values.iter().all(|s| s.len() == trained);
        let len = gradient.len();
        if slots.len() != rule.slots() || !sized || trained > len || len != inbox.params().len() {
            return Err(DeviceError::Unsupported(format!(
                "{}: an update by {rule:?} of {trained} of {} parameters with a gradient of {len} and {} state vectors",
                self.context().name(),
                inbox.params().len(),
                slots.len()
            )));
        }
        let begin = |name: &str, of: std::ops::Range<usize>, own: [&[(&str, Arg)]; 2], stages: [f32; 3]| {
            if of.is_empty() {
                return Ok(());
            }
            let [scale, limit, decay] = stages.map(Arg::Float);
            let [slots, constants] = own;
            let mut args = vec![("w", Arg::At(inbox.params().f32_at(of.start)))];
            args.extend_from_slice(slots);
            args.extend([
                ("grad", Arg::At(gradient.at(of.start))),
                ("n", long(of.len())),
                ("scale", scale),
                ("limit", limit),
                ("decay", decay),
            ]);
            args.extend_from_slice(constants);
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe { self.launch(Unit::Optim, name, Geometry::flat(of.len()), &args) }
        };
        let stages = [scale, limit, decay];
        let all = 0..trained;
        let f = Arg::Float;
        match rule {
            Rule::Sgd { lr } => begin("sgd", all, [&[], &[("lr", f(lr))]], stages),
            Rule::Momentum { lr, mu, enter } => {
                let constants = [("lr", f(lr)), ("mu", f(mu)), ("enter", f(enter))];
                begin("momentum", all, [&[("buf", slots.at(0))], &constants], stages)
            }
            Rule::Nesterov { lr, mu } => {
                begin("nesterov", all, [&[("buf", slots.at(0))], &[("lr", f(lr)), ("mu", f(mu))]], stages)
            }
            Rule::Adagrad { lr, eps } => {
                begin("adagrad", all, [&[("sum", slots.at(0))], &[("lr", f(lr)), ("eps", f(eps))]], stages)
            }
            Rule::RmsProp { lr, keep, enter, eps, mu, mean, momentum } => {
                let mean_at = if mean { slots.at(1) } else { Arg::At(0) };
                let buf = if momentum { slots.at(1 + usize::from(mean)) } else { Arg::At(0) };
                let constants =
                    [("lr", f(lr)), ("keep", f(keep)), ("enter", f(enter)), ("eps", f(eps)), ("mu", f(mu))];
                let state = [("v", slots.at(0)), ("mean", mean_at), ("buf", buf)];
                begin("rmsprop", all, [&state, &constants], stages)
            }
            Rule::Adam { shrink, enter1, keep2, enter2, step, unbias2, eps } => {
                let constants = [
                    ("shrink", f(shrink)),
                    ("enter1", f(enter1)),
                    ("keep2", f(keep2)),
                    ("enter2", f(enter2)),
                    ("step", f(step)),
                    ("unbias2", f(unbias2)),
                    ("eps", f(eps)),
                ];
                begin("adam", all, [&[("m", slots.at(0)), ("v", slots.at(1))], &constants], stages)
            }
        }?;
        begin("sgd", trained..len, [&[], &[("lr", f(1.0))]], [1.0, f32::INFINITY, 0.0])?;
        inbox.changed(self)
    }
}
