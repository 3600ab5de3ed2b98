//! A GPU as a [`Device`].

use crate::{
    cuda::{
        blas::{Blas, Element, Operand},
        driver::{Context, Stream},
        flat::{Gradient, Params},
        kernels::{Kernels, Unit},
        launch::{Arg, Geometry, Launcher, int, long},
        memory::{Buffer, Pinned, Staging},
    },
    device::{Device, Sums},
    error::{DeviceError, Result},
    shape::{
        Activation, AttentionShape, ConvBlockAt, ConvBlockShape, EmbeddingAt, EmbeddingShape, LinearAt,
        LinearShape, NORM_EPSILON, NormAt, NormShape,
    },
};
use std::sync::Arc;

/// In which numbers a GPU computes. Parameters and gradients are f32 in any case, and so are the sums of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// Activations in f32; matrix products round their operands to 10 bits of significand (NVIDIA's TF32).
    #[default]
    Tf32,
    /// Activations and the operands of matrix products in bf16.
    Bf16,
    /// The same in f16; gradients of activations are scaled, for f16 has no small numbers.
    F16,
}

impl Precision {
    /// The kernel that turns parameters into what matrices are multiplied in.
    pub(super) fn cast(self) -> Option<&'static str> {
        match self {
            Self::F32 | Self::Tf32 => None,
            Self::Bf16 => Some("cast_f32_to_bf16"),
            Self::F16 => Some("cast_f32_to_f16"),
        }
    }

    fn element(self) -> Element {
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

    /// For the compiler: which element type it is asked for.
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
    /// Which one, from 0.
    pub ordinal: u32,
    /// In which numbers.
    pub precision: Precision,
}

/// A matrix on the device, in the element type in which it computes.
#[derive(Debug, Default)]
pub struct Values {
    buffer: Option<Buffer<u8>>,
    len: usize,
}

impl Values {
    fn at(&self) -> Arg {
        Arg::At(self.address())
    }

    fn address(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |b| b.at(0))
    }
}

/// f32 on the device.
#[derive(Debug, Default)]
pub struct Floats {
    buffer: Option<Buffer<f32>>,
}

impl Floats {
    fn at(&self, index: usize) -> Arg {
        Arg::At(self.buffer.as_ref().map_or(0, |b| b.at(index)))
    }
}

/// Labels or tokens on the device, and on the host: which rows an embedding's gradient goes to is worked out there.
#[derive(Debug, Default)]
pub struct Ids {
    buffer: Option<Buffer<u32>>,
    host: Vec<u32>,
}

impl Ids {
    fn at(&self) -> Arg {
        Arg::At(self.buffer.as_ref().map_or(0, |b| b.at(0)))
    }
}

/// `[n, channels, height, width]`
#[derive(Debug, Default)]
pub struct Images {
    values: Values,
}

/// The workspace of a convolution block.
#[derive(Debug)]
pub struct ConvBlock {
    shape: ConvBlockShape,
    at: ConvBlockAt,
    /// The convolution's output; after `backward_weight` its gradient.
    y: Values,
    pooled: Images,
    dpooled: Values,
    pick: Option<Buffer<u8>>,
    /// `[6, channels]`: scale, shift, mean, inverse of the deviation, and two for the backward pass.
    norm: Floats,
    /// `[2, channels]`
    sums: Option<Buffer<f64>>,
}

impl ConvBlock {
    fn channels(&self) -> usize {
        self.shape.conv.outputs
    }

    fn height(&self) -> usize {
        self.shape.conv.side(self.shape.height)
    }

    fn width(&self) -> usize {
        self.shape.conv.side(self.shape.width)
    }

    fn pooled_len(&self, n: usize) -> usize {
        n * self.channels() * (self.height() / 2) * (self.width() / 2)
    }

    /// Values of a channel in `n` images.
    fn count(&self, n: usize) -> usize {
        n * self.height() * self.width()
    }

    fn scale(&self) -> Arg {
        self.norm.at(0)
    }

    fn shift(&self) -> Arg {
        self.norm.at(self.channels())
    }

    fn mean(&self) -> Arg {
        self.norm.at(2 * self.channels())
    }

    fn inverse(&self) -> Arg {
        self.norm.at(3 * self.channels())
    }

    fn slopes(&self) -> Arg {
        self.norm.at(4 * self.channels())
    }

    fn pick(&self) -> Arg {
        Arg::At(self.pick.as_ref().map_or(0, |b| b.at(0)))
    }

    fn sums(&self) -> Arg {
        Arg::At(self.sums.as_ref().map_or(0, |b| b.at(0)))
    }

    /// Offsets of bias, gamma and beta.
    fn channel_tensor(&self, i: usize) -> usize {
        self.at.params + self.shape.conv.weight_len() + i * self.channels()
    }

    fn running(&self, i: usize) -> usize {
        self.at.buffers + i * self.channels()
    }
}

/// One GPU, with a stream on which every operator is begun.
#[derive(Debug)]
pub struct CudaDevice {
    // In the order in which they are given back.
    blas: Blas,
    launcher: Arc<Launcher>,
    stream: Arc<Stream>,
    context: Arc<Context>,
    precision: Precision,
    /// What gradients of activations are multiplied by.
    loss_scale: f32,
    inputs: Staging<f32>,
    ids: Staging<u32>,
    work: Work,
    result: Pinned<f64>,
    counted: Pinned<u64>,
}

