//! Arithmetic off the runtime's threads: those wait for the network and the disk, and any other work there
//! would delay every heartbeat of the process.
//!
//! - [`run`]: short work that uses the cores: the optimizer, sums. It goes to the pool's threads, one for each
//!   core.
//! - [`long`]: work that takes seconds and one core: installing a snapshot, a digest of a whole state. It has
//!   threads of its own, for half of the cores at a time, so that it never delays short work.
//!
//! The caller waits for the result, so nothing changes its order. Short work on little data runs in the calling
//! task: moving it to another thread and back costs two wake-ups and cold caches. All work does so on a runtime
//! with one thread: simulations and tests with a clock of their own stay deterministic. While the host starts no
//! threads for the pool (no memory, too many processes), its work runs in the caller, too.

mod fair_queue;
mod pool;

use fair_queue::FairQueue;
pub use pool::each;
use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::LazyLock,
    thread::available_parallelism,
};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Semaphore, oneshot},
};

/// Work on fewer bytes runs at once: 20 to 40 us at the 6 to 14 GB/s of optimizers and sums.
pub const SMALL_BYTES: u64 = 256 << 10;
/// Short work on fewer bytes runs in the calling task, when it is its job's turn: 0.3 to 0.7 ms, in which another
/// of the runtime's threads takes over what waits. In a measurement pushes of 1 MiB were 12 % faster so.
pub const LARGE_BYTES: u64 = 4 << 20;

/// The work panicked on its thread. Its data must not be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a computation panicked: {0}")]
pub struct Panicked(String);

impl Panicked {
    fn of(cause: &(dyn Any + Send)) -> Self {
        let text = cause.downcast_ref::<&str>().map(|s| s.to_string());
        Self(text.or_else(|| cause.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into()))
    }

    fn gone() -> Self {
        Self("its thread is gone".into())
    }
}

impl From<Panicked> for io::Error {
    fn from(e: Panicked) -> Self {
        io::Error::other(e)
    }
}

/// Whether work of this size, on this thread, should move to another one.
fn elsewhere(bytes: u64) -> bool {
    bytes >= SMALL_BYTES
        && Handle::try_current().is_ok_and(|h| h.runtime_flavor() != RuntimeFlavor::CurrentThread)
}

/// Runs work of a job that reads or writes this many bytes, in the job's slot: jobs share the cores evenly
/// (`compute/fair_queue.rs`).
///
/// # Errors
/// It panicked on another thread.
pub async fn run<T: Send + 'static>(
    job: u32,
    bytes: u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Panicked> {
    static FAIR_QUEUE: LazyLock<FairQueue> =
        LazyLock::new(|| FairQueue::new(available_parallelism().map_or(1, |n| n.get())));
    if !elsewhere(bytes) {
        return Ok(work());
    }
    let _turn = FAIR_QUEUE.of(job, bytes).await;
    if bytes < LARGE_BYTES {
        return catch_unwind(AssertUnwindSafe(work)).map_err(|cause| Panicked::of(&*cause));
    }
    let work = || catch_unwind(AssertUnwindSafe(work));
    let done = match pool::of_process() {
        None => work(),
        Some(pool) => {
            let (tx, rx) = oneshot::channel();
            // Rayon ends the process if its closure panics.
            pool.spawn(move || _ = tx.send(work()));
            rx.await.map_err(|_| Panicked::gone())?
        }
    };
    done.map_err(|cause| Panicked::of(&*cause))
}

/// As [`run`], for work that takes so long that other work would wait for it. It may wait for other long
/// work.
///
/// # Errors
/// It panicked on another thread.
pub async fn long<T: Send + 'static>(
    bytes: u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Panicked> {
    static FREE: LazyLock<Semaphore> =
        LazyLock::new(|| Semaphore::new((available_parallelism().map_or(1, |n| n.get()) / 2).max(1)));
    if !elsewhere(bytes) {
        return Ok(work());
    }
    let _turn = FREE.acquire().await.map_err(|_| Panicked::gone())?;
    tokio::task::spawn_blocking(work).await.map_err(|e| match e.try_into_panic() {
        Ok(cause) => Panicked::of(&*cause),
        Err(_) => Panicked::gone(),
    })
}

#[cfg(test)]
#[path = "compute_tests.rs"]
mod tests;
