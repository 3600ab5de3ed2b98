//! Linear layers: products by cuBLAS, and their epilogues.

use super::{CudaDevice, Element, buffers::Values, chunk, room};
use crate::{
    cuda::{
        blas::Operand,
        flat::{Gradient, Params},
        kernels::Unit,
        launch::{Arg, Geometry, int, long},
        lt,
    },
    device::Linears,
    error::Result,
    shape::{Activation, LinearAt, LinearShape},
};
use std::ops::Range;

/// More columns than any inner layer has; a language model's logits have more. Rows of so many columns are padded
/// to multiples of 16 bytes, and the last few columns have separate products: cuBLAS has fast kernels only for
/// sizes and rows of whole vectors. (On an H100, with 8192 rows of 50,257 in bf16, the three products took 15 of a
/// step's 30 ms.)
const MAX_UNALIGNED_COLUMNS: usize = 1024;

impl CudaDevice {
    /// `out[col] = Σ x[row, col]`, optionally added to the present value.
    pub(super) fn column_sums(&mut self, rows: usize, cols: usize, x: Arg, out: Arg) -> Result {
        let each = chunk(rows);
        let chunks = rows.div_ceil(each);
        let partial =
            Arg::At(room(&self.context, &mut self.work.floats, chunks * cols, "column sums")?.at(0));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Elementwise,
                "col_sum_partial",
                Geometry::grid([cols.div_ceil(256), chunks, 1], 256),
                &[
                    ("x", x),
                    ("partial", partial),
                    ("rows", int(rows)),
                    ("cols", int(cols)),
                    ("rows_per_chunk", int(each)),
                ],
            )
        }?;
        self.column_final(partial, out, chunks, cols)
    }

    pub(super) fn column_final(&self, partial: Arg, out: Arg, chunks: usize, cols: usize) -> Result {
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::Elementwise,
                "col_sum_final",
                Geometry::line(cols.div_ceil(32), 256),
                &[
                    ("partial", partial),
                    ("out", out),
                    ("chunks", int(chunks)),
                    ("cols", int(cols)),
                    ("accumulate", Arg::Int(0)),
                ],
            )
        }
    }

    pub(super) fn operand(&self, at: u64, cols: usize) -> Operand {
        Operand { at, transposed: false, cols }
    }

    /// The outputs of each product of a layer: all; or for very many outputs, those that fill vectors, and then the
    /// remaining few.
    fn runs(&self, outputs: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let vector = 16 / self.element_bytes();
        let whole = if outputs > MAX_UNALIGNED_COLUMNS { outputs / vector * vector } else { outputs };
        [0..whole, whole..outputs].into_iter().filter(|run| !run.is_empty())
    }

    fn after(&self, operand: Operand, values: usize) -> Operand {
        Operand { at: operand.at + (values * self.element_bytes()) as u64, ..operand }
    }

    pub(super) fn product_linear(
        &mut self,
        shape: LinearShape,
        x: u64,
        params: &Params,
        at: LinearAt,
        y: Operand,
    ) -> Result {
        let LinearShape { n, inputs, outputs } = shape;
        let (element, x) = (self.precision.element(), self.operand(x, inputs));
        self.runs(outputs).try_for_each(|run| {
            let rows = params.at(at.weight + run.start * inputs);
            let weight = Operand { at: rows, transposed: true, cols: inputs };
            let y = self.after(y, run.start);
            self.blas.product([n, inputs, run.len()], element, x, weight, (y, element), 0.0)
        })
    }

    /// Applies bias and activation after a product.
    pub(super) fn finish_linear(
        &self,
        shape: LinearShape,
        params: &Params,
        at: LinearAt,
        activation: Activation,
        y: Arg,
        before: Arg,
    ) -> Result {
        if at.bias.is_none() && activation == Activation::None {
            return Ok(());
        }
        let bias = Arg::At(at.bias.map_or(0, |b| params.f32_at(b)));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Elementwise,
                "bias_act",
                Geometry::flat(shape.n * shape.outputs),
                &[
                    ("y", y),
                    ("bias", bias),
                    ("pre", before),
                    ("rows", long(shape.n)),
                    ("cols", int(shape.outputs)),
                    ("act", Arg::Int(code(activation))),
                ],
            )
        }
    }

    pub(super) fn product_weight(
        &mut self,
        shape: LinearShape,
        x: u64,
        dy: Operand,
        at: LinearAt,
        grads: &Gradient,
    ) -> Result {
        let LinearShape { n, inputs, outputs } = shape;
        let element = self.precision.element();
        let x = self.operand(x, inputs);
        self.runs(outputs).try_for_each(|run| {
            let left = Operand { transposed: true, ..self.after(dy, run.start) };
            let to = (self.operand(grads.at(at.weight + run.start * inputs), inputs), Element::F32);
            self.blas.product([run.len(), n, inputs], element, left, x, to, 0.0)
        })?;
        match at.bias {
            Some(bias) => self.column_sums(n, outputs, Arg::At(dy.at), Arg::At(grads.at(bias))),
            None => Ok(()),
        }
    }

    pub(super) fn product_input(
        &mut self,
        shape: LinearShape,
        dy: Operand,
        params: &Params,
        at: LinearAt,
        dx: u64,
    ) -> Result {
        let LinearShape { n, inputs, outputs } = shape;
        let element = self.precision.element();
        let to = (self.operand(dx, inputs), element);
        self.runs(outputs).try_for_each(|run| {
            let weight = self.operand(params.at(at.weight + run.start * inputs), inputs);
            let dy = self.after(dy, run.start);
            let keep = if run.start > 0 { 1.0 } else { 0.0 };
            self.blas.product([n, run.len(), inputs], element, dy, weight, to, keep)
        })
    }
}

