//! The process's threads for arithmetic, one for each core: started when they are first needed. If the host starts no
//! thread then, the next call tries again. (Rayon's own pool would fail for the rest of the process.)

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use std::sync::OnceLock;

/// The pool; `None` while its threads can't be started.
pub(super) fn of_process() -> Option<&'static ThreadPool> {
    static POOL: OnceLock<ThreadPool> = OnceLock::new();
    started(&POOL, || ThreadPoolBuilder::new().thread_name(|i| format!("paraft-compute-{i}")).build())
}

fn started(
    pool: &OnceLock<ThreadPool>,
    start: impl FnOnce() -> Result<ThreadPool, ThreadPoolBuildError>,
) -> Option<&ThreadPool> {
    if pool.get().is_none() {
        match start() {
            // Of two callers, one drops its threads.
            Ok(new) => _ = pool.set(new),
            Err(e) => tracing::warn!(error = %e, "no threads for arithmetic can be started; callers compute"),
        }
    }
    pool.get()
}

/// Calls `work` with every part, on all cores, and returns when all calls are done. The calling thread takes the first
/// part.
///
/// # Panics
/// If a call of `work` panics.
pub fn each<T: Send>(parts: impl IntoIterator<Item = T>, work: impl Fn(T) + Sync) {
    let mut parts = parts.into_iter();
    let Some(pool) = of_process() else { return parts.for_each(work) };
    let (own, work) = (parts.next(), &work);
    pool.in_place_scope(|scope| {
        parts.for_each(|part| scope.spawn(move |_| work(part)));
        if let Some(part) = own {
            work(part);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn threads_that_cannot_start_are_tried_again() {
        let pool = OnceLock::new();
        // More than an address space holds.
        let too_large = || ThreadPoolBuilder::new().num_threads(1).stack_size(1 << 50).build();
        for _ in 0..2 {
            assert!(started(&pool, too_large).is_none());
        }
        assert!(started(&pool, || ThreadPoolBuilder::new().num_threads(1).build()).is_some());
        assert!(started(&pool, too_large).is_some(), "it is there");
    }

    #[test]
    fn each_part_is_worked_on_once() {
        for count in [0, 1, 100] {
            let sum = AtomicU64::new(0);
            each(1..=count, |part| _ = sum.fetch_add(part, Relaxed));
            assert_eq!(sum.into_inner(), count * (count + 1) / 2);
        }
    }
}
