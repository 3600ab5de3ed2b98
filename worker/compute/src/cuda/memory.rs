//! Device memory, and host memory that the device can access.

use crate::{
    cuda::driver::{Context, Event, Stream},
    error::{DeviceError, Result},
};
use cudarc::driver::sys::{self, CUresult};
use std::{
    marker::PhantomData,
    ops::Range,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// Values that are plain bytes in memory: every bit pattern is valid.
pub trait Plain: Copy + Send + Sync + 'static {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}
impl Plain for f64 {}

/// Device memory for values. Not initialised.
#[derive(Debug)]
pub struct Buffer<T: Plain> {
    at: u64,
    len: usize,
    context: Arc<Context>,
    of: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Allocates `len` values, possibly none. An error names its purpose, `what`.
    pub fn new(context: &Arc<Context>, len: usize, what: &str) -> Result<Self> {
        context.bind()?;
        let mut at = 0;
        if len > 0 {
            context.refuse_in_recording(|| format!("room for {what}"))?;
            context.note_layout();
            let bytes = len * size_of::<T>();
            // SAFETY: writes one address, which is given back when this is dropped.
            match unsafe { sys::cuMemAlloc_v2(&mut at, bytes) } {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    let (free, total) = context.memory().unwrap_or((0, context.total()));
                    return Err(DeviceError::OutOfMemory {
                        device: context.name().to_string(),
                        what: what.to_string(),
                        asked: bytes as u64,
                        free,
                        total,
                    });
                }
                code => context.check(code, || format!("cuMemAlloc of {bytes} bytes for {what}"))?,
            }
        }
        Ok(Self { at, len, context: context.clone(), of: PhantomData })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of value `index`.
    ///
    /// # Panics
    /// If it is beyond the end.
    pub fn at(&self, index: usize) -> u64 {
        assert!(index <= self.len, "value {index} of a buffer of {}", self.len);
        self.at + (index * size_of::<T>()) as u64
    }

    /// Starts a copy of a part of `from` to the values from `to` on. The next change of `from` waits for it.
    pub(crate) fn upload(&self, stream: &Stream, from: &Pinned<T>, part: Range<usize>, to: usize) -> Result {
        assert!(part.end <= from.len && to + part.len() <= self.len, "upload: {part:?} to {to}");
        from.copying(Copies::Out, stream, || {
            // SAFETY: both ranges were just checked; the host's memory is neither changed nor given back before the
            // copy is done, since it waits for its event.
            unsafe {
                self.write(stream, from.at.as_ptr().add(part.start).cast(), part.len() * size_of::<T>(), to)
            }
        })
    }

    /// Starts a copy of `bytes` bytes to the values from `to` on.
    ///
    /// # Safety
    /// `from` has this many bytes, and so has the buffer after `to`; the former stay unchanged until the
    /// copy is done.
    unsafe fn write(
        &self,
        stream: &Stream,
        from: *const std::ffi::c_void,
        bytes: usize,
        to: usize,
    ) -> Result {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees it.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(self.at(to), from, bytes, stream.raw()) };
        self.context.check(code, || format!("cuMemcpyHtoDAsync of {bytes} bytes"))
    }

    /// Starts a copy of `part` to the start of `to`, whose values may have another type. The next read of them
    /// waits for it.
    pub(crate) fn download<U: Plain>(
        &self,
        stream: &Stream,
        part: Range<usize>,
        to: &mut Pinned<U>,
    ) -> Result {
        let bytes = part.len() * size_of::<T>();
        assert!(part.end <= self.len && bytes <= to.len * size_of::<U>(), "download: {part:?} to {}", to.len);
        if part.is_empty() {
            return Ok(());
        }
        to.copying(Copies::In, stream, || {
            // SAFETY: both ranges were just checked; `to` is neither read, changed nor given back before the copy
            // is done, since it waits for its event.
            let code = unsafe {
                sys::cuMemcpyDtoHAsync_v2(to.at.as_ptr().cast(), self.at(part.start), bytes, stream.raw())
            };
            self.context.check(code, || format!("cuMemcpyDtoHAsync of {bytes} bytes"))
        })
    }

    /// Starts a copy of a part of another buffer to the same place of this one.
    pub(crate) fn copy_from(&self, stream: &Stream, from: &Buffer<T>, part: Range<usize>) -> Result {
        assert!(part.end <= self.len && part.end <= from.len, "copy: {part:?}");
        if part.is_empty() {
            return Ok(());
        }
        let bytes = part.len() * size_of::<T>();
        // SAFETY: both ranges were just checked, and lie in different allocations.
        let code = unsafe {
            sys::cuMemcpyDtoDAsync_v2(self.at(part.start), from.at(part.start), bytes, stream.raw())
        };
        self.context.check(code, || format!("cuMemcpyDtoDAsync of {bytes} bytes"))
    }

    /// Starts to zero every byte of a part.
    pub(crate) fn clear(&self, stream: &Stream, part: Range<usize>) -> Result {
        assert!(part.end <= self.len, "clear: {part:?} of {}", self.len);
        if part.is_empty() {
            return Ok(());
        }
        // SAFETY: the range was just checked.
        unsafe { clear_at(stream, self.at(part.start), part.len() * size_of::<T>()) }
    }
}