/// Room for what an operator needs within itself. Operators follow each other on one stream, so they share it.
#[derive(Debug, Default)]
struct Work {
    floats: Option<Buffer<f32>>,
    doubles: Option<Buffer<f64>>,
    ids: Option<Buffer<u32>>,
    /// Loss of the step, and of the evaluation.
    losses: Option<Buffer<f64>>,
    correct: Option<Buffer<u64>>,
    rows: Option<Buffer<f32>>,
    hits: Option<Buffer<u32>>,
    bad: Option<Buffer<u64>>,
    /// What the step's loss is the mean of.
    step_values: usize,
    /// Whether the evaluation's sums have begun.
    summing: bool,
    sorted: Vec<u32>,
}

/// Makes room; what was there is lost.
fn room<'a, T: crate::cuda::memory::Plain>(
    context: &Arc<Context>,
    buffer: &'a mut Option<Buffer<T>>,
    len: usize,
    what: &str,
) -> Result<&'a Buffer<T>> {
    if buffer.as_ref().is_none_or(|b| b.len() < len) {
        // First: there may not be room for both.
        *buffer = None;
        *buffer = Some(Buffer::new(context, len, what)?);
    }
    match buffer {
        Some(b) => Ok(b),
        None => Err(DeviceError::Unsupported(format!("no room for {what}"))),
    }
}

/// Rows of a chunk in sums over columns.
fn chunk(rows: usize) -> usize {
    rows.div_ceil(512).max(64)
}

/// A warp or a block for each row.
fn by_rows(rows: usize, cols: usize, most: u32) -> Geometry {
    if cols <= 1024 {
        Geometry::line(rows.div_ceil(8).min(1 << 20), 256)
    } else {
        Geometry::line(rows.min(1 << 20), if cols <= 8192 { 256 } else { most })
    }
}

/// Blocks of a reduction of a flat range.
fn reduction(n: usize) -> usize {
    n.div_ceil(8192).clamp(1, 1024)
}

/// Images of a chunk, and chunks, in sums over channels.
fn image_chunks(n: usize, channels: usize) -> (usize, usize) {
    let chunks = n.min(2048usize.div_ceil(channels));
    let each = n.div_ceil(chunks);
    (each, n.div_ceil(each))
}

