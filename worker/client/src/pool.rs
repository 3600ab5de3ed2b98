//! Reused payload buffers: fresh memory would cost a page fault per 4 KiB and cold caches.

use bytes::Bytes;
use std::sync::{Arc, Mutex};

/// Free buffers. The last one used is taken first, because the caches still hold it.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Mutex<Vec<Vec<u8>>>,
    /// The maximum number of buffers kept.
    most: usize,
}

impl Pool {
    /// Keeps up to `most` buffers.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), most })
    }

    /// The bytes that `fill` writes into an empty buffer. The buffer returns to the pool when the last reference is
    /// dropped.
    pub fn bytes(self: &Arc<Self>, capacity: usize, fill: impl FnOnce(&mut Vec<u8>)) -> Bytes {
        let mut buffer = self.free.lock().unwrap_or_else(|e| e.into_inner()).pop().unwrap_or_default();
        buffer.clear();
        buffer.reserve(capacity);
        fill(&mut buffer);
        Bytes::from_owner(PooledBuffer { buffer, pool: self.clone() })
    }
}

struct PooledBuffer {
    buffer: Vec<u8>,
    pool: Arc<Pool>,
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(|e| e.into_inner());
        if free.len() < self.pool.most {
            free.push(std::mem::take(&mut self.buffer));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_when_the_last_view_of_it_is_gone() {
        let pool = Pool::new(1);
        let first = pool.bytes(100, |b| b.extend_from_slice(&[1; 100]));
        let (at, view) = (first.as_ptr(), first.slice(10..20));
        drop(first);
        let second = pool.bytes(100, |b| b.extend_from_slice(&[2; 100]));
        assert_ne!(second.as_ptr(), at, "it is still read");
        assert_eq!(view[..], [1; 10]);
        drop(view);
        assert_eq!(pool.bytes(50, |b| b.extend_from_slice(&[3; 50])).as_ptr(), at);
        drop(second);
        assert_eq!(pool.free.lock().expect("no panic").len(), 1, "no more than it may keep");
    }
}