impl Linears for CudaDevice {
    fn linear(
        &mut self,
        shape: LinearShape,
        x: &Values,
        params: &Params,
        at: LinearAt,
        activation: Activation,
        y: &mut Values,
        before: Option<&mut Values>,
    ) -> Result {
        let len = shape.n * shape.outputs;
        if at.bias.is_none() && activation == Activation::None && shape.outputs > MAX_UNALIGNED_COLUMNS {
            self.sized_apart(y, shape.n, shape.outputs, "logits")?;
            let to = self.operand(y.begin(), y.pitch(shape.outputs));
            return self.product_linear(shape, x.address(), params, at, to);
        }
        self.sized(y, len, "activations")?;
        let before = match before {
            Some(b) if activation == Activation::Gelu => self.sized(b, len, "activations")?.at(),
            _ => {
                assert!(activation != Activation::Gelu, "a GELU needs room for its argument");
                Arg::At(0)
            }
        };
        if let (Some(lt), Some(bias)) = (&mut self.lt, at.bias)
            && let Arg::At(before) = before
        {
            let (weight, bias) = (params.at(at.weight), params.at(bias));
            let places = lt::Linear { x: x.address(), weight, bias, y: y.address(), before };
            if lt.linear(&self.stream, shape, activation, places)? {
                return Ok(());
            }
        }
        let to = self.operand(y.address(), shape.outputs);
        self.product_linear(shape, x.address(), params, at, to)?;
        self.finish_linear(shape, params, at, activation, y.at(), before)
    }

    fn linear_backward_weight(
        &mut self,
        shape: LinearShape,
        x: &Values,
        dy: &Values,
        at: LinearAt,
        grads: &mut Gradient,
    ) -> Result {
        let dy = match at.bias {
            None => self.operand(dy.begin(), dy.pitch(shape.outputs)),
            Some(_) => self.operand(dy.address(), shape.outputs),
        };
        self.product_weight(shape, x.address(), dy, at, grads)
    }

    fn linear_backward_input(
        &mut self,
        shape: LinearShape,
        dy: &Values,
        params: &Params,
        at: LinearAt,
        dx: &mut Values,
    ) -> Result {
        self.sized(dx, shape.n * shape.inputs, "gradients of activations")?;
        let dy = self.operand(dy.begin(), dy.pitch(shape.outputs));
        self.product_input(shape, dy, params, at, dx.address())
    }

    fn activation_backward(&mut self, activation: Activation, saved: &Values, dy: &mut Values) -> Result {
        if activation == Activation::None {
            return Ok(());
        }
        let args = [
            ("dy", dy.at()),
            ("saved", saved.at()),
            ("n", long(dy.len)),
            ("act", Arg::Int(code(activation))),
        ];
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe { self.typed(Unit::Elementwise, "act_backward", Geometry::flat(dy.len), &args) }
    }

    fn add(&mut self, a: &Values, b: &Values, sum: &mut Values) -> Result {
        self.sized(sum, a.len, "activations")?;
        let args = [("y", sum.at()), ("a", a.at()), ("b", b.at()), ("n", long(a.len))];
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe { self.typed(Unit::Elementwise, "add", Geometry::flat(a.len), &args) }
    }
}

/// The kernels' number of an activation.
fn code(activation: Activation) -> i32 {
    match activation {
        Activation::None => 0,
        Activation::Relu => 1,
        Activation::Gelu => 2,
    }
}
