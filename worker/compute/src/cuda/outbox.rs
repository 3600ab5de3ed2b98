//! Transfers gradients from the device to the host.
//!
//! ```text
//!  operators ─▶ Gradient ─event─▶ Outbox: encode ─▶ copy ─▶ pinned memory = the payload of a push
//! ```
//!
//! The copies have their own stream, so that they overlap the backward pass and the inbox's copies.
//!
//! In a group of ranks only rank 0 sends. It sends the mean over the ranks, which the outbox's stream reduces in
//! place before it encodes.

use crate::{
    cuda::{
        device::CudaDevice,
        driver::{Context, Event, Stream},
        flat::Gradient,
        kernels::Unit,
        launch::{Arg, Geometry, Launcher, long},
        memory::{Buffer, Pinned},
        nccl::Nccl,
    },
    error::{DeviceError, Result},
};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

/// The wire format of values: the job's encodings, on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Unchanged.
    F32,
    /// The upper half of an f32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// Bytes with one scale per block of 1024.
    Int8,
}

impl Wire {
    const BLOCK: usize = 1024;

    /// Bytes of this many encoded values.
    pub fn bytes(self, values: usize) -> usize {
        match self {
            Self::F32 => values * 4,
            Self::Bf16 | Self::F16 => values * 2,
            Self::Int8 => values + values.div_ceil(Self::BLOCK) * 4,
        }
    }
}

/// Transfers gradients to the host.
#[derive(Debug)]
pub struct Outbox {
    stream: Arc<Stream>,
    launcher: Arc<Launcher>,
    pool: Arc<Pool>,
    /// Memory for encoded buckets. A bucket starts at the byte offset that its values would have in f32.
    encoded: Option<Buffer<u8>>,
    ready: Event,
    sent: Event,
}

impl Outbox {
    /// For a device.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let context = device.context();
        Ok(Self {
            stream: Stream::new(context, 0)?,
            launcher: device.launcher().clone(),
            pool: Arc::new(Pool { context: context.clone(), free: Mutex::default() }),
            encoded: None,
            ready: Event::new(context)?,
            sent: Event::new(context)?,
        })
    }

    /// Makes later work on the device's stream, which may overwrite the gradient, wait for all sent parts.
    pub fn begin(&mut self, stream: &Stream) -> Result {
        self.sent.record(&self.stream)?;
        stream.wait(&self.sent)
    }

    /// Records that present work of the device's stream completes the gradient of the parts sent next.
    pub fn mark(&mut self, stream: &Stream) -> Result {
        self.ready.record(stream)?;
        self.stream.wait(&self.ready)
    }

    /// Starts to replace a part of the gradient by the mean over the group's ranks, after the last mark. All ranks
    /// call it; rank 0 then sends the part.
    pub fn reduce(&mut self, gradient: &Gradient, part: Range<usize>, group: &Nccl) -> Result {
        group.all_reduce_mean(&gradient.values, part, &self.stream)
    }

    /// Starts to copy a part of the gradient to the host, after the last mark and all work started here before.
    pub fn send(&mut self, from: &Gradient, part: Range<usize>, wire: Wire) -> Result<GradientPart> {
        let n = part.len();
        let (name, geometry) = match wire {
            Wire::F32 => return self.send_values(&from.values, part),
            Wire::Bf16 => ("encode_bf16", Geometry::flat(n)),
            Wire::F16 => ("encode_f16", Geometry::flat(n)),
            Wire::Int8 => ("encode_int8", Geometry::line(n.div_ceil(Wire::BLOCK).min(1 << 20), 256)),
        };
        let bytes = wire.bytes(n);
        let mut to = self.pool.take(bytes)?;
        // Each bucket has its own memory, because the next one is encoded while this one is copied.
        let need = from.len() * 4 + 4;
        if self.encoded.as_ref().is_none_or(|e| e.len() < need) {
            self.encoded = Some(Buffer::new(self.stream.context(), need, "encoded gradients")?);
        }
        let Some(encoded) = &self.encoded else {
            return Err(DeviceError::Unsupported(format!(
                "{}: no room for encoded gradients",
                self.stream.context().name()
            )));
        };
        let at = part.start * 4;
        let values =
            [("g", Arg::At(from.values.at(part.start))), ("out", Arg::At(encoded.at(at))), ("n", long(n))];
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe { self.launcher.launch(&self.stream, (Unit::Encode, name), geometry, &values) }?;
        encoded.download(&self.stream, at..at + bytes, &mut to)?;
        Ok(GradientPart(PinnedBytes { memory: Some(to), len: bytes, pool: self.pool.clone() }))
    }

    /// Likewise, for unencoded values in any buffer.
    pub(super) fn send_values(&mut self, from: &Buffer<f32>, part: Range<usize>) -> Result<GradientPart> {
        let bytes = Wire::F32.bytes(part.len());
        let mut to = self.pool.take(bytes)?;
        from.download(&self.stream, part, &mut to)?;
        Ok(GradientPart(PinnedBytes { memory: Some(to), len: bytes, pool: self.pool.clone() }))
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

/// A part of the gradient that may still be in transfer.
#[derive(Debug)]
pub struct GradientPart(PinnedBytes);

impl GradientPart {
    /// Waits for the transfer.
    pub fn wait(self) -> Result<PinnedBytes> {
        self.0.memory.as_ref().map_or(Ok(()), Pinned::wait)?;
        Ok(self.0)
    }
}

/// Bytes in pinned memory, which returns to its pool with the last reference.
#[derive(Debug)]
pub struct PinnedBytes {
    memory: Option<Pinned<u8>>,
    len: usize,
    pool: Arc<Pool>,
}

impl PinnedBytes {
    /// The bytes as f32 values, if they were sent unencoded.
    pub(super) fn values(&self) -> &[f32] {
        // SAFETY: every pattern of bits is an f32.
        let (before, values, behind) = unsafe { self.as_ref().align_to::<f32>() };
        debug_assert!(before.is_empty() && behind.is_empty(), "pinned memory begins at a page");
        values
    }
}

impl AsRef<[u8]> for PinnedBytes {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |m| &m.values()[..self.len])
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }
}

/// Pinned memory for reuse. It holds as much as was in transfer at once: the client's window and one step.
#[derive(Debug)]
struct Pool {
    context: Arc<Context>,
    free: Mutex<BTreeMap<usize, Vec<Pinned<u8>>>>,
}

impl Pool {
    fn take(&self, bytes: usize) -> Result<Pinned<u8>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        match free.get_mut(&bytes).and_then(Vec::pop) {
            Some(p) => Ok(p),
            None => Pinned::new(&self.context, bytes),
        }
    }

    fn give(&self, memory: Pinned<u8>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(memory.len()).or_default().push(memory);
    }
}
