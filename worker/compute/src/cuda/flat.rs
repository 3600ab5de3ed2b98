//! Parameters and gradients as flat vectors on the device, and their transfers to and from the host.
//!
//! ```text
//!  pull ─▶ Inbox: host (pinned) ─copy, bucket by bucket─▶ back ─swap─▶ front ─▶ operators
//!  operators ─▶ Gradient ─event─▶ Outbox: encode ─▶ copy ─▶ pinned memory = the payload of a push
//! ```
//!
//! Both directions have their own streams, so that copies overlap the backward pass, in both directions at once.
//!
//! In a group of ranks only rank 0 has these transfers. It broadcasts parameters from its `back` to the others'
//! `back`. It sends the mean over the ranks, which the outbox's stream reduces in place before it encodes.

use crate::{
    cuda::{
        device::CudaDevice,
        driver::{Context, Event, Stream},
        kernels::Unit,
        launch::{Arg, Geometry, Launcher, long},
        memory::{Buffer, Pinned, clear_at},
        nccl::Nccl,
    },
    error::{DeviceError, Result},
};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

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
    /// # Panics If no run contains it.
    fn of(&self, index: usize) -> (&Run, u64) {
        let run = self.0.range(..=index).next_back().map(|(_, run)| run).filter(|run| index < run.range.end);
        let Some(run) = run else { panic!("value {index} of the flat vector is not on the device") };
        (run, (index - run.range.start) as u64)
    }
}

impl Params {
    fn new(device: &CudaDevice, len: usize, what: &str) -> Result<Self> {
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

/// Transfers weights to the device.
#[derive(Debug)]
pub struct Inbox {
    stream: Arc<Stream>,
    host: Pinned<f32>,
    front: Params,
    back: Params,
    /// Ranges that `front` received when it was filled, and `back` lacks.
    only_front: Vec<Range<usize>>,
    /// Ranges that arrived in `back` since the last swap.
    landed: Vec<Range<usize>>,
    /// Recorded after the copies.
    copied: Event,
    /// Recorded at a swap: later work does not read `back`.
    unread: Event,
    /// Recorded when the device has changed `front` itself.
    changed: Event,
    /// Whether `front` and `back` both differ from the host's copy.
    distrusted: bool,
}

impl Inbox {
    /// For this many parameters; zero until weights arrive.
    pub fn new(device: &CudaDevice, len: usize) -> Result<Self> {
        let context = device.context();
        let stream = Stream::new(context, 0)?;
        let front = Params::new(device, len, "the parameters")?;
        let back = Params::new(device, len, "the parameters' second buffer")?;
        for p in [&front, &back] {
            p.master.clear(&stream, 0..len)?;
            if let Some(h) = &p.half {
                h.clear(&stream, 0..len)?;
            }
        }
        let (copied, unread, changed) = (Event::new(context)?, Event::new(context)?, Event::new(context)?);
        copied.record(&stream)?;
        // Reads before the first arrival return zeros.
        device.stream().wait(&copied)?;
        let host = Pinned::new(context, len)?;
        let (only_front, landed) = (Vec::new(), Vec::new());
        let distrusted = false;
        Ok(Self { stream, host, front, back, only_front, landed, copied, unread, changed, distrusted })
    }

    /// The host's copy of the last pull. In a group only rank 0 pulls, so on other ranks it is outdated.
    pub fn host(&self) -> &[f32] {
        self.host.values()
    }

    /// The same, for the next pull to write. Waits for copies from it.
    pub fn host_mut(&mut self) -> Result<&mut [f32]> {
        self.host.as_mut_slice()
    }

    /// Marks the device's parameters as invalid, for example after a failed broadcast or when they are another
    /// rank's: before the next swap everything must land.
    pub fn distrust(&mut self) {
        self.landed.clear();
        self.only_front.clear();
        self.distrusted = true;
    }

    /// Starts to copy `range` of the host's copy to the device. In a group all ranks receive rank 0's copy; all of
    /// them call this with the same ranges in the same order.
    pub fn landed(&mut self, device: &CudaDevice, range: Range<usize>, group: Option<&Nccl>) -> Result {
        if self.landed.is_empty() {
            self.stream.wait(&self.unread)?;
        }
        if group.is_none_or(|g| g.rank() == 0) {
            self.back.master.upload(&self.stream, &self.host, range.clone(), range.start)?;
        }
        if let Some(group) = group {
            group.broadcast(&self.back.master, range.clone(), &self.stream)?;
        }
        if let (Some(half), Some(cast)) = (&self.back.half, device.precision().cast()) {
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe {
                device.launcher().launch(
                    &self.stream,
                    (Unit::Elementwise, cast),
                    Geometry::flat(range.len()),
                    &[
                        ("x", Arg::At(self.back.master.at(range.start))),
                        ("y", Arg::At(half.at(range.start))),
                        ("n", long(range.len())),
                    ],
                )
            }?;
        }
        self.landed.push(range);
        Ok(())
    }

    /// At a step's boundary: makes the arrived parameters those that operators read.
    pub fn swap(&mut self, device: &CudaDevice) -> Result<&Params> {
        if self.distrusted {
            let missing = without(0..self.front.len(), &self.landed);
            if let Some(range) = missing.first() {
                return Err(DeviceError::Unsupported(format!(
                    "{}: the group has changed, and parameters {range:?} have not landed since",
                    device.context().name()
                )));
            }
            self.distrusted = false;
        }
        if !self.landed.is_empty() {
            // Ranges that arrived last time and not now are only in the other buffer. Copy them from there, because
            // a group's other ranks do not have them on the host. This stream wrote them, or waited for their
            // writer (`changed`); it overwrites them only after `unread`.
            for range in std::mem::take(&mut self.only_front) {
                for missing in without(range, &self.landed) {
                    self.back.master.copy_from(&self.stream, &self.front.master, missing.clone())?;
                    if let (Some(back), Some(front)) = (&self.back.half, &self.front.half) {
                        back.copy_from(&self.stream, front, missing)?;
                    }
                }
            }
            self.copied.record(&self.stream)?;
            device.stream().wait(&self.copied)?;
            self.unread.record(device.stream())?;
            std::mem::swap(&mut self.front, &mut self.back);
            self.only_front = std::mem::take(&mut self.landed);
        }
        Ok(&self.front)
    }

    /// The parameters that operators read.
    pub fn params(&self) -> &Params {
        &self.front
    }

    /// Marks the device's parameters as valid on this rank, even before anything lands.
    pub fn trust(&mut self) {
        self.distrusted = false;
    }

    /// Starts to copy rank 0's current parameters to all ranks, after present work of the device's stream. On the
    /// other ranks parameters that landed since the last swap are lost.
    pub fn share(&mut self, device: &CudaDevice, group: &Nccl) -> Result {
        if group.rank() > 0 {
            self.landed.clear();
        }
        group.broadcast(&self.front.master, 0..self.front.len(), device.stream())?;
        self.changed(device)
    }

    /// Copies the operators' parameters to the host's copy; waits for it.
    pub fn fetch(&mut self, device: &CudaDevice) -> Result<&[f32]> {
        self.copied.synchronize()?;
        fetch(device, &self.front.master, &mut self.host)
    }

    /// Lends the host's copy as a buffer for other values: at most as many, and until the copy is needed.
    /// Allocating and freeing pinned memory instead would wait for the whole device.
    pub(super) fn borrow_host(&mut self) -> Result<&mut Pinned<f32>> {
        self.copied.synchronize()?;
        Ok(&mut self.host)
    }

    /// Records that present work of the device's stream has changed the operators' f32 parameters.
    pub(super) fn changed(&mut self, device: &CudaDevice) -> Result {
        if let (Some(half), Some(cast)) = (&self.front.half, device.precision().cast()) {
            let n = self.front.len();
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe {
                device.launcher().launch(
                    device.stream(),
                    (Unit::Elementwise, cast),
                    Geometry::flat(n),
                    &[("x", Arg::At(self.front.master.at(0))), ("y", Arg::At(half.at(0))), ("n", long(n))],
                )
            }?;
        }
        // The next swap copies everything that does not land from here, on the inbox's own stream.
        self.only_front = std::iter::once(0..self.front.len()).collect();
        self.changed.record(device.stream())?;
        self.stream.wait(&self.changed)
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        // Pinned memory must not be freed during a copy.
        let _ = self.stream.synchronize();
    }
}

/// Copies values to the host; waits for it.
pub(super) fn fetch<'a>(
    device: &CudaDevice,
    from: &Buffer<f32>,
    to: &'a mut Pinned<f32>,
) -> Result<&'a [f32]> {
    let begun = from.download(device.stream(), 0..from.len(), to);
    // Wait even after an error: the memory must not be used otherwise during a copy.
    device.stream().synchronize()?;
    begun?;
    Ok(&to.as_slice()?[..from.len()])
}

