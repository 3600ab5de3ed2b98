//! What operators run on: the instructions, and the threads of one worker.
//!
//! Work is cut where its results are apart (rows of a product, sequences of an attention), and sums over samples in blocks whose
//! number depends on the batch alone, added up in their order: the number of threads changes no bit of a result.

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
    /// All but the calling thread; `None` where that is the only one.
    others: Option<Arc<ThreadPool>>,
}

impl Threads {
    /// The calling thread only.
    pub fn one(cpu: Cpu) -> Self {
        Self { cpu, others: None }
    }

    /// The calling thread and `count - 1` more, which are started. Clones share them.
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

    /// How many threads there are.
    pub fn count(&self) -> usize {
        self.others.as_ref().map_or(1, |p| p.current_num_threads() + 1)
    }

    /// Calls `work` with every part, on all threads, and returns when all calls have. Who is done with one takes the next.
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
