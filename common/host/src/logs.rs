//! Logs: human text to standard error, or JSON to a file of the run; the last lines are kept for who asks from elsewhere.

use crate::Repeats;
use std::{
    collections::VecDeque,
    fmt::{Debug, Write},
    fs::File,
    io::IsTerminal,
    path::Path,
    sync::{Mutex, MutexGuard},
    time::{SystemTime, UNIX_EPOCH},
};
use tracing::{
    Dispatch, Event, Subscriber,
    dispatcher::set_global_default,
    field::{Field, Visit},
    level_filters::LevelFilter,
};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    fmt,
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
    util::SubscriberInitExt,
};

/// Lines that are kept, and characters of each.
pub const MAX_RECENT: (usize, usize) = (20, 240);

struct RecentLines {
    /// How many there were, with those that are kept no more.
    number: u64,
    lines: VecDeque<String>,
}

static RECENT: Mutex<RecentLines> = Mutex::new(RecentLines { number: 0, lines: VecDeque::new() });

fn kept() -> MutexGuard<'static, RecentLines> {
    RECENT.lock().unwrap_or_else(|e| e.into_inner())
}

/// Starts logging. The level comes from `PARAFT_LOG` (the syntax of tracing's `Targets`), default `info` in
/// files and `warn` on the terminal. A second call changes nothing.
pub fn start(file: Option<&Path>) -> std::io::Result<()> {
    match file {
        Some(path) => _ = set_global_default(in_file(path)?),
        None => on_terminal(LevelFilter::WARN),
    }
    Ok(())
}

/// A log in this file, as [`start`] writes one, for what is said within
/// [`with_default`](tracing::dispatcher::with_default) of it.
pub fn in_file(path: &Path) -> std::io::Result<Dispatch> {
    let file = File::options().create(true).append(true).open(path)?;
    let layer = fmt::layer().json().with_writer(Mutex::new(file)).log_internal_errors(false);
    Ok(Dispatch::new(all(filter(LevelFilter::INFO)).with(layer).with(RecentLayer)))
}

/// Starts logging on the terminal, from this level on where `PARAFT_LOG` says nothing else.
pub fn on_terminal(level: LevelFilter) {
    let layer = fmt::layer().with_writer(std::io::stderr).with_target(false);
    // Where standard error can't be written neither can that it can't.
    let layer = layer.with_ansi(std::io::stderr().is_terminal()).log_internal_errors(false);
    let _ = all(filter(level)).with(layer).with(RecentLayer).try_init();
}

/// What passes the filter, and each line that repeats once in a while.
fn all(filter: Targets) -> impl Subscriber + for<'a> LookupSpan<'a> + Send + Sync {
    tracing_subscriber::registry().with(filter).with(Repeats::default())
}

/// What `PARAFT_LOG` lets pass; where it is unset, empty or no filter, lines from the level `default` on.
pub fn filter(default: LevelFilter) -> Targets {
    let given = std::env::var("PARAFT_LOG").ok().filter(|given| !given.is_empty());
    // openraft tells each heartbeat at info, warns while a peer is down, and reports errors when a replica ends in order. What
    // is wrong with a replica is said by `paraft-raft`, in words of ours.
    let quiet = || Targets::new().with_default(default).with_target("openraft", LevelFilter::OFF);
    given.and_then(|given| given.parse().ok()).unwrap_or_else(quiet)
}

/// The last lines that were logged, each with its time of day (UTC) and level; `None`: nothing new since there were so many. With
/// them, how many there are now.
pub fn recent(since: Option<u64>) -> Option<(u64, Vec<String>)> {
    let kept = kept();
    (since != Some(kept.number)).then(|| (kept.number, kept.lines.iter().cloned().collect()))
}

/// An event in words: its message, then its fields.
pub fn words(event: &Event<'_>) -> String {
    let mut text = Text::default();
    event.record(&mut text);
    text.message + &text.fields
}

/// A layer that keeps the last lines for [`recent`].
#[derive(Debug)]
pub struct RecentLayer;

impl<S: Subscriber> Layer<S> for RecentLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() % 86_400);
        let (h, m, s) = (at / 3600, at / 60 % 60, at % 60);
        let line = format!("{h:02}:{m:02}:{s:02} {} {}", event.metadata().level(), words(event));
        let mut kept = kept();
        kept.number += 1;
        if kept.lines.len() == MAX_RECENT.0 {
            kept.lines.pop_front();
        }
        kept.lines.push_back(line.chars().take(MAX_RECENT.1).collect());
    }
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_and_told_once() {
        let registry = tracing_subscriber::registry().with(RecentLayer);
        tracing::subscriber::with_default(registry, || {
            for i in 0..MAX_RECENT.0 + 5 {
                tracing::info!(i, "step {}", "x".repeat(300));
            }
        });
        let (number, lines) = recent(None).expect("some");
        assert_eq!((number, lines.len()), (25, 20));
        assert!(
            lines.iter().all(|l| l.chars().count() == 240 && l[8..].starts_with(" INFO step xxx")),
            "{lines:?}"
        );
        assert_eq!(recent(Some(number)), None);
    }
}
