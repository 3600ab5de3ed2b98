//! Chrome's Trace Event format, the JSON object form: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.
//!
//! Slices of one track must lie within or behind each other; spans of a stage overlap as they like. So a stage has as many
//! tracks as it has spans at the same time, and a span goes to the first that is free.

use crate::{Moment, Span, Stage, file::Incarnation};
use paraft_common::{BucketId, Step, WorkerId};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
};

/// Spans that share their tracks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    /// A worker's thread that computes.
    Training,
    /// Micro-batches through a rank's stages.
    Passes,
    Of(Stage),
    OfShard(u32, Stage),
}

impl Group {
    fn of(span: &Span) -> Self {
        match span.stage {
            Stage::Ready | Stage::Copy | Stage::Encode | Stage::Decode => Group::Training,
            Stage::Push | Stage::Pull => Group::Of(span.stage),
            Stage::Forward | Stage::Backward => Group::Passes,
            stage => Group::OfShard(span.shard.0, stage),
        }
    }

    fn name(self, lane: usize) -> String {
        let name = match self {
            Group::Training => "training".to_string(),
            Group::Passes => "micro-batches".to_string(),
            Group::Of(stage) => stage.to_string(),
            Group::OfShard(shard, stage) => format!("shard {shard} {stage}"),
        };
        if lane == 0 { name } else { format!("{name}, {}", lane + 1) }
    }
}

/// A span and its track.
struct PlacedSpan<'a> {
    span: &'a Span,
    pid: usize,
    tid: usize,
}

type Key = (Step, BucketId, WorkerId);

pub(crate) fn write(out: &mut impl Write, lives: &[Incarnation]) -> io::Result<()> {
    let start = lives.iter().flat_map(|l| &l.spans).map(|s| s.begin).min().unwrap_or_default();
    let mut events = Events { out, first: true, start };
    write!(events.out, "{{\"traceEvents\":[")?;
    let mut all = Vec::new();
    for (pid, life) in (1..).zip(lives) {
        let name = format!("{} (pid {})", life.process.name, life.process.pid);
        events.name("process", pid, 0, &name)?;
        let (placed, tracks) = place(pid, &life.spans);
        for (tid, name) in (1..).zip(tracks) {
            events.name("thread", pid, tid, &name)?;
        }
        for p in &placed {
            events.slice(p)?;
        }
        all.extend(placed);
    }
    arrows(&mut events, &all)?;
    let missing: u64 = lives.iter().map(|l| l.missing).sum();
    let other = json!({"program": "paraft", "missing_spans": missing});
    writeln!(events.out, "\n],\"displayTimeUnit\":\"ms\",\"otherData\":{other}}}")
}

/// Gives each span a track; the tracks' names, in the order in which they are shown.
fn place(pid: usize, spans: &[Span]) -> (Vec<PlacedSpan<'_>>, Vec<String>) {
    let mut groups: BTreeMap<Group, Vec<&Span>> = BTreeMap::new();
    for span in spans {
        groups.entry(Group::of(span)).or_default().push(span);
    }
    let (mut placed, mut tracks) = (Vec::with_capacity(spans.len()), Vec::new());
    for (group, mut spans) in groups {
        spans.sort_by_key(|s| (s.begin, s.end));
        let before = tracks.len();
        let mut free_at: Vec<Moment> = Vec::new();
        for span in spans {
            let lane = free_at.iter().position(|end| *end <= span.begin).unwrap_or_else(|| {
                tracks.push(group.name(free_at.len()));
                free_at.push(Moment(0));
                free_at.len() - 1
            });
            free_at[lane] = span.end;
            placed.push(PlacedSpan { span, pid, tid: before + lane + 1 });
        }
    }
    (placed, tracks)
}

