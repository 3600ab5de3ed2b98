//! Where a process notes its spans.

use crate::{Span, Stage, file::Tracing};
use std::{
    path::Path,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// The sums of one process, and its trace if it writes one. Shared by all its threads; never locks.
#[derive(Debug, Default)]
pub struct Stages {
    sums: [Sum; Stage::COUNT],
    tracing: OnceLock<Tracing>,
}

#[derive(Debug, Default)]
struct Sum {
    nanos: AtomicU64,
    spans: AtomicU64,
}

/// What a process has spent in one stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Total {
    /// Which.
    pub stage: Stage,
    /// The durations of its spans, added up. Spans that overlap count each for itself.
    pub time: Duration,
    /// How many spans.
    pub spans: u64,
}

impl Stages {
    /// Notes a span.
    pub fn note(&self, span: Span) {
        let sum = &self.sums[span.stage as usize];
        sum.nanos.fetch_add(span.end.since(span.begin).as_nanos() as u64, Relaxed);
        sum.spans.fetch_add(1, Relaxed);
        if let Some(tracing) = self.tracing.get() {
            tracing.record(span);
        }
    }

    /// The sums so far, one for each stage.
    pub fn totals(&self) -> [Total; Stage::COUNT] {
        Stage::ALL.map(|stage| {
            let sum = &self.sums[stage as usize];
            let time = Duration::from_nanos(sum.nanos.load(Relaxed));
            Total { stage, time, spans: sum.spans.load(Relaxed) }
        })
    }

    /// Records the spans of `steps` steps from now on, from the first that is pushed or computed in stages, in `folder/PROCESS.jsonl`. The
    /// folder is made; a file that is there is continued (a process that was started again). Once in a process.
    pub fn trace(&self, folder: &Path, process: &str, steps: u64) -> std::io::Result<()> {
        let _ = self.tracing.set(Tracing::start(folder, process, steps)?);
        Ok(())
    }

    /// Brings what is recorded into its file, before the process ends.
    pub fn flush(&self) {
        if let Some(tracing) = self.tracing.get() {
            tracing.flush();
        }
    }
}

#[cfg(test)]
#[path = "stages_tests.rs"]
mod tests;
