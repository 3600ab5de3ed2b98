//! What a worker leaves behind: lines of `metrics.jsonl`, and numbers for Prometheus.

use crate::metrics::Gauges;
use paraft_common::{Step, WorkerId};
use paraft_record::{Event, Follow, MetricsWriter, RecordError, event};
use std::{
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// No more than one training line in this time: a line costs a system call, and a step may take 0.1 ms.
const LINE_INTERVAL: Duration = Duration::from_millis(50);

/// Unix time in seconds.
pub fn wall() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

pub struct Recorder {
    worker: WorkerId,
    file: Option<MetricsWriter>,
    /// Writes event files where no launcher does.
    _follow: Option<Follow>,
    gauges: Arc<Gauges>,
    since: Instant,
    /// Of those that are known: their sum and number.
    losses: (f64, u64),
    last: (f64, u64),
    /// Of the steps since the last line.
    unsaid: Option<Progress>,
}

/// Where a worker stands after a step.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pub step: Step,
    pub epoch: u64,
    /// By this worker.
    pub samples: u64,
    /// The training clock: evaluation stands still.
    pub seconds: f64,
    pub wait_seconds: f64,
}

impl Recorder {
    pub fn new(worker: WorkerId, run_dir: Option<&Path>, gauges: Arc<Gauges>) -> Result<Self, RecordError> {
        let file = run_dir.map(|d| MetricsWriter::append(d.join(paraft_record::METRICS_FILE))).transpose()?;
        let say = |e: &RecordError| tracing::warn!(why = %e, "no more event files for TensorBoard");
        let follow = run_dir.map(|d| Follow::beside(d, say));
        Ok(Self {
            worker,
            file,
            _follow: follow,
            gauges,
            since: Instant::now(),
            losses: (0.0, 0),
            last: (0.0, 0),
            unsaid: None,
        })
    }

    pub fn write(&mut self, event: &Event) -> Result<(), RecordError> {
        self.file.as_mut().map_or(Ok(()), |f| f.write(event))
    }

    /// Counts a step; writes a line now and then, and always when `now` says so. `loss`: NaN where it is not known.
    pub fn step(&mut self, p: Progress, loss: f32, now: bool) -> Result<(), RecordError> {
        if !loss.is_nan() {
            self.losses.0 += f64::from(loss);
            self.losses.1 += 1;
        }
        self.gauges.step.store(p.step.0, Relaxed);
        self.gauges.samples.store(p.samples, Relaxed);
        if !now && self.since.elapsed() < LINE_INTERVAL {
            self.unsaid = Some(p);
            return Ok(());
        }
        self.line(p)
    }

    /// Writes what was counted since the last line: nothing comes any more.
    pub fn rest(&mut self) -> Result<(), RecordError> {
        self.unsaid.map_or(Ok(()), |p| self.line(p))
    }

    fn line(&mut self, p: Progress) -> Result<(), RecordError> {
        self.unsaid = None;
        self.since = Instant::now();
        // 0/0 is NaN: none is known.
        let loss = self.losses.0 / self.losses.1 as f64;
        self.losses = (0.0, 0);
        let elapsed = p.seconds - self.last.0;
        let rate = if elapsed > 0.0 { (p.samples - self.last.1) as f64 / elapsed } else { 0.0 };
        self.last = (p.seconds, p.samples);
        self.gauges.loss(loss);
        self.gauges.waited(p.wait_seconds);
        self.write(&Event::Train(event::Train {
            wall: wall(),
            worker: self.worker,
            step: p.step,
            epoch: p.epoch,
            samples: p.samples,
            seconds: p.seconds,
            loss,
            samples_per_s: rate,
            wait_seconds: p.wait_seconds,
            delay_mean: None,
        }))
    }
}