/// From each push over the apply of its update, on the leader, to the pull that brings it back.
fn arrows<W: Write>(events: &mut Events<'_, W>, all: &[PlacedSpan<'_>]) -> io::Result<()> {
    let key = |s: &Span| Some((s.step, s.bucket?, s.worker?));
    let mut pulls: HashMap<Key, &PlacedSpan<'_>> = HashMap::new();
    // The leader is who has replicated it; an update of several workers has none for its worker.
    let mut leaders: HashMap<(Step, BucketId, Option<WorkerId>), usize> = HashMap::new();
    for p in all {
        match (p.span.stage, p.span.bucket) {
            (Stage::Pull, Some(_)) => _ = key(p.span).map(|k| pulls.insert(k, p)),
            (Stage::Replicate, Some(b)) => _ = leaders.insert((p.span.step, b, p.span.worker), p.pid),
            _ => {}
        }
    }
    let mut applies: HashMap<(Step, BucketId, Option<WorkerId>), &PlacedSpan<'_>> = HashMap::new();
    for p in all.iter().filter(|p| p.span.stage == Stage::Apply) {
        let Some(bucket) = p.span.bucket else { continue };
        let of = (p.span.step, bucket, p.span.worker);
        // With state deltas no replica receives a single bucket, and only the leader applies it.
        if leaders.get(&of).is_none_or(|pid| *pid == p.pid) {
            applies.insert(of, p);
        }
    }
    let pushes = all.iter().filter(|p| p.span.stage == Stage::Push);
    for (id, push) in (1u64..).zip(pushes) {
        let Some((step, bucket, worker)) = key(push.span) else { continue };
        let apply = applies.get(&(step, bucket, Some(worker))).or_else(|| applies.get(&(step, bucket, None)));
        let Some(apply) = apply else { continue };
        events.flow("s", id, push, push.span.begin)?;
        let pull = pulls.get(&(step, bucket, worker)).filter(|p| p.span.end >= apply.span.begin);
        let Some(pull) = pull else {
            events.flow("f", id, apply, apply.span.begin)?;
            continue;
        };
        events.flow("t", id, apply, apply.span.begin)?;
        events.flow("f", id, pull, apply.span.begin.max(pull.span.begin))?;
    }
    Ok(())
}

struct Events<'a, W> {
    out: &'a mut W,
    first: bool,
    start: Moment,
}

impl<W: Write> Events<'_, W> {
    fn event(&mut self, event: &Value) -> io::Result<()> {
        let separator = if std::mem::take(&mut self.first) { "\n" } else { ",\n" };
        write!(self.out, "{separator}{event}")
    }

    /// The format's unit.
    fn micros(&self, at: Moment) -> f64 {
        at.0.saturating_sub(self.start.0) as f64 / 1e3
    }

    fn name(&mut self, what: &str, pid: usize, tid: usize, name: &str) -> io::Result<()> {
        let order = if tid == 0 { pid } else { tid };
        self.event(&json!({"ph": "M", "name": format!("{what}_name"), "pid": pid, "tid": tid,
            "args": {"name": name}}))?;
        self.event(&json!({"ph": "M", "name": format!("{what}_sort_index"), "pid": pid, "tid": tid,
            "args": {"sort_index": order}}))
    }

    fn slice(&mut self, p: &PlacedSpan<'_>) -> io::Result<()> {
        let s = p.span;
        let mut args = json!({"step": s.step, "shard": s.shard, "bytes": s.bytes});
        if let Some(bucket) = s.bucket {
            args["bucket"] = json!(bucket);
        }
        if let Some(worker) = s.worker {
            args["worker"] = json!(worker);
        }
        if let Some(pass) = s.pass {
            args["micro_batch"] = json!(pass.micro_batch);
            args["version"] = json!(pass.version);
        }
        let dur = (s.end.0 - s.begin.0) as f64 / 1e3;
        self.event(&json!({"ph": "X", "name": s.stage, "cat": "stage", "pid": p.pid, "tid": p.tid,
            "ts": self.micros(s.begin), "dur": dur, "args": args}))
    }

    /// A point of an arrow, in the slice at its place.
    fn flow(&mut self, ph: &str, id: u64, at: &PlacedSpan<'_>, when: Moment) -> io::Result<()> {
        let mut event = json!({"ph": ph, "name": "gradient", "cat": "gradient", "id": id, "pid": at.pid,
            "tid": at.tid, "ts": self.micros(when)});
        if ph == "f" {
            event["bp"] = json!("e");
        }
        self.event(&event)
    }
}
