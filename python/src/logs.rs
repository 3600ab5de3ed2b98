//! Log lines, for Python's `logging`.
//!
//! Threads of ours never ask for the interpreter: one that a long call of the user's keeps it from would stop heartbeats. They leave
//! their lines here, and a thread of the interpreter's takes them along.

use parking_lot::Mutex;
use pyo3::{prelude::*, types::PyModule};
use std::{
    collections::VecDeque,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer,
    layer::{Context, SubscriberExt},
    util::SubscriberInitExt,
};

/// Lines that wait, at most: the oldest go first.
const MAX_WAITING_LINES: usize = 1_000;

static LINES: Mutex<VecDeque<(u32, String)>> = Mutex::new(VecDeque::new());
static ANY: AtomicBool = AtomicBool::new(false);

/// Starts logging: into this file as JSON, as other workers do, or to `logging`. Once for a process.
pub fn start(file: Option<&Path>) -> std::io::Result<()> {
    if file.is_some() {
        return paraft_host::logs::start(file);
    }
    let filter = EnvFilter::try_from_env("PARAFT_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = tracing_subscriber::registry().with(filter).with(paraft_host::Repeats::default()).with(Lines);
    let _ = lines.with(paraft_host::logs::Keep).try_init();
    Ok(())
}

/// Hands what waits to `logging.getLogger("paraft")`.
pub fn hand_over(py: Python<'_>) -> PyResult<()> {
    if !ANY.swap(false, Relaxed) {
        return Ok(());
    }
    let lines = std::mem::take(&mut *LINES.lock());
    let logger = PyModule::import(py, "logging")?.call_method1("getLogger", ("paraft",))?;
    for (level, line) in lines {
        logger.call_method1("log", (level, "%s", line))?;
    }
    Ok(())
}

struct Lines;

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let text = paraft_host::logs::words(event);
        // As `logging` numbers them.
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            Level::INFO => 20,
            _ => 10,
        };
        let mut lines = LINES.lock();
        if lines.len() == MAX_WAITING_LINES {
            lines.pop_front();
        }
        lines.push_back((level, text));
        ANY.store(true, Relaxed);
    }
}