impl CudaDevice {
    /// Opens a GPU. The error says which library, device or memory is missing, and what to do.
    pub fn new(options: CudaOptions) -> Result<Self> {
        let context = Context::new(options.ordinal)?;
        let stream = Stream::new(&context, -1)?;
        let blas = Blas::new(&stream, options.precision)?;
        Ok(Self {
            blas,
            launcher: Arc::new(Launcher::new(Kernels::new(&context, options.precision.define()))),
            precision: options.precision,
            loss_scale: 1.0,
            inputs: Staging::new(),
            ids: Staging::new(),
            work: Work::default(),
            result: Pinned::new(&context, 1)?,
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

    /// In which numbers it computes.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Shared with the ways to and from the host.
    pub(super) fn launcher(&self) -> &Arc<Launcher> {
        &self.launcher
    }

    /// From now on gradients of activations, and so the whole gradient, are multiplied by this.
    pub fn set_loss_scale(&mut self, scale: f32) {
        self.loss_scale = scale;
    }

    /// Parameters from the host, for comparisons.
    pub fn hold(&mut self, from: &[f32]) -> Result<crate::cuda::Inbox> {
        let mut inbox = crate::cuda::Inbox::new(self, from.len())?;
        inbox.host_mut()?.copy_from_slice(from);
        inbox.landed(self, 0..from.len())?;
        inbox.swap(self)?;
        Ok(inbox)
    }

    /// Multiplies the first `len` values of the gradient, and says how many of the results are not finite; waits for them.
    pub fn unscale(&mut self, gradient: &mut Gradient, len: usize, factor: f32) -> Result<u64> {
        if len == 0 {
            return Ok(0);
        }
        let blocks = reduction(len);
        let squares = Arg::At(room(&self.context, &mut self.work.doubles, blocks + 1, "partial sums")?.at(0));
        let total =
            Arg::At(room(&self.context, &mut self.work.doubles, blocks + 1, "partial sums")?.at(blocks));
        let bad = room(&self.context, &mut self.work.bad, blocks + 1, "partial counts")?;
        let (partial, count) = (Arg::At(bad.at(0)), Arg::At(bad.at(blocks)));
        self.launch(
            Unit::Stats,
            "unscale",
            Geometry::line(blocks, 256),
            &[
                ("g", Arg::At(gradient.values.at(0))),
                ("n", long(len)),
                ("factor", Arg::Float(factor)),
                ("partial_squares", squares),
                ("partial_bad", partial),
            ],
        )?;
        self.launch(
            Unit::Stats,
            "grad_stats_final",
            Geometry::line(1, 256),
            &[
                ("partial_squares", squares),
                ("partial_bad", partial),
                ("blocks", int(blocks)),
                ("squares", total),
                ("bad", count),
                ("accumulate", Arg::Int(0)),
            ],
        )?;
        let bad = room(&self.context, &mut self.work.bad, blocks + 1, "partial counts")?;
        bad.download(&self.stream, blocks..blocks + 1, &mut self.counted)?;
        self.stream.synchronize()?;
        Ok(self.counted.as_slice()[0])
    }

    /// Sets every value of a gradient, for comparisons: what an operator leaves out of NaNs is found.
    pub fn fill(&mut self, gradient: &Gradient, value: f32) -> Result {
        let n = gradient.len();
        self.launch(
            Unit::Elementwise,
            "fill_f32",
            Geometry::flat(n),
            &[("x", Arg::At(gradient.values.at(0))), ("value", Arg::Float(value)), ("n", long(n))],
        )
    }

    /// The gradient on the host, for comparisons; waits for it.
    pub fn read_gradient(&mut self, gradient: &Gradient) -> Result<Vec<f32>> {
        let mut to = Pinned::new(&self.context, gradient.len())?;
        gradient.values.download(&self.stream, 0..gradient.len(), &mut to)?;
        self.stream.synchronize()?;
        Ok(to.as_slice().to_vec())
    }

    fn launch(&self, unit: Unit, name: &str, geometry: Geometry, args: &[(&str, Arg)]) -> Result {
        self.launcher.launch(&self.stream, (unit, name), geometry, args)
    }

    /// The same for the kernel of the element type.
    fn typed(&self, unit: Unit, name: &str, geometry: Geometry, args: &[(&str, Arg)]) -> Result {
        self.launch(unit, &format!("{name}_{}", self.precision.suffix()), geometry, args)
    }

    fn sized<'a>(&self, values: &'a mut Values, len: usize, what: &str) -> Result<&'a Values> {
        room(&self.context, &mut values.buffer, len * self.precision.bytes(), what)?;
        values.len = len;
        Ok(values)
    }

    fn floats<'a>(&self, floats: &'a mut Floats, len: usize, what: &str) -> Result<&'a Floats> {
        room(&self.context, &mut floats.buffer, len, what)?;
        Ok(floats)
    }

    /// `out[col] = Σ x[row, col]`, or added to what is there.
    fn column_sums(&mut self, rows: usize, cols: usize, x: Arg, out: Arg) -> Result {
        let each = chunk(rows);
        let chunks = rows.div_ceil(each);
        let partial =
            Arg::At(room(&self.context, &mut self.work.floats, chunks * cols, "column sums")?.at(0));
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
        )?;
        self.column_final(partial, out, chunks, cols)
    }

    fn column_final(&self, partial: Arg, out: Arg, chunks: usize, cols: usize) -> Result {
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

    fn operand(&self, at: u64, cols: usize) -> Operand {
        Operand { at, transposed: false, cols }
    }

    fn product_linear(
        &mut self,
        shape: LinearShape,
        x: u64,
        params: &Params,
        at: LinearAt,
        y: u64,
    ) -> Result {
        let LinearShape { n, inputs, outputs } = shape;
        let element = self.precision.element();
        let weight = Operand { at: params.at(at.weight), transposed: true, cols: inputs };
        self.blas.product([n, inputs, outputs], element, self.operand(x, inputs), weight, (y, element), 0.0)
    }

    /// Bias and activation over a product.
    fn finish_linear(
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

    fn product_weight(
        &mut self,
        shape: LinearShape,
        x: u64,
        dy: u64,
        at: LinearAt,
        grads: &Gradient,
    ) -> Result {
        let LinearShape { n, inputs, outputs } = shape;
        let element = self.precision.element();
        let left = Operand { at: dy, transposed: true, cols: outputs };
        let to = (grads.values.at(at.weight), Element::F32);
        self.blas.product([outputs, n, inputs], element, left, self.operand(x, inputs), to, 0.0)?;
        match at.bias {
            Some(bias) => self.column_sums(n, outputs, Arg::At(dy), Arg::At(grads.values.at(bias))),
            None => Ok(()),
        }
    }

    fn product_input(
        &mut self,
        shape: LinearShape,
        dy: u64,
        params: &Params,
        at: LinearAt,
        dx: u64,
    ) -> Result {
        let LinearShape { n, inputs, outputs } = shape;
        let element = self.precision.element();
        let weight = self.operand(params.at(at.weight), inputs);
        self.blas.product(
            [n, outputs, inputs],
            element,
            self.operand(dy, outputs),
            weight,
            (dx, element),
            0.0,
        )
    }

    /// Sums a value for each row into the place `into` of the losses.
    fn sum_rows(&mut self, rows: usize, into: usize, accumulate: bool) -> Result {
        let losses = Arg::At(room(&self.context, &mut self.work.rows, rows, "losses")?.at(0));
        let out = Arg::At(room(&self.context, &mut self.work.losses, 2, "the loss")?.at(into));
        self.launch(
            Unit::Loss,
            "sum_f32",
            Geometry::line(1, 1024),
            &[("x", losses), ("out", out), ("n", long(rows)), ("accumulate", Arg::Int(accumulate.into()))],
        )
    }

    /// Squared differences, with their gradient where `dy` is not null, into the place `into` of the losses.
    fn squares(
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
                self.launch(
                    Unit::Elementwise,
                    &name,
                    Geometry::flat(n),
                    &[("x", target.at()), ("y", wide), ("n", long(n))],
                )?;
                wide
            }
        };
        let blocks = reduction(n);
        let partial = Arg::At(room(&self.context, &mut self.work.doubles, blocks, "partial sums")?.at(0));
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
        )?;
        let out = Arg::At(room(&self.context, &mut self.work.losses, 2, "the loss")?.at(into));
        self.launch(
            Unit::Loss,
            "sum_f64",
            Geometry::line(1, 1024),
            &[("x", partial), ("out", out), ("n", long(blocks)), ("accumulate", Arg::Int(accumulate.into()))],
        )
    }

    /// Reads one of the losses.
    fn read_loss(&mut self, place: usize) -> Result<f64> {
        let losses = room(&self.context, &mut self.work.losses, 2, "the loss")?;
        losses.download(&self.stream, place..place + 1, &mut self.result)?;
        self.stream.synchronize()?;
        Ok(self.result.as_slice()[0])
    }

    /// The device's part of an evaluation's beginning.
    fn begin_sums(&mut self) -> Result {
        if !self.work.summing {
            let losses = room(&self.context, &mut self.work.losses, 2, "the loss")?;
            losses.clear(&self.stream, 1..2)?;
            let correct = room(&self.context, &mut self.work.correct, 1, "the count")?;
            correct.clear(&self.stream, 0..1)?;
            self.work.summing = true;
        }
        Ok(())
    }

    /// Sums of two values a channel: partials into `block.sums`.
    fn channel_sums(&mut self, block: &mut ConvBlock, chunks: usize) -> Result {
        let c = block.channels();
        room(&self.context, &mut block.sums, 2 * c, "channel sums")?;
        let partial = Arg::At(room(&self.context, &mut self.work.doubles, 0, "")?.at(0));
        self.launch(
            Unit::BatchNorm,
            "bn_sum",
            Geometry::line((2 * c).div_ceil(8), 256),
            &[("partial", partial), ("sums", block.sums()), ("chunks", int(chunks)), ("m", int(2 * c))],
        )
    }

    fn finalize(&self, block: &ConvBlock, n: usize, params: &Params, grads: Option<&Gradient>) -> Result {
        let running = |i| Arg::At(params.f32_at(block.running(i)));
        let change = |i| Arg::At(grads.map_or(0, |g| g.values.at(block.running(i))));
        self.launch(
            Unit::BatchNorm,
            "bn_finalize",
            Geometry::line(block.channels().div_ceil(256), 256),
            &[
                ("sums", block.sums()),
                ("count", Arg::Double(block.count(n) as f64)),
                ("gamma", Arg::At(params.f32_at(block.channel_tensor(1)))),
                ("beta", Arg::At(params.f32_at(block.channel_tensor(2)))),
                ("running_mean", running(0)),
                ("running_var", running(1)),
                ("scale", block.scale()),
                ("shift", block.shift()),
                ("mean", block.mean()),
                ("inv_std", block.inverse()),
                ("d_running_mean", change(0)),
                ("d_running_var", change(1)),
                ("c", int(block.channels())),
                ("eps", Arg::Float(crate::cpu::norm::EPSILON)),
                ("momentum", Arg::Float(crate::cpu::norm::MOMENTUM)),
            ],
        )
    }

    /// The dimensions that every convolution kernel takes.
    fn conv_dims(block: &ConvBlock, n: usize) -> [(&'static str, Arg); 7] {
        let ConvBlockShape { conv, height, width, .. } = block.shape;
        [
            ("n", int(n)),
            ("cin", int(conv.inputs)),
            ("h", int(height)),
            ("w", int(width)),
            ("cout", int(conv.outputs)),
            ("k", int(conv.kernel)),
            ("pad", int(conv.pad)),
        ]
    }

    /// Pixels of a block of the convolution kernels.
    fn pixels(&self) -> usize {
        if self.precision.cast().is_some() { 128 } else { 256 }
    }

    fn attention_geometry(&self, s: AttentionShape, backward: bool) -> Geometry {
        let half = self.precision.cast().is_some();
        let rows = if half { 64 } else { 32 };
        let hd = s.head;
        let other = if hd <= 64 { 64 } else { 32 };
        let shared = match (half, backward) {
            (false, false) => 384 * (hd + 4) + 4608,
            (true, false) => 640 * (hd + 8),
            (false, true) => 512 * (hd + 4) + 9472,
            (true, true) => (256 + 8 * other) * (hd + 8) + 16 * other,
        };
        Geometry::grid([s.time.div_ceil(rows), s.heads, s.batch], 128).with_shared(shared)
    }

    fn attention_kernel(&self, name: &str, s: AttentionShape) -> Result<String> {
        if !matches!(s.head, 16 | 32 | 64 | 128) || s.heads > 65_535 || s.batch > 65_535 {
            return Err(DeviceError::Unsupported(format!(
                "attention with {} heads of {} values over {} sequences: on a GPU heads have 16, 32, 64 or 128 values, and \
                 there are at most 65535 of heads and of sequences",
                s.heads, s.head, s.batch
            )));
        }
        if self.precision == Precision::Bf16 && self.context.compute() < (8, 0) {
            return Err(DeviceError::Unsupported(format!(
                "{} has no products in bf16; use train.precision = \"f16\" or \"f32\"",
                self.context.name()
            )));
        }
        Ok(format!("{name}_{}_{}", self.precision.suffix(), s.head))
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Pinned memory is not given back under a copy.
        let _ = self.stream.synchronize();
    }
}

