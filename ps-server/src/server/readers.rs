//! Threads for peers that may only read. The kernel gives them little of a processor that others want, so however
//! many readers there are, updates continue.

use std::{io, thread::available_parallelism};
use tokio::runtime::{Builder, Runtime};

/// So much more niceness than the server's other threads have: the kernel gives such a thread about a tenth of what it
/// gives one of those (`sched(7)`).
pub(super) const NICENESS: i32 = 10;
/// The kernel knows no more.
const MAX_NICENESS: i32 = 19;
/// Of the processors, one in so many has a thread for readers.
const PROCESSORS_PER_THREAD: usize = 4;

/// A runtime of such threads, until it is dropped.
pub(super) struct ReaderThreads(Option<Runtime>);

impl ReaderThreads {
    pub(super) fn start() -> io::Result<Self> {
        let processors = available_parallelism().map_or(1, usize::from);
        let niceness = reader_niceness();
        Builder::new_multi_thread()
            .worker_threads(processors.div_ceil(PROCESSORS_PER_THREAD))
            .thread_name("paraft-readers")
            .on_thread_start(move || {
                // Linux takes a thread's number here. Where it refuses, readers are as important as others.
                let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), niceness);
            })
            .enable_all()
            .build()
            .map(|runtime| Self(Some(runtime)))
    }

    pub(super) fn spawn(&self, task: impl Future<Output: Send> + Send + 'static) {
        if let Some(runtime) = &self.0 {
            runtime.spawn(async {
                task.await;
            });
        }
    }
}

impl Drop for ReaderThreads {
    fn drop(&mut self) {
        // Waits for no thread: a runtime may not wait in another one's task.
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

/// The process may have been started with a niceness of its own.
fn reader_niceness() -> i32 {
    let own = rustix::process::getpriority_process(None).unwrap_or(0);
    (own + NICENESS).min(MAX_NICENESS)
}

#[cfg(test)]
mod tests {
    use super::{MAX_NICENESS, NICENESS, ReaderThreads};
    use std::sync::mpsc;

    #[test]
    fn a_readers_thread_has_a_low_priority() {
        let (tells, hears) = mpsc::channel();
        let threads = ReaderThreads::start().expect("threads");
        threads.spawn(async move {
            let here = rustix::process::getpriority_process(Some(rustix::thread::gettid()));
            tells.send(here.expect("a thread has a priority")).expect("the test waits");
        });
        let own = rustix::process::getpriority_process(None).expect("ours");
        assert_eq!(hears.recv().expect("the task runs"), (own + NICENESS).min(MAX_NICENESS));
    }
}