/// Starts to zero bytes.
///
/// # Safety
/// A buffer has this many bytes from there on.
pub(super) unsafe fn clear_at(stream: &Stream, at: u64, bytes: usize) -> Result {
    // SAFETY: the caller guarantees it.
    let code = unsafe { sys::cuMemsetD8Async(at, 0, bytes, stream.raw()) };
    stream.context().check(code, || format!("cuMemsetD8Async of {bytes} bytes"))
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.len > 0 && self.context.bind().is_ok() {
            self.context.note_layout();
            // SAFETY: allocated in `new`, given back once. The driver waits for what still uses it.
            unsafe { sys::cuMemFree_v2(self.at) };
        }
    }
}

/// Pinned host memory: the device copies to and from it at full speed while the host continues. Zeroed.
///
/// It tracks its copies: host access and deallocation wait for them.
#[derive(Debug)]
pub struct Pinned<T: Plain> {
    at: ptr::NonNull<T>,
    len: usize,
    context: Arc<Context>,
    /// Recorded after all started copies.
    copies: Event,
    under_way: Mutex<Copies>,
}

/// Copies since the last wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Copies {
    #[default]
    None,
    /// To the device: the host may read.
    Out,
    /// From the device.
    In,
}

// SAFETY: it is ordinary memory with one owner.
unsafe impl<T: Plain> Send for Pinned<T> {}
// SAFETY: shared references only read.
unsafe impl<T: Plain> Sync for Pinned<T> {}

impl<T: Plain> Pinned<T> {
    /// Allocates `len` values.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        context.bind()?;
        let bytes = len.max(1) * size_of::<T>();
        let mut at = ptr::null_mut();
        // Not write-combined: the host reads what the device has written.
        // SAFETY: writes one address, which is given back when this is dropped.
        context.check(unsafe { sys::cuMemHostAlloc(&mut at, bytes, 0) }, || {
            format!("cuMemHostAlloc of {bytes} bytes")
        })?;
        let Some(at) = ptr::NonNull::new(at.cast::<T>()) else {
            let call = format!("cuMemHostAlloc of {bytes} bytes");
            return Err(DeviceError::Call { device: context.name().into(), call, error: "no memory".into() });
        };
        // SAFETY: so many bytes were just allocated; zeros are values of every `Plain` type.
        unsafe { at.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        let copies = Event::new(context)?;
        Ok(Self { at, len, context: context.clone(), copies, under_way: Mutex::default() })
    }

    /// Starts a copy on a stream, and records it.
    fn copying(&self, way: Copies, stream: &Stream, begin: impl FnOnce() -> Result) -> Result {
        // A graph would repeat it without a record here.
        self.context.refuse_in_recording(|| "a copy between device and host".into())?;
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if *under_way != Copies::None {
            // The last copy may be on another stream: the event then follows both.
            stream.wait(&self.copies)?;
        }
        *under_way = (*under_way).max(way);
        let begun = begin();
        // Even after an error: a part may be in progress.
        self.copies.record(stream).and(begun)
    }

    /// Waits for the started copies.
    ///
    /// # Errors
    /// The device has failed: the copied values are undefined.
    pub(crate) fn wait(&self) -> Result {
        self.wait_for(Copies::Out)
    }

