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
mod tests {
    use super::*;
    use crate::Moment;
    use paraft_common::{BucketId, ShardId, Step, WorkerId};

    fn span(stage: Stage, step: u64) -> Span {
        Span {
            stage,
            begin: Moment(1000 * step),
            end: Moment(1000 * step + 250),
            step: Step(step),
            shard: ShardId(0),
            bucket: Some(BucketId(3)),
            worker: Some(WorkerId(1)),
            bytes: 12,
            pass: None,
        }
    }

    #[test]
    fn sums_are_of_all_spans_and_the_trace_is_of_so_many_steps() {
        let scratch = tempfile::tempdir().unwrap();
        let stages = Stages::default();
        stages.note(span(Stage::Apply, 4));
        stages.trace(&scratch.path().join("t"), "server-7", 3).unwrap();
        for step in [0, 5, 6, 7, 8, 9] {
            // The weights before the first push are of no step that is recorded.
            stages.note(span(Stage::Pull, step));
            if step > 0 {
                stages.note(span(Stage::Push, step));
                stages.note(span(Stage::Decode, step));
            }
        }
        stages.flush();
        let text = std::fs::read_to_string(scratch.path().join("t/server-7.jsonl")).unwrap();
        let steps = |stage: &str| {
            let of = text.lines().filter(|l| l.contains(&format!("\"stage\":\"{stage}\"")));
            of.map(|l| {
                serde_json::from_str::<serde_json::Value>(l).unwrap()["span"]["step"].as_u64().unwrap()
            })
            .collect::<Vec<_>>()
        };
        assert_eq!(steps("push"), [5, 6, 7]);
        assert_eq!(steps("decode"), [5, 6, 7]);
        assert_eq!(steps("pull"), [6, 7], "that of step 5 came before its push");
        assert_eq!(steps("apply"), [0; 0]);
        let total = |stage: Stage| stages.totals()[stage as usize];
        let expected = |stage, spans| Total { stage, time: Duration::from_nanos(250 * spans), spans };
        assert_eq!(total(Stage::Push), expected(Stage::Push, 5));
        assert_eq!(total(Stage::Pull), expected(Stage::Pull, 6));
        assert_eq!(total(Stage::Apply), expected(Stage::Apply, 1));
        assert_eq!(total(Stage::Queue), expected(Stage::Queue, 0));
    }
}
