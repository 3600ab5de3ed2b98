//! A GPU as a [`Device`](crate::device::Device). Its buffers are here, its operators by family in the neighbouring
//! files.

mod attention;
mod conv;
mod embedding;
mod linear;
mod loss;
mod norm;

use crate::{
    cuda::{
        blas::{Blas, Element},
        driver::{Context, Stream},
        flat::{Gradient, Params},
        graph,
        inbox::Inbox,
        kernels::{Kernels, Unit},
        launch::{Arg, Geometry, Launcher, int, long},
        library,
        lt::Lt,
        memory::{Buffer, Pinned, Plain, Staging},
        nccl::Nccl,
    },
    device::{Buffers, Losses},
    error::{DeviceError, Result},
};
use serde::{Deserialize, Serialize};
use std::{ops::Range, sync::Arc};

/// The numbers in which a GPU computes. Parameters and gradients are always f32, and so are the sums of matrix
/// products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// Activations in f32; matrix products round their operands to 10 bits of significand (NVIDIA's TF32).
    #[default]
    Tf32,
    /// Activations and the operands of matrix products in bf16.
    Bf16,
    /// The same in f16. Gradients of activations are scaled, because f16 cannot represent small numbers.
    F16,
}

impl Precision {
    /// The kernel that converts parameters to the type of matrix operands.
    pub(super) fn cast(self) -> Option<&'static str> {
        match self {
            Self::F32 | Self::Tf32 => None,
            Self::Bf16 => Some("cast_f32_to_bf16"),
            Self::F16 => Some("cast_f32_to_f16"),
        }
    }

    pub(super) fn element(self) -> Element {
        match self {
            Self::F32 | Self::Tf32 => Element::F32,
            Self::Bf16 => Element::Bf16,
            Self::F16 => Element::F16,
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::F32 | Self::Tf32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// The compiler's definition of the element type.
    fn define(self) -> &'static str {
        match self {
            Self::F32 | Self::Tf32 => "-DPARAFT_F32",
            Self::Bf16 => "-DPARAFT_BF16",
            Self::F16 => "-DPARAFT_F16",
        }
    }

    /// Bytes of an activation.
    fn bytes(self) -> usize {
        if self.cast().is_some() { 2 } else { 4 }
    }
}

/// How to use a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// The GPU's index, from 0.
    pub ordinal: u32,
    /// The numbers in which it computes.
    pub precision: Precision,
    /// Start each kernel separately, without CUDA graphs.
    pub eager: bool,
    /// Apply biases and activations by separate kernels, without cuBLASLt.
    pub apart: bool,
}

/// A matrix on the device, in the element type of the computation.
#[derive(Debug, Default)]
pub struct Values {
    buffer: Option<Buffer<u8>>,
    len: usize,
    /// Set if there is padding between its rows.
    rows: Option<Rows>,
}

/// Rows padded to multiples of 16 bytes, because tensor cores read only such rows as whole vectors.
#[derive(Clone, Copy, Debug)]
struct Rows {
    cols: usize,
    /// Values from one row to the next.
    pitch: usize,
}

impl Values {
    fn at(&self) -> Arg {
        Arg::At(self.address())
    }

    /// Address of contiguous values.
    fn address(&self) -> u64 {
        assert!(self.rows.is_none(), "logits are for losses and products");
        self.begin()
    }

    fn begin(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |b| b.at(0))
    }

    /// Distance of rows with this many columns.
    fn pitch(&self, cols: usize) -> usize {
        self.rows.map_or(cols, |rows| rows.pitch)
    }
}

/// f32 values on the device.
#[derive(Debug, Default)]
pub struct Floats {
    buffer: Option<Buffer<f32>>,
}

impl Floats {
    fn at(&self, index: usize) -> Arg {
        Arg::At(self.buffer.as_ref().map_or(0, |b| b.at(index)))
    }
}

