//! LayerNorm.

use super::{
    CudaDevice,
    buffers::{Floats, Values},
    by_rows, chunk, room,
};
use crate::{
    cuda::{
        flat::{Gradient, Params},
        kernels::Unit,
        launch::{Arg, Geometry, int},
    },
    device::RowNorms,
    error::Result,
    shape::{NORM_EPSILON, NormAt, NormShape},
};

impl RowNorms for CudaDevice {
    fn norm(
        &mut self,
        shape: NormShape,
        x: &Values,
        add: Option<(&Values, &mut Values)>,
        params: &Params,
        at: NormAt,
        y: &mut Values,
        stats: &mut Floats,
    ) -> Result {
        let NormShape { rows, cols } = shape;
        self.sized(y, rows * cols, "activations")?;
        self.floats(stats, 2 * rows, "statistics of a norm")?;
        let (other, sum) = match add {
            None => (Arg::At(0), Arg::At(0)),
            Some((other, sum)) => (other.at(), self.sized(sum, rows * cols, "activations")?.at()),
        };
        let (rows_arg, cols_arg, eps) = (int(rows), int(cols), Arg::Float(NORM_EPSILON));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Norm,
                "layernorm",
                by_rows(rows, cols, 256),
                &[
                    ("x", x.at()),
                    ("residual", other),
                    ("sum", sum),
                    ("gamma", Arg::At(params.f32_at(at.gamma))),
                    ("beta", Arg::At(params.f32_at(at.gamma + cols))),
                    ("y", y.at()),
                    ("mean", stats.at(0)),
                    ("rstd", stats.at(rows)),
                    ("rows", rows_arg),
                    ("cols", cols_arg),
                    ("eps", eps),
                ],
            )
        }
    }

    fn norm_backward(
        &mut self,
        shape: NormShape,
        dy: &Values,
        x: &Values,
        stats: &Floats,
        params: &Params,
        at: NormAt,
        add: Option<&Values>,
        dx: &mut Values,
        grads: &mut Gradient,
    ) -> Result {
        let NormShape { rows, cols } = shape;
        self.sized(dx, rows * cols, "gradients of activations")?;
        let gamma = Arg::At(params.f32_at(at.gamma));
        let add = add.map_or(Arg::At(0), Values::at);
        let (mean, inverse) = (stats.at(0), stats.at(rows));
        let each = chunk(rows);
        let chunks = rows.div_ceil(each);
        let partial = room(&self.context, &mut self.work.floats, chunks * 2 * cols, "column sums")?;
        let partial = Arg::At(partial.at(0));
        // First the parameters' gradients: `dx` may overwrite `dy`.
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Norm,
                "layernorm_params_partial",
                Geometry::grid([cols.div_ceil(256), chunks, 1], 256),
                &[
                    ("dy", dy.at()),
                    ("x", x.at()),
                    ("mean", mean),
                    ("rstd", inverse),
                    ("partial", partial),
                    ("rows", int(rows)),
                    ("cols", int(cols)),
                    ("rows_per_chunk", int(each)),
                ],
            )
        }?;
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Norm,
                "layernorm_backward",
                by_rows(rows, cols, 256),
                &[
                    ("dy", dy.at()),
                    ("x", x.at()),
                    ("gamma", gamma),
                    ("mean", mean),
                    ("rstd", inverse),
                    ("residual_grad", add),
                    ("dx", dx.at()),
                    ("rows", int(rows)),
                    ("cols", int(cols)),
                ],
            )
        }?;
        // One sum for both tensors.
        self.column_final(partial, Arg::At(grads.at(at.gamma)), chunks, 2 * cols)
    }
}
