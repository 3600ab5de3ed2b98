//! The instructions and threads of one worker's operators.
//!
//! Work is split where results are independent (rows of a product, sequences of an attention). Sums over samples
//! use blocks whose number depends only on the batch, added in order. So the number of threads changes no bit of a
//! result.

use crate::{
    cpu::simd::Cpu,
    error::{DeviceError, Result},
};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Arc, Mutex};

/// The instructions and the threads.
#[derive(Clone, Debug)]
pub struct Threads {
    cpu: Cpu,
    /// All threads except the calling one; `None` if that is the only one.
    others: Option<Arc<ThreadPool>>,
}

impl Threads {
    /// The calling thread only.
    pub fn one(cpu: Cpu) -> Self {
        Self { cpu, others: None }
    }

    /// The calling thread and `count - 1` new ones. Clones share them.
    pub fn new(cpu: Cpu, count: usize) -> Result<Self> {
        if count <= 1 {
            return Ok(Self::one(cpu));
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(count - 1)
            .thread_name(|i| format!("paraft-math-{}", i + 1))
            .build()
            .map_err(|e| DeviceError::Missing(format!("{count} threads can't be started: {e}")))?;
        Ok(Self { cpu, others: Some(Arc::new(pool)) })
    }

    /// The instructions.
    pub fn cpu(&self) -> Cpu {
        self.cpu
    }

    /// The number of threads.
    pub fn count(&self) -> usize {
        self.others.as_ref().map_or(1, |p| p.current_num_threads() + 1)
    }

    /// Calls `work` with every part, on all threads, and returns when all calls are done. A thread that finishes a
    /// part takes the next.
    pub(crate) fn each<T: Send>(
        &self,
        parts: impl IntoIterator<Item = T, IntoIter: Send>,
        work: impl Fn(T) + Sync,
    ) {
        let parts = parts.into_iter();
        let Some(pool) = &self.others else { return parts.for_each(work) };
        let most = parts.size_hint().1.unwrap_or(usize::MAX);
        let parts = Mutex::new(parts);
        let takes = || {
            let next = || parts.lock().unwrap_or_else(|e| e.into_inner()).next();
            while let Some(part) = next() {
                work(part);
            }
        };
        pool.in_place_scope(|scope| {
            (1..self.count().min(most)).for_each(|_| scope.spawn(|_| takes()));
            takes();
        });
    }
}