/// Labels or tokens on the device and on the host. The host determines the rows that receive an embedding's
/// gradient.
#[derive(Debug, Default)]
pub struct Ids {
    buffer: Option<Buffer<u32>>,
    host: Vec<u32>,
    /// Places by token: `order[rows]`, `starts[most + 1]`, `ids[most]`.
    order: Option<Buffer<u32>>,
    /// The maximum number of tokens in it; `None`: not ordered since the last load.
    most: Option<usize>,
}

impl Ids {
    fn at(&self) -> Arg {
        Arg::At(self.buffer.as_ref().map_or(0, |b| b.at(0)))
    }
}

/// One GPU, with a stream for all operators.
#[derive(Debug)]
pub struct CudaDevice {
    // Declared in drop order.
    lt: Option<Lt>,
    blas: Blas,
    launcher: Arc<Launcher>,
    stream: Arc<Stream>,
    context: Arc<Context>,
    /// The group with which this GPU computes one step.
    group: Option<Arc<Nccl>>,
    precision: Precision,
    /// Whether steps may be recorded.
    pub(super) graphs: bool,
    /// The factor on gradients of activations.
    loss_scale: f32,
    inputs: Staging<f32>,
    ids: Staging<u32>,
    orders: Staging<u32>,
    pub(super) work: Work,
    result: Pinned<f64>,
    squares: Pinned<f64>,
    counted: Pinned<u64>,
}

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

/// Buffers within an operator. All operators run on one stream, so they share them.
#[derive(Debug, Default)]
pub(super) struct Work {
    floats: Option<Buffer<f32>>,
    doubles: Option<Buffer<f64>>,
    /// Losses of the step and of the evaluation.
    losses: Option<Buffer<f64>>,
    correct: Option<Buffer<u64>>,
    rows: Option<Buffer<f32>>,
    hits: Option<Buffer<u32>>,
    bad: Option<Buffer<u64>>,
    /// The number of values in the step's mean loss.
    pub(super) step_values: usize,
    /// Whether the evaluation's sums have begun.
    summing: bool,
    sorted: Vec<u32>,
}

/// Allocates a buffer; its former content is lost.
fn room<'a, T: Plain>(
    context: &Arc<Context>,
    buffer: &'a mut Option<Buffer<T>>,
    len: usize,
    what: &str,
) -> Result<&'a Buffer<T>> {
    if buffer.as_ref().is_none_or(|b| b.len() < len) {
        if context.is_recording() {
            return Err(graph::refused(&format!("room for {what}")));
        }
        // First: there may not be enough memory for both.
        *buffer = None;
        *buffer = Some(Buffer::new(context, len, what)?);
    }
    match buffer {
        Some(b) => Ok(b),
        None => Err(DeviceError::Unsupported(format!("no room for {what}"))),
    }
}

/// Rows per chunk in sums over columns.
fn chunk(rows: usize) -> usize {
    rows.div_ceil(512).max(64)
}

/// Blocks of a reduction of a flat range.
fn reduction(n: usize) -> usize {
    n.div_ceil(8192).clamp(1, 1024)
}

/// A warp or a block per row.
fn by_rows(rows: usize, cols: usize, most: u32) -> Geometry {
    if cols <= 1024 {
        Geometry::line(rows.div_ceil(8).min(1 << 20), 256)
    } else {
        Geometry::line(rows.min(1 << 20), if cols <= 8192 { 256 } else { most })
    }
}

