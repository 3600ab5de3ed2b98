//! Parameters and gradients as flat vectors on the device.

use crate::{
    cuda::{
        device::CudaDevice,
        driver::Stream,
        kernels::Unit,
        launch::{Arg, Geometry, long},
        memory::{Buffer, Pinned, clear_at},
    },
    error::Result,
};
use std::{collections::BTreeMap, ops::Range};

/// The flat parameters in f32, and also in 16 bits if the device computes in those. They are contiguous, or consist
/// of separate runs for a device that holds some layers ([`Shelf`](super::Shelf)).
#[derive(Debug)]
pub struct Params {
    pub(super) master: Buffer<f32>,
    pub(super) half: Option<Buffer<u16>>,
    pub(super) runs: Option<Runs>,
}

/// The parts of a flat vector, by their first index.
#[derive(Debug, Default)]
pub(super) struct Runs(pub BTreeMap<usize, Run>);

/// A contiguous part.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub range: Range<usize>,
    /// Address of its first value, in f32.
    pub wide: u64,
    /// Address in the type of matrix operands.
    pub narrow: u64,
}

impl Runs {
    /// The run that contains a value, and the value's offset in it.
    ///
    /// # Panics
    /// If no run contains it.
    fn of(&self, index: usize) -> (&Run, u64) {
        let run = self.0.range(..=index).next_back().map(|(_, run)| run).filter(|run| index < run.range.end);
        let Some(run) = run else { panic!("value {index} of the flat vector is not on the device") };
        (run, (index - run.range.start) as u64)
    }
}

impl Params {
    /// Allocates this many values, uninitialised.
    pub(super) fn new(device: &CudaDevice, len: usize, what: &str) -> Result<Self> {
        let context = device.context();
        let half = device.precision().cast().map(|_| Buffer::new(context, len, what)).transpose()?;
        Ok(Self { master: Buffer::new(context, len, what)?, half, runs: None })
    }

    /// Address of the vector, which tells the two buffers apart.
    pub fn address(&self) -> u64 {
        self.master.at(0)
    }

    /// Address of an f32 value.
    pub(super) fn f32_at(&self, index: usize) -> u64 {
        let Some(runs) = &self.runs else { return self.master.at(index) };
        let (run, at) = runs.of(index);
        run.wide + at * 4
    }

    /// Address of a value in the type of matrix operands.
    pub(super) fn at(&self, index: usize) -> u64 {
        let Some(runs) = &self.runs else {
            return self.half.as_ref().map_or_else(|| self.master.at(index), |h| h.at(index));
        };
        let (run, at) = runs.of(index);
        run.narrow + at * if run.narrow == run.wide { 4 } else { 2 }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.master.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.master.is_empty()
    }
}

/// The flat gradient, in f32, contiguous or in runs.
#[derive(Debug)]
pub struct Gradient {
    pub(super) values: Buffer<f32>,
    pub(super) runs: Option<Runs>,
}

impl Gradient {
    /// Allocates this many values, uninitialised.
    pub fn new(device: &CudaDevice, len: usize) -> Result<Self> {
        Ok(Self { values: Buffer::new(device.context(), len, "the gradient")?, runs: None })
    }

    /// Address of a value.
    pub(super) fn at(&self, index: usize) -> u64 {
        let Some(runs) = &self.runs else { return self.values.at(index) };
        let (run, at) = runs.of(index);
        run.wide + at * 4
    }

    /// Starts to zero a contiguous part.
    pub(super) fn clear(&self, stream: &Stream, part: Range<usize>) -> Result {
        let (Some(last), true) = (part.end.checked_sub(1), self.runs.is_some()) else {
            return self.values.clear(stream, part);
        };
        if part.is_empty() {
            return Ok(());
        }
        let at = self.at(part.start);
        assert!(self.at(last) - at == (last - part.start) as u64 * 4, "clear: {part:?}");
        // SAFETY: both ends lie in one run, which is memory of the device.
        unsafe { clear_at(stream, at, part.len() * 4) }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

/// For comparisons and measurements.
impl CudaDevice {
    /// Sets every value of a gradient, for comparisons: remaining NaNs show values that an operator skipped.
    pub fn fill(&mut self, gradient: &Gradient, value: f32) -> Result {
        let n = gradient.len();
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::Elementwise,
                "fill_f32",
                Geometry::flat(n),
                &[("x", Arg::At(gradient.at(0))), ("value", Arg::Float(value)), ("n", long(n))],
            )
        }
    }

    /// Starts an encoding kernel over a whole gradient, for measurements.
    pub(super) fn encode(&self, kernel: &str, from: &Gradient, to: Arg) -> Result {
        let n = from.len();
        let geometry = match kernel {
            "encode_int8" => Geometry::line(n.div_ceil(1024).min(1 << 20), 256),
            _ => Geometry::flat(n),
        };
        let args = [("g", Arg::At(from.at(0))), ("out", to), ("n", long(n))];
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe { self.launch(Unit::Encode, kernel, geometry, &args) }
    }

    /// Waits for the gradient and copies it to the host, for comparisons.
    pub fn read_gradient(&mut self, gradient: &Gradient) -> Result<Vec<f32>> {
        let mut to = Pinned::new(self.context(), gradient.len())?;
        gradient.values.download(self.stream(), 0..gradient.len(), &mut to)?;
        self.stream().synchronize()?;
        Ok(to.as_slice()?.to_vec())
    }
}
