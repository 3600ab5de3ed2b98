//! Batches prepared on their own thread, so that training does not wait for data that could be ready.
//!
//! ```text
//!   data thread:  spare buffer or a new one --> fill --> ready (at most DEPTH)
//!                        ^                                    |
//!   training thread:     +------ recycle() <-- use <-- next() +
//! ```
//!
//! At most `DEPTH` batches wait; with the one being filled and the one in use there are `DEPTH + 2` buffers,
//! and after the first few none is allocated. Dropping the prefetcher ends the thread after the fill it is in.

use crate::{DataError, Dataset};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// The maximum number of waiting batches. One hides the usual fill; the second hides an occasional slow one. More
/// would only hold memory: if data is slower than training on average, it is late at any depth.
const DEPTH: usize = 2;

/// Inputs and labels of some samples, as [`Dataset::fill`] writes them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Minibatch {
    /// `[n, input_len]` row-major.
    pub inputs: Vec<f32>,
    /// `[n, input_len]` row-major, for a text; empty otherwise.
    pub tokens: Vec<u32>,
    /// `[n]` labels as in [`Dataset::labels`], for a text one per token; empty if the data has none.
    pub labels: Vec<u32>,
    /// Number of samples.
    pub n: usize,
}

/// An iterator over buffers of type `B`, filled ahead on another thread.
///
/// `next` returns a panic or an error of the fill once, after the batches filled before it. After that it returns
/// [`DataError::Stopped`], so that no loop takes a failure for the end of the data.
pub struct Prefetcher<B> {
    ready: Option<Receiver<Result<B, DataError>>>,
    spare: SyncSender<B>,
    thread: Option<JoinHandle<()>>,
    failed: bool,
}

impl<B: Default + Send + 'static> Prefetcher<B> {
    /// Starts the thread. `fill` overwrites the buffer with the next batch and returns true, or returns false if
    /// there is none.
    pub fn spawn<F>(fill: F) -> Result<Self, DataError>
    where
        F: FnMut(&mut B) -> Result<bool, DataError> + Send + 'static,
    {
        let (send, ready) = sync_channel(DEPTH);
        let (spare, spares) = sync_channel(DEPTH + 2);
        let thread = std::thread::Builder::new()
            .name("paraft-data".into())
            .spawn(move || run(fill, &send, &spares))
            .map_err(|e| DataError::Stopped(format!("it could not start: {e}")))?;
        Ok(Self { ready: Some(ready), spare, thread: Some(thread), failed: false })
    }

    /// Returns a used buffer, to be filled again.
    pub fn recycle(&self, buffer: B) {
        // If it is full (the caller returns more than it took) or closed (the data has ended), the buffer is freed.
        let _ = self.spare.try_send(buffer);
    }
}

impl Prefetcher<Minibatch> {
    /// Fills the batches of `indices` from `data`, one after another.
    pub fn over<I>(data: Arc<Dataset>, indices: I) -> Result<Self, DataError>
    where
        I: IntoIterator<Item = Vec<u32>>,
        I::IntoIter: Send + 'static,
    {
        let mut indices = indices.into_iter();
        Self::spawn(move |batch: &mut Minibatch| {
            let Some(next) = indices.next() else { return Ok(false) };
            data.fill(&next, &mut batch.inputs, &mut batch.tokens, &mut batch.labels)?;
            batch.n = next.len();
            Ok(true)
        })
    }
}

fn run<B: Default, F>(mut fill: F, ready: &SyncSender<Result<B, DataError>>, spares: &Receiver<B>)
where
    F: FnMut(&mut B) -> Result<bool, DataError>,
{
    loop {
        let mut buffer = spares.try_recv().unwrap_or_default();
        // After a panic the thread ends, so nothing of the closure is used.
        let filled = catch_unwind(AssertUnwindSafe(|| fill(&mut buffer)));
        let (message, more) = match filled {
            Ok(Ok(true)) => (Ok(buffer), true),
            Ok(Ok(false)) => return,
            Ok(Err(e)) => (Err(e), false),
            Err(panic) => (Err(DataError::Stopped(format!("it panicked: {}", message_of(&*panic)))), false),
        };
        // An error of `send` means that the prefetcher was dropped.
        if ready.send(message).is_err() || !more {
            return;
        }
    }
}

fn message_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

impl<B> Iterator for Prefetcher<B> {
    type Item = Result<B, DataError>;

    /// Waits for the next batch; `None` when the data has ended.
    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return Some(Err(DataError::Stopped("after an error reported before".into())));
        }
        let item = self.ready.as_ref()?.recv().ok()?;
        self.failed = item.is_err();
        Some(item)
    }
}

impl<B> Drop for Prefetcher<B> {
    fn drop(&mut self) {
        // Drop the receiver first: a thread that waits to send then gets an error and ends, and can be joined.
        self.ready = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // its panics were caught and reported
        }
    }
}

#[cfg(test)]
#[path = "prefetch_tests.rs"]
mod tests;