impl CudaDevice {
    /// Opens a GPU. The error says which library, device or memory is missing, and what to do.
    pub fn new(options: CudaOptions) -> Result<Self> {
        let context = Context::new(options.ordinal)?;
        let stream = Stream::new(&context, -1)?;
        let blas = Blas::new(&stream, options.precision)?;
        let launcher = Arc::new(Launcher::new(Kernels::new(&context, options.precision.define())));
        let lt = match options.apart {
            true => None,
            false => Lt::new(&stream, options.precision, blas.workspace())?,
        };
        let graphs = !options.eager && library::has_graphs();
        if !options.eager && !graphs {
            tracing::debug!(device = context.name(), "steps run without CUDA graphs");
        }
        Ok(Self {
            lt,
            blas,
            launcher,
            graphs,
            group: None,
            precision: options.precision,
            loss_scale: 1.0,
            inputs: Staging::new(),
            ids: Staging::new(),
            orders: Staging::new(),
            work: Work::default(),
            result: Pinned::new(&context, 1)?,
            squares: Pinned::new(&context, 1)?,
            counted: Pinned::new(&context, 1)?,
            stream,
            context,
        })
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The stream of the operators.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The numbers in which it computes.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Shared with the transfers to and from the host.
    pub(super) fn launcher(&self) -> &Arc<Launcher> {
        &self.launcher
    }

    /// From now on batch norms cover the batches of all ranks (like PyTorch's SyncBatchNorm), as does the count of
    /// values that are not finite. Results read from the device are valid only after [`Self::check_group`].
    pub fn join(&mut self, group: Option<Arc<Nccl>>) {
        self.group = group;
    }

    /// Its group.
    pub fn group(&self) -> Option<&Arc<Nccl>> {
        self.group.as_ref()
    }

    /// See [`Nccl::check`].
    pub fn check_group(&self) -> Result {
        self.group.as_ref().map_or(Ok(()), |g| g.check())
    }

    /// The group, if it has more than one rank.
    fn others(&self) -> Option<&Nccl> {
        self.group.as_deref().filter(|g| g.size() > 1)
    }

    /// Sets the factor on gradients of activations, and so on the whole gradient.
    pub fn set_loss_scale(&mut self, scale: f32) {
        self.loss_scale = scale;
    }

    /// Copies parameters from the host, for comparisons.
    pub fn hold(&mut self, from: &[f32]) -> Result<Inbox> {
        let mut inbox = Inbox::new(self, from.len())?;
        inbox.host_mut()?.copy_from_slice(from);
        inbox.landed(self, 0..from.len(), None)?;
        inbox.swap(self)?;
        Ok(inbox)
    }

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

    /// Bytes of an activation.
    pub(super) fn element_bytes(&self) -> usize {
        self.precision.bytes()
    }

    /// Starts an encoding kernel over a whole gradient, for measurements.
    pub(super) fn encode(&self, kernel: &str, from: &Gradient, to: Arg) -> Result {
        let n = from.len();
        let geometry = match kernel {
            "encode_int8" => Geometry::line(n.div_ceil(1024).min(1 << 20), 256),
            _ => Geometry::flat(n),
        };
        let args = [("g", Arg::At(from.at(0))), ("residual", Arg::At(0)), ("out", to), ("n", long(n))];
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe { self.launch(Unit::Encode, kernel, geometry, &args) }
    }

    /// Waits for the gradient and copies it to the host, for comparisons.
    pub fn read_gradient(&mut self, gradient: &Gradient) -> Result<Vec<f32>> {
        let mut to = Pinned::new(&self.context, gradient.len())?;
        gradient.values.download(&self.stream, 0..gradient.len(), &mut to)?;
        self.stream.synchronize()?;
        Ok(to.as_slice()?.to_vec())
    }

    /// Starts a kernel on the device's stream.
    ///
    /// # Safety See [`Launcher::launch`].
    pub(super) unsafe fn launch(
        &self,
        unit: Unit,
        name: &str,
        geometry: Geometry,
        args: &[(&str, Arg)],
    ) -> Result {
        // SAFETY: the caller guarantees it.
        unsafe { self.launcher.launch(&self.stream, (unit, name), geometry, args) }
    }

    /// Likewise, for the kernel of the element type.
    ///
    /// # Safety See [`Launcher::launch`].
    unsafe fn typed(&self, unit: Unit, name: &str, geometry: Geometry, args: &[(&str, Arg)]) -> Result {
        // SAFETY: the caller guarantees it.
        unsafe { self.launch(unit, &format!("{name}_{}", self.precision.suffix()), geometry, args) }
    }

    fn sized<'a>(&self, values: &'a mut Values, len: usize, what: &str) -> Result<&'a Values> {
        room(&self.context, &mut values.buffer, len * self.precision.bytes(), what)?;
        (values.len, values.rows) = (len, None);
        Ok(values)
    }

    /// Allocates rows that start at multiples of 16 bytes.
    fn sized_apart(&self, values: &mut Values, n: usize, cols: usize, what: &str) -> Result {
        let pitch = cols.next_multiple_of(16 / self.precision.bytes());
        self.sized(values, n * pitch, what)?;
        values.len = n * cols;
        values.rows = (pitch > cols).then_some(Rows { cols, pitch });
        Ok(())
    }

    fn floats<'a>(&self, floats: &'a mut Floats, len: usize, what: &str) -> Result<&'a Floats> {
        room(&self.context, &mut floats.buffer, len, what)?;
        Ok(floats)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Pinned memory must not be freed during a copy.
        let _ = self.stream.synchronize();
    }
}

