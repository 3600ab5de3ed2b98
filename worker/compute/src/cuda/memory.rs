//! Memory of the device, and memory of the host that the device can reach.

use crate::{
    cuda::{
        driver::{Context, Event, Stream},
        graph,
    },
    error::{DeviceError, Result},
};
use cudarc::driver::sys::{self, CUresult};
use std::{
    marker::PhantomData,
    ops::Range,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// Values that may lie in memory as bytes: every pattern of bits is one.
pub trait Plain: Copy + Send + Sync + 'static {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}
impl Plain for f64 {}

/// Memory of the device for so many values. Not initialised.
#[derive(Debug)]
pub struct Buffer<T: Plain> {
    at: u64,
    len: usize,
    context: Arc<Context>,
    of: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Room for `len` values, which may be none. `what` it is for goes into the error.
    pub fn new(context: &Arc<Context>, len: usize, what: &str) -> Result<Self> {
        context.bind()?;
        let mut at = 0;
        if len > 0 {
            if context.is_recording() {
                return Err(graph::refused(&format!("room for {what}")));
            }
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

    /// Whether there is room for none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of value `index`.
    ///
    /// # Panics
    /// When it is beyond the end.
    pub fn at(&self, index: usize) -> u64 {
        assert!(index <= self.len, "value {index} of a buffer of {}", self.len);
        self.at + (index * size_of::<T>()) as u64
    }

    /// Begins a copy of a part of `from` to the values from `to` on. Whoever changes `from` next waits for it.
    pub(crate) fn upload(&self, stream: &Stream, from: &Pinned<T>, part: Range<usize>, to: usize) -> Result {
        assert!(part.end <= from.len && to + part.len() <= self.len, "upload: {part:?} to {to}");
        from.copying(Copies::Out, stream, || {
            // SAFETY: both ranges were just checked; the host's memory is neither changed nor given back before the copy is
            // done, since it waits for its event.
            unsafe {
                self.write(stream, from.at.as_ptr().add(part.start).cast(), part.len() * size_of::<T>(), to)
            }
        })
    }

    /// Begins a copy of `bytes` bytes to the values from `to` on.
    ///
    /// # Safety
    /// There are so many bytes at `from`, and in the buffer behind `to`; the former stay as they are until the copy is done.
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
        // SAFETY: the caller's word.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(self.at(to), from, bytes, stream.raw()) };
        self.context.check(code, || format!("cuMemcpyHtoDAsync of {bytes} bytes"))
    }

    /// Begins a copy of `part` to the start of `to`, whose values may be of another type. Whoever reads them waits for it.
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
            // SAFETY: both ranges were just checked; `to` is neither read, changed nor given back before the copy is done, since
            // it waits for its event.
            let code = unsafe {
                sys::cuMemcpyDtoHAsync_v2(to.at.as_ptr().cast(), self.at(part.start), bytes, stream.raw())
            };
            self.context.check(code, || format!("cuMemcpyDtoHAsync of {bytes} bytes"))
        })
    }

    /// Begins a copy of a part of another buffer to the same place of this one.
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

    /// Begins to set every byte of a part to zero.
    pub(crate) fn clear(&self, stream: &Stream, part: Range<usize>) -> Result {
        assert!(part.end <= self.len, "clear: {part:?} of {}", self.len);
        if part.is_empty() {
            return Ok(());
        }
        // SAFETY: the range was just checked.
        unsafe { clear_at(stream, self.at(part.start), part.len() * size_of::<T>()) }
    }
}

/// Begins to set bytes to zero.
///
/// # Safety
/// There are so many in a buffer from there on.
pub(super) unsafe fn clear_at(stream: &Stream, at: u64, bytes: usize) -> Result {
    // SAFETY: the caller's word.
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

/// Memory of the host that the device copies from and to at full speed, while the host goes on. Zeroed.
///
/// It knows the copies that were begun: whoever touches it on the host, or gives it back, waits for them.
#[derive(Debug)]
pub struct Pinned<T: Plain> {
    at: ptr::NonNull<T>,
    len: usize,
    context: Arc<Context>,
    /// Behind all copies that were begun.
    copies: Event,
    under_way: Mutex<Copies>,
}

/// Copies since somebody waited for them.
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
    /// Room for `len` values.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        context.bind()?;
        let bytes = len.max(1) * size_of::<T>();
        let mut at = ptr::null_mut();
        // Not write-combined: what comes from the device is read here.
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

    /// Begins a copy on a stream, and notes it.
    fn copying(&self, way: Copies, stream: &Stream, begin: impl FnOnce() -> Result) -> Result {
        if self.context.is_recording() {
            // A graph would do it again and again, and nobody would know when.
            return Err(graph::refused("a copy between device and host"));
        }
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if *under_way != Copies::None {
            // Of another stream, perhaps: the event is then behind both.
            stream.wait(&self.copies)?;
        }
        *under_way = (*under_way).max(way);
        let begun = begin();
        // Also behind an error: a part of it may be under way.
        self.copies.record(stream).and(begun)
    }

    /// Waits for the copies that were begun.
    ///
    /// # Errors
    /// The device has failed: what it copied may be anything.
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

    /// The values, once copies to it are done.
    ///
    /// # Errors
    /// The device has failed: what it copied may be anything.
    pub fn as_slice(&self) -> Result<&[T]> {
        self.wait_for(Copies::In)?;
        Ok(self.values())
    }

    /// Likewise, for who has waited. A device that has failed copies nothing any more, and the values may be anything.
    pub(crate) fn values(&self) -> &[T] {
        let _ = self.wait_for(Copies::In);
        // SAFETY: allocated and initialised in `new`, for as long as `self`. No copy to it is under way, and to begin one takes
        // a mutable reference.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// Likewise, to be changed.
    ///
    /// # Errors
    /// The device has failed: what it copied may be anything.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        self.wait()?;
        // SAFETY: as above, and nobody else has a reference: a copy from it takes one too.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is room for none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T: Plain> Drop for Pinned<T> {
    fn drop(&mut self) {
        // A device that has failed copies nothing any more.
        let _ = self.wait();
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, given back once; no copy is under way.
            unsafe { sys::cuMemFreeHost(self.at.as_ptr().cast()) };
        }
    }
}

/// Pinned memory through which values go to the device, two pieces in turn: one is filled while the other is copied.
#[derive(Debug)]
pub(crate) struct Staging<T: Plain> {
    pieces: [Option<Pinned<T>>; 2],
    next: usize,
}

impl<T: Plain> Staging<T> {
    pub fn new() -> Self {
        Self { pieces: [None, None], next: 0 }
    }

    /// Begins a copy of `from` to the start of `to`, whose values may be of another type; `from` is free at once.
    pub fn upload<U: Plain>(&mut self, stream: &Stream, from: &[T], to: &Buffer<U>) -> Result {
        self.upload_to(stream, from, (to, 0))
    }

    /// The same to the values from `at` on.
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
            // SAFETY: the piece holds so many bytes, and waits for the copy before it is written again; `to` was just checked.
            unsafe { to.write(stream, pinned.at.as_ptr().cast(), bytes, at) }
        };
        pinned.copying(Copies::Out, stream, begin)
    }
}

/// Bytes from which on a copy takes longer than to begin a thread.
const PARALLEL_COPY_BYTES: usize = 2 << 20;

/// One core of a host copies a large batch more slowly than the device computes it.
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
