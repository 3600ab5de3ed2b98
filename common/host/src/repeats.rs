//! Log lines that repeat are counted: one is written, and after a while how many more there were.

use crate::logs::words;
use std::{
    cell::Cell,
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};
use tracing::{Event, Subscriber};
use tracing_subscriber::{Layer, layer::Context};

/// A line is written once in so long.
const REPEAT_INTERVAL: Duration = Duration::from_secs(30);
/// Lines that are known at a time. Of more than that, those written longest ago are forgotten.
const MAX_LINES: usize = 256;
/// So much of a line is said with its count.
const MAX_CHARS: usize = 200;

/// A layer that lets a line pass once in 30 s, for all other layers.
#[derive(Debug, Default)]
pub struct Repeats(Mutex<Known>);

#[derive(Debug, Default)]
struct Known(HashMap<String, Line>);

#[derive(Debug)]
struct Line {
    written: Instant,
    more: u64,
}

impl Known {
    /// Whether a line is to be written now; and what was not written since it was last.
    fn hear(&mut self, line: &str, now: Instant) -> (bool, u64) {
        if let Some(known) = self.0.get_mut(line) {
            if now.saturating_duration_since(known.written) < REPEAT_INTERVAL {
                known.more += 1;
                return (false, 0);
            }
            known.written = now;
            return (true, std::mem::take(&mut known.more));
        }
        if self.0.len() >= MAX_LINES {
            self.0.retain(|_, l| now.saturating_duration_since(l.written) < REPEAT_INTERVAL);
        }
        if self.0.len() >= MAX_LINES
            && let Some(oldest) = self.0.iter().min_by_key(|(_, l)| l.written).map(|(line, _)| line.clone())
        {
            self.0.remove(&oldest);
        }
        self.0.insert(line.to_string(), Line { written: now, more: 0 });
        (true, 0)
    }
}

thread_local! {
    /// This thread is saying how many there were.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}

impl<S: Subscriber> Layer<S> for Repeats {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        if COUNTS.get() {
            return true;
        }
        let meta = event.metadata();
        let line = format!("{} {} {}", meta.level(), meta.target(), words(event));
        // openraft's lines have terms and times in them.
        let key = if meta.target().starts_with("openraft") { without_numbers(&line) } else { line };
        let (write, more) = self.0.lock().unwrap_or_else(PoisonError::into_inner).hear(&key, Instant::now());
        if more > 0 {
            COUNTS.set(true);
            let line: String = words(event).chars().take(MAX_CHARS).collect();
            tracing::info!(more, "since it was last written this line came so many times more: {line}");
            COUNTS.set(false);
        }
        write
    }
}

/// With `#` for each number.
fn without_numbers(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    for c in line.chars() {
        match c.is_ascii_digit() {
            true if text.ends_with('#') => {}
            true => text.push('#'),
            false => text.push(c),
        }
    }
    text
}

#[cfg(test)]
#[path = "repeats_tests.rs"]
mod tests;