impl Buffers for CudaDevice {
    type Params = Params;
    type Grads = Gradient;
    type Values = Values;
    type Floats = Floats;
    type Ids = Ids;

    fn load_values(&mut self, from: &[f32], to: &mut Values) -> Result {
        self.context.bind()?;
        self.sized(to, from.len(), "a batch")?;
        if from.is_empty() {
            return Ok(());
        }
        match (self.precision.cast(), &to.buffer) {
            (None, Some(to)) => self.inputs.upload(&self.stream, from, to),
            (None, None) => Ok(()),
            (Some(cast), _) => {
                let floats = room(&self.context, &mut self.work.floats, from.len(), "a batch")?;
                self.inputs.upload(&self.stream, from, floats)?;
                let args = [("x", Arg::At(floats.at(0))), ("y", to.at()), ("n", long(from.len()))];
                // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
                unsafe { self.launch(Unit::Elementwise, cast, Geometry::flat(from.len()), &args) }
            }
        }
    }

    fn load_ids(&mut self, from: &[u32], to: &mut Ids) -> Result {
        self.context.bind()?;
        to.host.clear();
        to.most = None;
        to.host.extend_from_slice(from);
        if from.is_empty() {
            return Ok(());
        }
        let buffer = room(&self.context, &mut to.buffer, from.len(), "labels")?;
        self.ids.upload(&self.stream, from, buffer)
    }

    fn read(&mut self, values: &Values) -> Result<Vec<f32>> {
        let n = values.rows.map_or(values.len, |r| values.len / r.cols * r.pitch);
        let mut to = Pinned::new(&self.context, n)?;
        match (self.precision.cast(), &values.buffer) {
            (_, None) => {}
            (None, Some(from)) => from.download(&self.stream, 0..n * 4, &mut to)?,
            (Some(_), Some(_)) if n == 0 => {}
            (Some(_), Some(_)) => {
                let wide = room(&self.context, &mut self.work.floats, n, "values to read")?;
                let name = format!("cast_{}_to_f32", self.precision.suffix());
                let args = [("x", Arg::At(values.begin())), ("y", Arg::At(wide.at(0))), ("n", long(n))];
                // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
                unsafe { self.launch(Unit::Elementwise, &name, Geometry::flat(n), &args) }?;
                let wide = room(&self.context, &mut self.work.floats, n, "values to read")?;
                wide.download(&self.stream, 0..n, &mut to)?;
            }
        }
        self.stream.synchronize()?;
        let all = to.as_slice()?;
        Ok(match values.rows {
            None => all.to_vec(),
            Some(Rows { cols, pitch }) => {
                all.chunks_exact(pitch).flat_map(|row| &row[..cols]).copied().collect()
            }
        })
    }
}