    fn wait_for(&self, least: Copies) -> Result {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if *under_way < least || *under_way == Copies::None {
            return Ok(());
        }
        *under_way = Copies::None;
        self.copies.synchronize()
    }

    /// The values, after pending copies to them.
    ///
    /// # Errors
    /// The device has failed: the copied values are undefined.
    pub fn as_slice(&self) -> Result<&[T]> {
        self.wait_for(Copies::In)?;
        Ok(self.values())
    }

    /// Likewise, after a wait. A failed device copies no more, and the values are undefined.
    pub(crate) fn values(&self) -> &[T] {
        let _ = self.wait_for(Copies::In);
        // SAFETY: allocated and initialised in `new`, for as long as `self`. No copy to it is in progress, and
        // starting one takes a mutable reference.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// Likewise, mutable.
    ///
    /// # Errors
    /// The device has failed: the copied values are undefined.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        self.wait()?;
        // SAFETY: as above, and there is no other reference: a copy from it takes one too.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T: Plain> Drop for Pinned<T> {
    fn drop(&mut self) {
        // A failed device copies no more.
        let _ = self.wait();
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once; no copy is in progress.
            unsafe { sys::cuMemFreeHost(self.at.as_ptr().cast()) };
        }
    }
}

/// Pinned memory for uploads, in two alternating pieces: one is filled while the other is copied.
#[derive(Debug)]
pub(crate) struct Staging<T: Plain> {
    pieces: [Option<Pinned<T>>; 2],
    next: usize,
}

impl<T: Plain> Staging<T> {
    pub fn new() -> Self {
        Self { pieces: [None, None], next: 0 }
    }

    /// Starts a copy of `from` to the start of `to`, whose values may have another type; `from` may be changed at
    /// once.
    pub fn upload<U: Plain>(&mut self, stream: &Stream, from: &[T], to: &Buffer<U>) -> Result {
        self.upload_to(stream, from, (to, 0))
    }

    /// Likewise, to the values from `at` on.
    pub fn upload_to<U: Plain>(
        &mut self,
        stream: &Stream,
        from: &[T],
        (to, at): (&Buffer<U>, usize),
    ) -> Result {
        let (bytes, room) = (size_of_val(from), to.len.saturating_sub(at) * size_of::<U>());
        assert!(bytes <= room, "upload: {bytes} bytes to {at} of {} values", to.len);
        let context = stream.context();
        let piece = &mut self.pieces[self.next];
        self.next = 1 - self.next;
        if piece.as_ref().is_none_or(|p| p.len() < from.len()) {
            *piece = Some(Pinned::new(context, from.len().next_power_of_two())?);
        }
        let Some(pinned) = piece else { return Ok(()) };
        copy(from, &mut pinned.as_mut_slice()?[..from.len()]);
        let begin = || {
            // SAFETY: the piece holds this many bytes, and is written again only after the copy; `to` was just
            // checked.
            unsafe { to.write(stream, pinned.at.as_ptr().cast(), bytes, at) }
        };
        pinned.copying(Copies::Out, stream, begin)
    }
}

/// Minimum bytes of a copy by several threads: a smaller copy takes less time than starting a thread.
const PARALLEL_COPY_BYTES: usize = 2 << 20;

/// Copies by several threads: one host core copies a large batch more slowly than the device computes it.
pub(crate) fn copy<T: Plain>(from: &[T], to: &mut [T]) {
    let most = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(4);
    let threads = (size_of_val(from) / PARALLEL_COPY_BYTES).clamp(1, most);
    if threads == 1 {
        return to.copy_from_slice(from);
    }
    let each = from.len().div_ceil(threads);
    std::thread::scope(|s| {
        for (from, to) in from.chunks(each).zip(to.chunks_mut(each)) {
            s.spawn(move || to.copy_from_slice(from));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_by_several_threads_is_a_copy() {
        for len in [0, 1, 1000, PARALLEL_COPY_BYTES, 3 * PARALLEL_COPY_BYTES + 7] {
            let from: Vec<u32> = (0..len as u32).collect();
            let mut to = vec![0; len];
            copy(&from, &mut to);
            assert!(from == to, "{len} values");
        }
    }
}