/// As the kernels number activations.
fn code(activation: Activation) -> i32 {
    match activation {
        Activation::None => 0,
        Activation::Relu => 1,
        Activation::Gelu => 2,
    }
}

impl Device for CudaDevice {
    type Params = Params;
    type Grads = Gradient;
    type Values = Values;
    type Floats = Floats;
    type Ids = Ids;
    type Images = Images;
    type ConvBlock = ConvBlock;

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
                self.launch(Unit::Elementwise, cast, Geometry::flat(from.len()), &args)
            }
        }
    }

    fn load_ids(&mut self, from: &[u32], to: &mut Ids) -> Result {
        self.context.bind()?;
        to.host.clear();
        to.host.extend_from_slice(from);
        if from.is_empty() {
            return Ok(());
        }
        let buffer = room(&self.context, &mut to.buffer, from.len(), "labels")?;
        self.ids.upload(&self.stream, from, buffer)
    }

    fn read(&mut self, values: &Values) -> Result<Vec<f32>> {
        let n = values.len;
        let mut to = Pinned::new(&self.context, n)?;
        match (self.precision.cast(), &values.buffer) {
            (_, None) => {}
            (None, Some(from)) => from.download(&self.stream, 0..n * 4, &mut to)?,
            (Some(_), Some(_)) if n == 0 => {}
            (Some(_), Some(_)) => {
                let wide = room(&self.context, &mut self.work.floats, n, "values to read")?;
                let name = format!("cast_{}_to_f32", self.precision.suffix());
                let args = [("x", values.at()), ("y", Arg::At(wide.at(0))), ("n", long(n))];
                self.launch(Unit::Elementwise, &name, Geometry::flat(n), &args)?;
                let wide = room(&self.context, &mut self.work.floats, n, "values to read")?;
                wide.download(&self.stream, 0..n, &mut to)?;
            }
        }
        self.stream.synchronize()?;
        Ok(to.as_slice().to_vec())
    }

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
        self.sized(y, len, "activations")?;
        let before = match before {
            Some(b) if activation == Activation::Gelu => self.sized(b, len, "activations")?.at(),
            _ => {
                assert!(activation != Activation::Gelu, "a GELU needs room for its argument");
                Arg::At(0)
            }
        };
        self.product_linear(shape, x.address(), params, at, y.address())?;
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
        self.product_weight(shape, x.address(), dy.address(), at, grads)
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
        self.product_input(shape, dy.address(), params, at, dx.address())
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
        self.typed(Unit::Elementwise, "act_backward", Geometry::flat(dy.len), &args)
    }

    fn softmax_cross_entropy(
        &mut self,
        rows: usize,
        classes: usize,
        logits: &mut Values,
        labels: &Ids,
    ) -> Result {
        let losses = Arg::At(room(&self.context, &mut self.work.rows, rows, "losses")?.at(0));
        self.typed(
            Unit::Loss,
            "softmax_xent",
            by_rows(rows, classes, 1024),
            &[
                ("logits", logits.at()),
                ("labels", labels.at()),
                ("dlogits", logits.at()),
                ("losses", losses),
                ("correct", Arg::At(0)),
                ("rows", int(rows)),
                ("cols", int(classes)),
                ("scale", Arg::Float(self.loss_scale / rows as f32)),
            ],
        )?;
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
        self.typed(
            Unit::Loss,
            "xent",
            by_rows(rows, classes, 1024),
            &[
                ("logits", logits.at()),
                ("labels", labels.at()),
                ("losses", losses),
                ("correct", hits),
                ("rows", int(rows)),
                ("cols", int(classes)),
            ],
        )?;
        self.sum_rows(rows, 1, true)?;
        let out = Arg::At(room(&self.context, &mut self.work.correct, 1, "the count")?.at(0));
        self.launch(
            Unit::Loss,
            "sum_u32",
            Geometry::line(1, 1024),
            &[("x", hits), ("out", out), ("n", long(rows)), ("accumulate", Arg::Int(1))],
        )
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
        Ok(Sums { loss, correct: self.counted.as_slice()[0] })
    }

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
        let gamma = Arg::At(params.f32_at(at.gamma()));
        let (rows_arg, cols_arg, eps) = (int(rows), int(cols), Arg::Float(NORM_EPSILON));
        let (mean, inverse) = (stats.at(0), stats.at(rows));
        let geometry = by_rows(rows, cols, 256);
        match at.beta() {
            Some(beta) => self.typed(
                Unit::Norm,
                "layernorm",
                geometry,
                &[
                    ("x", x.at()),
                    ("residual", other),
                    ("sum", sum),
                    ("gamma", gamma),
                    ("beta", Arg::At(params.f32_at(beta))),
                    ("y", y.at()),
                    ("mean", mean),
                    ("rstd", inverse),
                    ("rows", rows_arg),
                    ("cols", cols_arg),
                    ("eps", eps),
                ],
            ),
            None => self.typed(
                Unit::Norm,
                "rmsnorm",
                geometry,
                &[
                    ("x", x.at()),
                    ("residual", other),
                    ("sum", sum),
                    ("gamma", gamma),
                    ("y", y.at()),
                    ("rstd", inverse),
                    ("rows", rows_arg),
                    ("cols", cols_arg),
                    ("eps", eps),
                ],
            ),
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
        let gamma = Arg::At(params.f32_at(at.gamma()));
        let add = add.map_or(Arg::At(0), Values::at);
        let (mean, inverse) = (stats.at(0), stats.at(rows));
        let each = chunk(rows);
        let chunks = rows.div_ceil(each);
        let parts = if at.beta().is_some() { 2 } else { 1 };
        let partial = room(&self.context, &mut self.work.floats, chunks * parts * cols, "column sums")?;
        let partial = Arg::At(partial.at(0));
        let columns = Geometry::grid([cols.div_ceil(256), chunks, 1], 256);
        let geometry = by_rows(rows, cols, 256);
        // The parameters' gradients first: `dx` may lie over `dy`.
        match at.beta() {
            Some(beta) => {
                self.typed(
                    Unit::Norm,
                    "layernorm_params_partial",
                    columns,
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
                )?;
                self.typed(
                    Unit::Norm,
                    "layernorm_backward",
                    geometry,
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
                )?;
                // One after the other where beta lies right behind gamma, as it does in every built-in model.
                if beta == at.gamma() + cols {
                    let out = Arg::At(grads.values.at(at.gamma()));
                    return self.column_final(partial, out, chunks, 2 * cols);
                }
                Err(DeviceError::Unsupported("a norm whose beta does not follow its gamma".into()))
            }
            None => {
                self.typed(
                    Unit::Norm,
                    "rmsnorm_params_partial",
                    columns,
                    &[
                        ("dy", dy.at()),
                        ("x", x.at()),
                        ("rstd", inverse),
                        ("partial", partial),
                        ("rows", int(rows)),
                        ("cols", int(cols)),
                        ("rows_per_chunk", int(each)),
                    ],
                )?;
                self.typed(
                    Unit::Norm,
                    "rmsnorm_backward",
                    geometry,
                    &[
                        ("dy", dy.at()),
                        ("x", x.at()),
                        ("gamma", gamma),
                        ("rstd", inverse),
                        ("residual_grad", add),
                        ("dx", dx.at()),
                        ("rows", int(rows)),
                        ("cols", int(cols)),
                    ],
                )?;
                self.column_final(partial, Arg::At(grads.values.at(at.gamma())), chunks, cols)
            }
        }
    }

    fn add(&mut self, a: &Values, b: &Values, sum: &mut Values) -> Result {
        self.sized(sum, a.len, "activations")?;
        let args = [("y", sum.at()), ("a", a.at()), ("b", b.at()), ("n", long(a.len))];
        self.typed(Unit::Elementwise, "add", Geometry::flat(a.len), &args)
    }

    fn attention(&mut self, s: AttentionShape, qkv: &Values, out: &mut Values, stats: &mut Floats) -> Result {
        let name = self.attention_kernel("attention", s)?;
        self.sized(out, s.rows() * s.width(), "activations")?;
        // Twice: the backward pass keeps a sum for each row beside it.
        self.floats(stats, 2 * s.rows() * s.heads, "statistics of an attention")?;
        self.launch(
            Unit::Attention,
            &name,
            self.attention_geometry(s, false),
            &[
                ("qkv", qkv.at()),
                ("out", out.at()),
                ("lse", stats.at(0)),
                ("batch", int(s.batch)),
                ("time", int(s.time)),
                ("heads", int(s.heads)),
                ("scale", Arg::Float(s.scale())),
            ],
        )
    }

    fn attention_backward(
        &mut self,
        s: AttentionShape,
        qkv: &Values,
        out: &Values,
        stats: &Floats,
        dout: &Values,
        dqkv: &mut Values,
    ) -> Result {
        self.sized(dqkv, 3 * s.rows() * s.width(), "gradients of activations")?;
        let (lse, delta) = (stats.at(0), stats.at(s.rows() * s.heads));
        self.typed(
            Unit::Attention,
            "attention_delta",
            Geometry::line((s.rows() * s.heads).div_ceil(8).min(1 << 20), 256),
            &[
                ("dout", dout.at()),
                ("out", out.at()),
                ("delta", delta),
                ("batch", int(s.batch)),
                ("time", int(s.time)),
                ("heads", int(s.heads)),
                ("hd", int(s.head)),
            ],
        )?;
        for pass in ["attention_backward_kv", "attention_backward_q"] {
            let name = self.attention_kernel(pass, s)?;
            self.launch(
                Unit::Attention,
                &name,
                self.attention_geometry(s, true),
                &[
                    ("qkv", qkv.at()),
                    ("dout", dout.at()),
                    ("lse", lse),
                    ("delta", delta),
                    ("dqkv", dqkv.at()),
                    ("batch", int(s.batch)),
                    ("time", int(s.time)),
                    ("heads", int(s.heads)),
                    ("scale", Arg::Float(s.scale())),
                ],
            )?;
        }
        Ok(())
    }

    fn embedding(
        &mut self,
        s: EmbeddingShape,
        tokens: &Ids,
        params: &Params,
        at: EmbeddingAt,
        y: &mut Values,
    ) -> Result {
        let rows = s.batch * s.time;
        self.sized(y, rows * s.cols, "activations")?;
        self.typed(
            Unit::Embedding,
            "embedding",
            Geometry::line(rows.div_ceil(8).min(1 << 20), 256),
            &[
                ("tokens", tokens.at()),
                ("table", Arg::At(params.f32_at(at.tokens))),
                ("positions", Arg::At(params.f32_at(at.positions))),
                ("y", y.at()),
                ("rows", int(rows)),
                ("cols", int(s.cols)),
                ("time", int(s.time)),
                ("vocab", int(s.vocab)),
            ],
        )
    }

    fn embedding_backward(
        &mut self,
        s: EmbeddingShape,
        tokens: &Ids,
        dy: &Values,
        at: EmbeddingAt,
        grads: &mut Gradient,
    ) -> Result {
        let rows = tokens.host.len();
        let unique = by_token(&tokens.host, s.vocab, &mut self.work.sorted);
        let sorted = room(&self.context, &mut self.work.ids, 3 * rows + 1, "tokens in order")?;
        self.ids.upload(&self.stream, &self.work.sorted, sorted)?;
        let (order, starts, ids) =
            (Arg::At(sorted.at(0)), Arg::At(sorted.at(rows)), Arg::At(sorted.at(rows + unique + 1)));
        self.typed(
            Unit::Embedding,
            "embedding_backward",
            Geometry::grid([unique, s.cols.div_ceil(256), 1], 256),
            &[
                ("dy", dy.at()),
                ("order", order),
                ("starts", starts),
                ("ids", ids),
                ("dtable", Arg::At(grads.values.at(at.tokens))),
                ("unique", int(unique)),
                ("cols", int(s.cols)),
                ("accumulate", Arg::Int(1)),
            ],
        )?;
        // Rows that no sequence reaches.
        grads
            .values
            .clear(&self.stream, at.positions + s.time * s.cols..at.positions + s.context * s.cols)?;
        self.typed(
            Unit::Embedding,
            "position_backward",
            Geometry::flat(s.time * s.cols),
            &[
                ("dy", dy.at()),
                ("dpositions", Arg::At(grads.values.at(at.positions))),
                ("batch", int(s.batch)),
                ("time", int(s.time)),
                ("cols", int(s.cols)),
                ("accumulate", Arg::Int(0)),
            ],
        )
    }

    fn images(&self, _channels: usize, _height: usize, _width: usize, _border: usize) -> Images {
        Images::default()
    }

    fn load_images(&mut self, from: &[f32], _n: usize, to: &mut Images) -> Result {
        self.load_values(from, &mut to.values)
    }

    fn conv_block(&self, shape: ConvBlockShape, at: ConvBlockAt) -> ConvBlock {
        ConvBlock {
            shape,
            at,
            y: Values::default(),
            pooled: Images::default(),
            dpooled: Values::default(),
            pick: None,
            norm: Floats::default(),
            sums: None,
        }
    }

    fn conv_block_output(block: &ConvBlock) -> &Images {
        &block.pooled
    }

    fn conv_block_forward(
        &mut self,
        block: &mut ConvBlock,
        x: &Images,
        n: usize,
        params: &Params,
        train: bool,
    ) -> Result {
        let (c, h, w) = (block.channels(), block.height(), block.width());
        let pooled = block.pooled_len(n);
        self.sized(&mut block.y, n * c * h * w, "a convolution")?;
        self.sized(&mut block.pooled.values, pooled, "pooled images")?;
        self.floats(&mut block.norm, 6 * c, "a norm")?;
        room(&self.context, &mut block.pick, pooled, "places of maxima")?;
        let [n_arg, rest @ ..] = Self::conv_dims(block, n);
        let [cin, hh, ww, cout, k, pad] = rest;
        self.typed(
            Unit::Conv,
            "conv_forward",
            Geometry::grid([(n * h * w).div_ceil(self.pixels()), c.div_ceil(32), 1], 128),
            &[
                ("x", x.values.at()),
                ("weight", Arg::At(params.at(block.at.params))),
                ("bias", Arg::At(params.f32_at(block.channel_tensor(0)))),
                ("y", block.y.at()),
                n_arg,
                cin,
                hh,
                ww,
                cout,
                k,
                pad,
            ],
        )?;
        if train {
            let (each, chunks) = image_chunks(n, c);
            let room = room(&self.context, &mut self.work.doubles, chunks * 2 * c, "channel sums")?;
            let partial = Arg::At(room.at(0));
            self.typed(
                Unit::BatchNorm,
                "bn_stats_partial",
                Geometry::grid([c, chunks, 1], 256),
                &[
                    ("y", block.y.at()),
                    ("partial", partial),
                    ("n", int(n)),
                    ("c", int(c)),
                    ("hw", int(h * w)),
                    ("images_per_chunk", int(each)),
                ],
            )?;
            self.channel_sums(block, chunks)?;
            self.finalize(block, n, params, None)?;
        } else {
            self.launch(
                Unit::BatchNorm,
                "bn_inference",
                Geometry::line(c.div_ceil(256), 256),
                &[
                    ("gamma", Arg::At(params.f32_at(block.channel_tensor(1)))),
                    ("beta", Arg::At(params.f32_at(block.channel_tensor(2)))),
                    ("running_mean", Arg::At(params.f32_at(block.running(0)))),
                    ("running_var", Arg::At(params.f32_at(block.running(1)))),
                    ("scale", block.scale()),
                    ("shift", block.shift()),
                    ("c", int(c)),
                    ("eps", Arg::Float(crate::cpu::norm::EPSILON)),
                ],
            )?;
        }
        self.typed(
            Unit::BatchNorm,
            "bn_relu_pool",
            Geometry::flat(8 * pooled),
            &[
                ("y", block.y.at()),
                ("scale", block.scale()),
                ("shift", block.shift()),
                ("pooled", block.pooled.values.at()),
                ("pick", block.pick()),
                ("n", int(n)),
                ("c", int(c)),
                ("h", int(h)),
                ("w", int(w)),
            ],
        )
    }

    fn conv_block_buffers(&mut self, block: &ConvBlock, params: &Params, grads: &mut Gradient) -> Result {
        let n = block.y.len / (block.channels() * block.height() * block.width());
        self.finalize(block, n, params, Some(grads))
    }

    fn conv_block_backward_norm(
        &mut self,
        block: &mut ConvBlock,
        n: usize,
        _params: &Params,
        grads: &mut Gradient,
    ) -> Result {
        let (c, h, w) = (block.channels(), block.height(), block.width());
        let (each, chunks) = image_chunks(n, c);
        let partial = room(&self.context, &mut self.work.doubles, chunks * 2 * c, "channel sums")?;
        let partial = Arg::At(partial.at(0));
        self.typed(
            Unit::BatchNorm,
            "bn_pool_backward_partial",
            Geometry::grid([c, chunks, 1], 256),
            &[
                ("dpooled", block.dpooled.at()),
                ("pick", block.pick()),
                ("y", block.y.at()),
                ("mean", block.mean()),
                ("inv_std", block.inverse()),
                ("partial", partial),
                ("n", int(n)),
                ("c", int(c)),
                ("h", int(h)),
                ("w", int(w)),
                ("images_per_chunk", int(each)),
            ],
        )?;
        self.channel_sums(block, chunks)?;
        self.launch(
            Unit::BatchNorm,
            "bn_write_grads",
            Geometry::line(c.div_ceil(256), 256),
            &[
                ("sums", block.sums()),
                ("dgamma", Arg::At(grads.values.at(block.channel_tensor(1)))),
                ("dbeta", Arg::At(grads.values.at(block.channel_tensor(2)))),
                ("c", int(c)),
            ],
        )
    }

    fn conv_block_backward_weight(
        &mut self,
        block: &mut ConvBlock,
        x: &Images,
        n: usize,
        _params: &Params,
        grads: &mut Gradient,
    ) -> Result {
        let (c, h, w) = (block.channels(), block.height(), block.width());
        self.launch(
            Unit::BatchNorm,
            "bn_backward_slopes",
            Geometry::line(c.div_ceil(256), 256),
            &[
                ("sums", block.sums()),
                ("count", Arg::Double(block.count(n) as f64)),
                ("scale", block.scale()),
                ("inv_std", block.inverse()),
                ("slopes", block.slopes()),
                ("c", int(c)),
            ],
        )?;
        self.typed(
            Unit::BatchNorm,
            "bn_relu_pool_backward",
            Geometry::flat(8 * n * c * h.div_ceil(2) * w.div_ceil(2)),
            &[
                ("dpooled", block.dpooled.at()),
                ("pick", block.pick()),
                ("y", block.y.at()),
                ("scale", block.scale()),
                ("mean", block.mean()),
                ("slopes", block.slopes()),
                ("dy", block.y.at()),
                ("n", int(n)),
                ("c", int(c)),
                ("h", int(h)),
                ("w", int(w)),
            ],
        )?;
        let taps = block.shape.conv.weight_len() / c;
        let (across, down) = ((taps + 1).div_ceil(64), c.div_ceil(32));
        let pixels = block.count(n);
        let chunks = 1024usize.div_ceil(across * down).clamp(1, pixels.div_ceil(256));
        let each = pixels.div_ceil(chunks).div_ceil(32) * 32;
        let chunks = pixels.div_ceil(each);
        let partial = room(&self.context, &mut self.work.floats, chunks * c * (taps + 1), "weight sums")?;
        let partial = Arg::At(partial.at(0));
        let [n_arg, rest @ ..] = Self::conv_dims(block, n);
        let [cin, hh, ww, cout, k, pad] = rest;
        self.typed(
            Unit::Conv,
            "conv_backward_weight_partial",
            Geometry::grid([across, down, chunks], 128),
            &[
                ("x", x.values.at()),
                ("dy", block.y.at()),
                ("partial", partial),
                n_arg,
                cin,
                hh,
                ww,
                cout,
                k,
                pad,
                ("pixels_per_chunk", int(each)),
            ],
        )?;
        self.launch(
            Unit::Conv,
            "conv_backward_weight_final",
            Geometry::line((c * (taps + 1)).div_ceil(32), 256),
            &[
                ("partial", partial),
                ("dweight", Arg::At(grads.values.at(block.at.params))),
                ("dbias", Arg::At(grads.values.at(block.channel_tensor(0)))),
                ("chunks", int(chunks)),
                ("cout", int(c)),
                ("K", int(taps)),
                ("accumulate", Arg::Int(0)),
            ],
        )
    }

    fn conv_block_backward_input(
        &mut self,
        block: &mut ConvBlock,
        n: usize,
        params: &Params,
        before: &mut ConvBlock,
    ) -> Result {
        let ConvBlockShape { conv, height, width, .. } = block.shape;
        let pooled = before.pooled_len(n);
        self.sized(&mut before.dpooled, pooled, "gradients of images")?;
        let [n_arg, rest @ ..] = Self::conv_dims(block, n);
        let [cin, hh, ww, cout, k, pad] = rest;
        self.typed(
            Unit::Conv,
            "conv_backward_input",
            Geometry::grid([(n * height * width).div_ceil(self.pixels()), conv.inputs.div_ceil(32), 1], 128),
            &[
                ("dy", block.y.at()),
                ("weight", Arg::At(params.at(block.at.params))),
                ("dx", before.dpooled.at()),
                n_arg,
                cin,
                hh,
                ww,
                cout,
                k,
                pad,
            ],
        )
    }

    fn image_linear(
        &mut self,
        shape: LinearShape,
        x: &ConvBlock,
        params: &Params,
        at: LinearAt,
        y: &mut Values,
    ) -> Result {
        self.linear(shape, &x.pooled.values, params, at, Activation::None, y, None)
    }

    fn image_linear_backward_weight(
        &mut self,
        shape: LinearShape,
        x: &ConvBlock,
        dy: &Values,
        at: LinearAt,
        grads: &mut Gradient,
    ) -> Result {
        self.linear_backward_weight(shape, &x.pooled.values, dy, at, grads)
    }

    fn image_linear_backward_input(
        &mut self,
        shape: LinearShape,
        dy: &Values,
        params: &Params,
        at: LinearAt,
        x: &mut ConvBlock,
    ) -> Result {
        self.linear_backward_input(shape, dy, params, at, &mut x.dpooled)
    }
}

