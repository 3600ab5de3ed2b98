//! A GPU as a [`Device`](crate::device::Device). Its buffers and its operators, by family, have their own files.

mod attention;
mod buffers;
mod conv;
mod embedding;
mod linear;
mod loss;
mod norm;
mod precision;
mod statistics;

pub(super) use precision::Element;
pub use precision::Precision;
pub use statistics::StepResult;

use crate::{
    cuda::{
        blas::Blas,
        driver::{Context, Stream},
        kernels::{Kernels, Unit},
        launch::{Arg, Geometry, Launcher},
        library,
        lt::Lt,
        memory::{Buffer, Pinned, Plain, Staging},
        nccl::Nccl,
    },
    error::{DeviceError, Result},
};
use std::sync::Arc;

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
    graphs: bool,
    /// The factor on gradients of activations.
    loss_scale: f32,
    inputs: Staging<f32>,
    ids: Staging<u32>,
    orders: Staging<u32>,
    work: Work,
    result: Pinned<f64>,
    squares: Pinned<f64>,
    counted: Pinned<u64>,
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
    step_values: usize,
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
        context.refuse_in_recording(|| format!("room for {what}"))?;
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

    /// Whether steps should be recorded and replayed.
    pub fn uses_graphs(&self) -> bool {
        self.graphs
    }

    /// Changes with each allocation or deallocation of device memory: earlier recordings may have invalid
    /// addresses.
    pub fn layout(&self) -> u64 {
        self.context().layout()
    }

    /// The number of values in the last step's mean loss, for [`Self::repeats`].
    pub fn step_values(&self) -> usize {
        self.work.step_values
    }

    /// Announces a replayed step over this many values, in place of the last called operators, for the next read of
    /// the loss.
    pub fn repeats(&mut self, step_values: usize) {
        self.work.step_values = step_values;
    }

    /// Bytes of an activation.
    pub(super) fn element_bytes(&self) -> usize {
        self.precision.bytes()
    }

    /// Starts a kernel on the device's stream.
    ///
    /// # Safety
    /// See [`Launcher::launch`].
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
    /// # Safety
    /// See [`Launcher::launch`].
    unsafe fn typed(&self, unit: Unit, name: &str, geometry: Geometry, args: &[(&str, Arg)]) -> Result {
        // SAFETY: the caller guarantees it.
        unsafe { self.launch(unit, &format!("{name}_{}", self.precision.suffix()), geometry, args) }
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Pinned memory must not be freed during a copy.
        let _ = self.stream.synchronize();
    }
}
