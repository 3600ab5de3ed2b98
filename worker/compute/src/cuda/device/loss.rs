//! Losses, summed on the device.

use super::{
    CudaDevice,
    buffers::{Ids, Values},
    by_rows, reduction, room,
};
use crate::{
    cuda::{
        kernels::Unit,
        launch::{Arg, Geometry, int, long},
    },
    device::{Losses, Sums},
    error::Result,
};

impl CudaDevice {
    /// Sums one value per row into the place `into` of the losses.
    pub(super) fn sum_rows(&mut self, rows: usize, into: usize, accumulate: bool) -> Result {
        let losses = Arg::At(room(&self.context, &mut self.work.rows, rows, "losses")?.at(0));
        let out = Arg::At(room(&self.context, &mut self.work.losses, 2, "the loss")?.at(into));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::Loss,
                "sum_f32",
                Geometry::line(1, 1024),
                &[
                    ("x", losses),
                    ("out", out),
                    ("n", long(rows)),
                    ("accumulate", Arg::Int(accumulate.into())),
                ],
            )
        }
    }

    /// Squared differences into the place `into` of the losses, and their gradient unless `dy` is null.
    pub(super) fn squares(
        &mut self,
        y: &Values,
        target: &Values,
        dy: Arg,
        scale: f32,
        into: usize,
        accumulate: bool,
    ) -> Result {
        let n = y.len;
        // The kernel compares with f32.
        let wide = match self.precision.cast() {
            None => target.at(),
            Some(_) => {
                let wide = Arg::At(room(&self.context, &mut self.work.floats, n, "targets")?.at(0));
                let name = format!("cast_{}_to_f32", self.precision.suffix());
                // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
                unsafe {
                    self.launch(
                        Unit::Elementwise,
                        &name,
                        Geometry::flat(n),
                        &[("x", target.at()), ("y", wide), ("n", long(n))],
                    )
                }?;
                wide
            }
        };
        let blocks = reduction(n);
        let partial = Arg::At(room(&self.context, &mut self.work.doubles, blocks, "partial sums")?.at(0));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Loss,
                "mse",
                Geometry::line(blocks, 256),
                &[
                    ("y", y.at()),
                    ("target", wide),
                    ("dy", dy),
                    ("partial", partial),
                    ("n", long(n)),
                    ("scale", Arg::Float(scale)),
                ],
            )
        }?;
        let out = Arg::At(room(&self.context, &mut self.work.losses, 2, "the loss")?.at(into));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::Loss,
                "sum_f64",
                Geometry::line(1, 1024),
                &[
                    ("x", partial),
                    ("out", out),
                    ("n", long(blocks)),
                    ("accumulate", Arg::Int(accumulate.into())),
                ],
            )
        }
    }

    /// Reads one of the losses.
    pub(super) fn read_loss(&mut self, place: usize) -> Result<f64> {
        let losses = room(&self.context, &mut self.work.losses, 2, "the loss")?;
        losses.download(&self.stream, place..place + 1, &mut self.result)?;
        self.stream.synchronize()?;
        Ok(self.result.as_slice()?[0])
    }

    /// The device's part of starting an evaluation.
    pub(super) fn begin_sums(&mut self) -> Result {
        if !self.work.summing {
            let losses = room(&self.context, &mut self.work.losses, 2, "the loss")?;
            losses.clear(&self.stream, 1..2)?;
            let correct = room(&self.context, &mut self.work.correct, 1, "the count")?;
            correct.clear(&self.stream, 0..1)?;
            self.work.summing = true;
        }
        Ok(())
    }
}

impl Losses for CudaDevice {
    fn softmax_cross_entropy(
        &mut self,
        rows: usize,
        classes: usize,
        logits: &mut Values,
        labels: &Ids,
    ) -> Result {
        let losses = Arg::At(room(&self.context, &mut self.work.rows, rows, "losses")?.at(0));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Loss,
                "softmax_xent",
                by_rows(rows, classes, 1024),
                &[
                    ("logits", Arg::At(logits.begin())),
                    ("labels", labels.at()),
                    ("dlogits", Arg::At(logits.begin())),
                    ("losses", losses),
                    ("correct", Arg::At(0)),
                    ("rows", int(rows)),
                    ("cols", int(classes)),
                    ("pitch", int(logits.pitch(classes))),
                    ("scale", Arg::Float(self.loss_scale / rows as f32)),
                ],
            )
        }?;
        self.work.step_values = rows;
        self.sum_rows(rows, 0, false)
    }

    fn mse(&mut self, y: &Values, target: &Values, dy: &mut Values) -> Result {
        self.sized(dy, y.len, "gradients of activations")?;
        self.work.step_values = y.len;
        self.squares(y, target, dy.at(), self.loss_scale * 2.0 / y.len as f32, 0, false)
    }

    fn cross_entropy_sum(&mut self, rows: usize, classes: usize, logits: &Values, labels: &Ids) -> Result {
        self.begin_sums()?;
        let losses = Arg::At(room(&self.context, &mut self.work.rows, rows, "losses")?.at(0));
        let hits = Arg::At(room(&self.context, &mut self.work.hits, rows, "hits")?.at(0));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Loss,
                "xent",
                by_rows(rows, classes, 1024),
                &[
                    ("logits", Arg::At(logits.begin())),
                    ("labels", labels.at()),
                    ("losses", losses),
                    ("correct", hits),
                    ("rows", int(rows)),
                    ("cols", int(classes)),
                    ("pitch", int(logits.pitch(classes))),
                ],
            )
        }?;
        self.sum_rows(rows, 1, true)?;
        let out = Arg::At(room(&self.context, &mut self.work.correct, 1, "the count")?.at(0));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::Loss,
                "sum_u32",
                Geometry::line(1, 1024),
                &[("x", hits), ("out", out), ("n", long(rows)), ("accumulate", Arg::Int(1))],
            )
        }
    }

    fn squared_difference(&mut self, y: &Values, target: &Values) -> Result {
        self.begin_sums()?;
        self.squares(y, target, Arg::At(0), 0.0, 1, true)
    }

    fn loss(&mut self) -> Result<f32> {
        let values = self.work.step_values.max(1);
        Ok((self.read_loss(0)? / values as f64) as f32)
    }

    fn sums(&mut self) -> Result<Sums> {
        if !self.work.summing {
            return Ok(Sums::default());
        }
        self.work.summing = false;
        let correct = room(&self.context, &mut self.work.correct, 1, "the count")?;
        correct.download(&self.stream, 0..1, &mut self.counted)?;
        let loss = self.read_loss(1)?;
        Ok(Sums { loss, correct: self.counted.as_slice()?[0] })
    }
}
