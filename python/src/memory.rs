//! Memory of the interpreter: a tensor's values, by address.

use paraft_worker::{Layout, Pulled, WeightBuffer, WorkerError};
use pyo3::{Py, PyAny};

/// `f32` values that a Python object owns.
pub struct Memory {
    at: *mut f32,
    len: usize,
    /// Keeps the values alive.
    _owner: Py<PyAny>,
}

// SAFETY: the memory belongs to `_owner`, which any thread may release. Only the owner of this `Memory` reads or
// writes it.
#[allow(unsafe_code)]
unsafe impl Send for Memory {}

impl Memory {
    /// The values at this address, as long as `owner` lives. The front end passes a contiguous CPU tensor of
    /// `float32` whose storage is never resized.
    pub fn new(address: usize, len: usize, owner: Py<PyAny>) -> Option<Self> {
        let at = address as *mut f32;
        (!at.is_null() && at.is_aligned()).then_some(Self { at, len, _owner: owner })
    }

    fn values(&mut self) -> &mut [f32] {
        // SAFETY: `new`'s caller guarantees that this many values lie there while `_owner` lives. Python can access
        // them at the same time only from another thread during a call of ours, which the documentation forbids, as
        // for every optimizer.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts_mut(self.at, self.len)
        }
    }
}

impl WeightBuffer for Memory {
    fn weights(&mut self) -> &[f32] {
        self.values()
    }

    fn buffer(&mut self) -> Result<&mut [f32], paraft_worker::WorkerError> {
        Ok(self.values())
    }

    fn landed(&mut self, _: &Pulled, _: &Layout) -> Result<(), WorkerError> {
        Ok(())
    }
}

/// Reads the `len` values at an address: a gradient that the caller keeps alive during the call.
pub fn with<T>(address: usize, len: usize, read: impl FnOnce(&[f32]) -> T) -> Option<T> {
    let at = address as *const f32;
    if at.is_null() || !at.is_aligned() {
        return (len == 0).then(|| read(&[]));
    }
    // SAFETY: the front end passes the address of a contiguous CPU tensor of `float32` with `len` values, which it
    // has checked, and keeps it until the call ends.
    #[allow(unsafe_code)]
    Some(read(unsafe { std::slice::from_raw_parts(at, len) }))
}

/// Writes the `len` values at an address. See [`with`].
pub fn with_mut<T>(address: usize, len: usize, write: impl FnOnce(&mut [f32]) -> T) -> Option<T> {
    let at = address as *mut f32;
    if at.is_null() || !at.is_aligned() {
        return (len == 0).then(|| write(&mut []));
    }
    // SAFETY: as in `with`; the front end has made the tensor for this call, so no other thread reads or writes it.
    #[allow(unsafe_code)]
    Some(write(unsafe { std::slice::from_raw_parts_mut(at, len) }))
}

/// Reads the bytes of a tensor of any type. See [`with`].
pub fn with_bytes<T>(address: usize, bytes: usize, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
    if address == 0 {
        return None;
    }
    // SAFETY: the front end passes the address of a CPU tensor whose values lie in these bytes, and keeps it until
    // the call ends.
    #[allow(unsafe_code)]
    Some(read(unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }))
}

/// Writes the bytes of a tensor of any type. See [`with_mut`].
pub fn with_bytes_mut<T>(address: usize, bytes: usize, write: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
    if address == 0 {
        return None;
    }
    // SAFETY: as in `with_bytes`; the front end gives memory that no other thread reads or writes during the call.
    #[allow(unsafe_code)]
    Some(write(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) }))
}
