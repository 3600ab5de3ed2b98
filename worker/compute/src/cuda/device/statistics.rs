//! Statistics of a gradient: its sum of squares, and its values that are not finite.

use super::{CudaDevice, reduction, room};
use crate::{
    cuda::{
        flat::Gradient,
        kernels::Unit,
        launch::{Arg, Geometry, int, long},
    },
    device::Losses,
    error::Result,
};
use std::ops::Range;

/// The result of a step whose gradient stays on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean over the batch.
    pub loss: f32,
    /// Sum of the squares of the gradient's trained part, in f64.
    pub squares: f64,
    /// Values of the gradient that are not finite, buffers included.
    pub bad: u64,
}

impl CudaDevice {
    /// Multiplies the first `len` values of the gradient, waits, and returns how many results are not finite, in a
    /// group on all ranks together.
    pub fn unscale(&mut self, gradient: &mut Gradient, len: usize, factor: f32) -> Result<u64> {
        if len == 0 {
            return Ok(0);
        }
        let blocks = self.statistics(gradient, 0..len, Some(factor), false)?;
        if let (Some(group), Some(bad)) = (self.others(), &self.work.bad) {
            group.all_reduce_count(bad, blocks..blocks + 1, &self.stream)?;
        }
        let bad = room(&self.context, &mut self.work.bad, blocks + 1, "partial counts")?;
        bad.download(&self.stream, blocks..blocks + 1, &mut self.counted)?;
        self.stream.synchronize()?;
        self.check_group()?;
        Ok(self.counted.as_slice()?[0])
    }

    /// Starts the statistics of a part of the gradient, after multiplying it by the factor, if any. The results
    /// follow this many partials of `work.doubles` and `work.bad`; returns the new number.
    fn statistics(
        &mut self,
        gradient: &Gradient,
        part: Range<usize>,
        factor: Option<f32>,
        accumulate: bool,
    ) -> Result<usize> {
        // The same number for every part of a gradient, so that a continued sum stays at its place.
        let blocks = reduction(gradient.len());
        let used = reduction(part.len());
        let doubles = room(&self.context, &mut self.work.doubles, blocks + 1, "partial sums")?;
        let (squares, total) = (Arg::At(doubles.at(0)), Arg::At(doubles.at(blocks)));
        let bad = room(&self.context, &mut self.work.bad, blocks + 1, "partial counts")?;
        let (partial, count) = (Arg::At(bad.at(0)), Arg::At(bad.at(blocks)));
        let (g, n) = (("g", Arg::At(gradient.at(part.start))), ("n", long(part.len())));
        let partials = [("partial_squares", squares), ("partial_bad", partial)];
        let geometry = Geometry::line(used, 256);
        match factor {
            Some(factor) => {
                let args = [g, n, ("factor", Arg::Float(factor)), partials[0], partials[1]];
                // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
                unsafe { self.launch(Unit::Stats, "unscale", geometry, &args) }
            }
            None =>
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe { self.launch(Unit::Stats, "grad_stats", geometry, &[g, n, partials[0], partials[1]]) },
        }?;
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::Stats,
                "grad_stats_final",
                Geometry::line(1, 256),
                &[
                    ("partial_squares", squares),
                    ("partial_bad", partial),
                    ("blocks", int(used)),
                    ("squares", total),
                    ("bad", count),
                    ("accumulate", Arg::Int(accumulate.into())),
                ],
            )
        }?;
        Ok(blocks)
    }

    /// Waits for the step's loss and the statistics of its gradient, whose first `trained` values are not buffers.
    pub fn step_result(&mut self, gradient: &Gradient, trained: usize) -> Result<StepResult> {
        self.squares.as_mut_slice()?[0] = 0.0;
        self.counted.as_mut_slice()?[0] = 0;
        if trained > 0 {
            let at = self.statistics(gradient, 0..trained, None, false)?;
            if let Some(doubles) = &self.work.doubles {
                doubles.download(&self.stream, at..at + 1, &mut self.squares)?;
            }
        }
        if !gradient.is_empty() {
            // For buffers only the count of values that are not finite matters.
            let at = match gradient.len() - trained {
                0 => reduction(gradient.len()),
                _ => self.statistics(gradient, trained..gradient.len(), None, trained > 0)?,
            };
            if let Some(bad) = &self.work.bad {
                bad.download(&self.stream, at..at + 1, &mut self.counted)?;
            }
        }
        let loss = self.loss()?;
        self.check_group()?;
        Ok(StepResult { loss, squares: self.squares.as_slice()?[0], bad: self.counted.as_slice()?[0] })
    }
}
