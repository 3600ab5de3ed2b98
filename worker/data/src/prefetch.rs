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
    /// `[n]` class labels, for a text one per token; empty if the data has none.
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
mod tests {
    use super::*;
    use crate::{Sampler, Samples};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn batches_come_in_order_and_are_what_fill_gives() {
        let values = (0..300).map(|i| i as f32).collect();
        let labels = (0..100).map(|i| i % 7).collect();
        let data = Arc::new(Dataset::new(Samples::Floats(values), vec![3], Some((labels, 7))).expect("fits"));
        let sampler = Sampler::new(100, 1);
        let indices = (0..3).flat_map(move |epoch| sampler.batches(epoch, 0, 2, 8));
        let mut prefetcher = Prefetcher::over(Arc::clone(&data), indices.clone()).expect("starts");
        for expected in indices {
            let batch = prefetcher.next().expect("a batch").expect("filled");
            let (mut x, mut y) = (Vec::new(), Vec::new());
            data.fill(&expected, &mut x, &mut Vec::new(), &mut y).expect("in memory");
            assert_eq!(batch, Minibatch { inputs: x, tokens: Vec::new(), labels: y, n: expected.len() });
            prefetcher.recycle(batch);
        }
        assert!(prefetcher.next().is_none());
        assert!(prefetcher.next().is_none());
    }

    #[test]
    fn no_more_than_the_bound_is_filled_ahead_and_buffers_come_back() {
        let filled = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&filled);
        let mut p = Prefetcher::spawn(move |b: &mut Vec<u8>| {
            if b.is_empty() {
                b.resize(1 << 10, count.fetch_add(1, Ordering::SeqCst) as u8);
            }
            Ok(true)
        })
        .expect("starts");
        let mut used = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let buffer = p.next().expect("endless").expect("filled");
            used.insert(buffer.as_ptr() as usize);
            p.recycle(buffer);
        }
        assert!(used.len() <= DEPTH + 2, "{} buffers", used.len());
        drop(p); // ends though the thread is waiting to send
        assert!(filled.load(Ordering::SeqCst) <= DEPTH + 2);
    }

    #[test]
    fn a_panic_and_an_error_come_out_of_next_and_stay() {
        let mut n = 0;
        let mut p = Prefetcher::spawn(move |b: &mut u32| {
            n += 1;
            *b = n;
            assert!(n < 3, "bad sample {n}");
            Ok(true)
        })
        .expect("starts");
        assert_eq!((p.next().expect("1").expect("ok"), p.next().expect("2").expect("ok")), (1, 2));
        let text = p.next().expect("a result").expect_err("the panic").to_string();
        assert_eq!(text, "the data thread stopped: it panicked: bad sample 3");
        assert!(p.next().expect("a result").is_err());

        let mut p = Prefetcher::spawn(|_: &mut u32| Err(DataError::Mismatch("no".into()))).expect("starts");
        assert!(matches!(p.next(), Some(Err(DataError::Mismatch(_)))));
        assert!(matches!(p.next(), Some(Err(DataError::Stopped(_)))));
    }
}
