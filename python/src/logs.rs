//! Log lines for Python's `logging`.
//!
//! Our threads never acquire the interpreter: a long call of the user's script would block them and stop the
//! heartbeats. They queue their lines here, and a Python thread takes them.

use parking_lot::Mutex;
use pyo3::{prelude::*, types::PyModule};
use std::{
    collections::VecDeque,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};
use tracing::{Event, Level, Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt},
    util::SubscriberInitExt,
};

/// The maximum number of queued lines. The oldest are dropped first.
const MAX_WAITING_LINES: usize = 1_000;

static LINES: Mutex<VecDeque<(u32, String)>> = Mutex::new(VecDeque::new());
static ANY: AtomicBool = AtomicBool::new(false);

/// Starts logging, as JSON into this file like other workers, or to `logging`. Call it once per process.
pub fn start(file: Option<&Path>) -> std::io::Result<()> {
    if file.is_some() {
        return paraft_host::logs::start(file);
    }
    let lines = tracing_subscriber::registry()
        .with(paraft_host::logs::filter(LevelFilter::INFO))
        .with(paraft_host::Repeats::default())
        .with(Lines);
    let _ = lines.with(paraft_host::logs::RecentLayer).try_init();
    Ok(())
}

/// Passes queued lines to `logging.getLogger("paraft")`.
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
        // Levels as numbered by `logging`.
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
