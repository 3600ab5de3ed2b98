//! Handles the interpreter's signals during a wait without the interpreter lock.

use crate::logs;
use paraft_worker::Interrupt;
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Instant,
};

/// The minimum interval of checks: each needs the interpreter lock, which another thread may hold.
const POLL_INTERVAL_MS: u64 = 20;

/// Ends a wait if a signal handler raises an exception, as for Ctrl-C.
#[derive(Debug)]
pub struct Signals {
    began: Instant,
    /// Time of the last check, in milliseconds since `since`.
    looked: AtomicU64,
    raised: AtomicBool,
    error: Mutex<Option<PyErr>>,
}

impl Signals {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            looked: AtomicU64::new(0),
            raised: AtomicBool::new(false),
            error: Mutex::new(None),
        }
    }

    /// Takes the raised exception.
    pub fn take(&self) -> Option<PyErr> {
        self.raised.store(false, Relaxed);
        self.error.lock().take()
    }
}

impl Interrupt for Signals {
    fn is_set(&self) -> bool {
        if self.raised.load(Relaxed) {
            return true;
        }
        let now = self.began.elapsed().as_millis() as u64;
        if now.saturating_sub(self.looked.load(Relaxed)) < POLL_INTERVAL_MS {
            return false;
        }
        self.looked.store(now, Relaxed);
        let looked = Python::attach(|py| py.check_signals().and_then(|()| logs::hand_over(py)));
        if let Err(e) = looked {
            *self.error.lock() = Some(e);
            self.raised.store(true, Relaxed);
        }
        self.raised.load(Relaxed)
    }
}