/// The parts of `range` outside all `others`.
fn without(range: Range<usize>, others: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut left = vec![range];
    for o in others {
        left = left
            .into_iter()
            .flat_map(|r| [r.start..r.end.min(o.start), r.start.max(o.end)..r.end])
            .filter(|r| !r.is_empty())
            .collect();
    }
    left
}

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
        let Some(encoded) = &self.encoded else { return Err(self.pool.nothing()) };
        let at = part.start * 4;
        let values = [
            ("g", Arg::At(from.values.at(part.start))),
            ("residual", Arg::At(0)),
            ("out", Arg::At(encoded.at(at))),
            ("n", long(n)),
        ];
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

    fn nothing(&self) -> crate::DeviceError {
        crate::DeviceError::Unsupported(format!("{}: no room for encoded gradients", self.context.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_cover_is_taken_away() {
        let places = |range: Range<usize>, others: &[(usize, usize)]| {
            let others: Vec<_> = others.iter().map(|(a, b)| *a..*b).collect();
            without(range, &others).iter().map(|r| (r.start, r.end)).collect::<Vec<_>>()
        };
        assert_eq!(places(0..10, &[(2, 4), (6, 7)]), [(0, 2), (4, 6), (7, 10)]);
        assert_eq!(places(0..10, &[]), [(0, 10)]);
        assert_eq!(places(3..5, &[(0, 10)]), []);
        assert_eq!(places(3..8, &[(0, 4), (7, 9)]), [(4, 7)]);
    }
}
