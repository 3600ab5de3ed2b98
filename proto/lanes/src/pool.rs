//! Reused buffers for incoming bulk. The kernel clears fresh memory first, which costs about as much as
//! reading the bytes into it.

use bytes::Bytes;
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard},
};

/// Shorter payloads are as cheap in memory of their own.
const MIN_POOLED_BYTES: usize = 64 << 10;

/// Free buffers, the one used last at the end: the caches may still hold it.
pub struct Pool {
    free: Mutex<FreeBuffers>,
    /// Maximum bytes that are kept.
    most: usize,
}

#[derive(Default)]
struct FreeBuffers {
    buffers: Vec<Vec<u64>>,
    bytes: usize,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes kept", self.lock().bytes, self.most)
    }
}

impl Pool {
    /// Keeps up to `most` bytes.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), most })
    }

    /// A buffer of `len` bytes, with arbitrary contents.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Buffer {
        let words = len.div_ceil(8);
        let used = if len >= MIN_POOLED_BYTES { self.used(words) } else { None };
        Buffer { words: used.unwrap_or_else(|| vec![0; words]), len, pool: self.clone() }
    }

    /// A kept buffer that is large enough, and little larger: its size must match what it is counted for.
    fn used(&self, words: usize) -> Option<Vec<u64>> {
        let mut free = self.lock();
        let fits = |b: &Vec<u64>| (words..=words + words / 8).contains(&b.len());
        let at = free.buffers.iter().rposition(fits)?;
        let buffer = free.buffers.remove(at);
        free.bytes -= buffer.len() * 8;
        Some(buffer)
    }

    fn lock(&self) -> MutexGuard<'_, FreeBuffers> {
        self.free.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A buffer; dropping it returns it to the pool.
pub(crate) struct Buffer {
    words: Vec<u64>,
    len: usize,
    pool: Arc<Pool>,
}

impl Buffer {
    /// In words of eight bytes, the last of which may be used in part.
    pub fn words(&mut self) -> &mut [u64] {
        let words = self.len.div_ceil(8);
        &mut self.words[..words]
    }

    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.words);
        let bytes = buffer.len() * 8;
        if bytes < MIN_POOLED_BYTES {
            return;
        }
        let mut free = self.pool.lock();
        // Buffers of other sizes make room: those that were unused for longest.
        while free.bytes + bytes > self.pool.most && !free.buffers.is_empty() {
            let oldest = free.buffers.remove(0);
            free.bytes -= oldest.len() * 8;
        }
        if free.bytes + bytes <= self.pool.most {
            free.bytes += bytes;
            free.buffers.push(buffer);
        }
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