/// Orders places by their token, equal ones as they come: `order[rows]`, `starts[unique + 1]`, `ids[unique]`, one after the
/// other in `out`. Returns the number of different tokens.
fn by_token(tokens: &[u32], vocab: usize, out: &mut Vec<u32>) -> usize {
    let mut begins = vec![0u32; vocab + 1];
    for &t in tokens {
        begins[t as usize + 1] += 1;
    }
    let present: Vec<u32> = (0..vocab as u32).filter(|t| begins[*t as usize + 1] > 0).collect();
    for i in 0..vocab {
        begins[i + 1] += begins[i];
    }
    out.clear();
    out.resize(tokens.len(), 0);
    let starts: Vec<u32> = present.iter().map(|t| begins[*t as usize]).collect();
    for (place, &t) in tokens.iter().enumerate() {
        let next = &mut begins[t as usize];
        out[*next as usize] = place as u32;
        *next += 1;
    }
    out.extend(&starts);
    out.push(tokens.len() as u32);
    out.extend(&present);
    present.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_ordered_by_their_token() {
        let mut out = Vec::new();
        assert_eq!(by_token(&[3, 1, 3, 0, 3], 5, &mut out), 3);
        assert_eq!(out, [3, 1, 0, 2, 4, 0, 1, 2, 5, 0, 1, 3]);
    }
}
