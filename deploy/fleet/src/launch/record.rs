//! The launcher's record of a run.

use super::{Answer, describe};
use crate::{
    failure::Failure,
    files::{put, wall},
    fleet::JOB_FILE,
    launcher_log::{LAUNCHER_LOG, LauncherLog},
    track::{Sweep, Tracked, mlflow::Status},
};
use paraft_common::{ServerId, ShardId, Version, WorkerId, histogram::LogHistogram};
use paraft_proto::{Bin, ShardStatus, Wait, WorkerStaleness};
use paraft_record::{Event, METRICS_FILE, MetricsWriter, RunRecord, event};
use paraft_worker::Job;
use std::{path::Path, sync::Arc};

/// The launcher's record of a run.
pub(crate) struct Record {
    pub writer: MetricsWriter,
    pub tracked: Tracked,
    /// What this launcher notes.
    pub log: LauncherLog,
    /// Its first line.
    pub run: event::Run,
    /// The servers' replies after the bootstrap.
    before: Vec<Answer>,
}

impl Record {
    /// Starts the record and writes the job file beside it. Reduces the job's shards to those with
    /// buckets, and applies `settle` then; `logs_shards`: prints their new number.
    /// `of`: the sweep of a trial.
    pub(crate) fn begin(
        job: &mut Job,
        dir: &Path,
        resume: Option<&Path>,
        logs_shards: bool,
        of: Option<Arc<Sweep>>,
        settle: impl FnOnce(&mut Job, &mut event::Run) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let shards = job.shards();
        let mut run = describe(job, resume)?;
        settle(job, &mut run)?;
        if logs_shards && run.shards < shards {
            eprintln!("cluster.shards = {shards}, and the model has fewer buckets: it gets {}", run.shards);
        }
        let file = dir.join(JOB_FILE);
        put(&file, &job.to_toml()).map_err(|e| Failure::write(&file, e))?;
        let mut writer = MetricsWriter::append(dir.join(METRICS_FILE))?;
        let first = Event::Run(run.clone());
        writer.write(&first)?;
        let tracked = Tracked::new(dir, job, &first, of);
        let log = LauncherLog::open(dir).map_err(|e| Failure::write(&dir.join(LAUNCHER_LOG), e))?;
        let from = run.resumed_step.map(|step| format!(" from step {}", step.0)).unwrap_or_default();
        let (workers, servers, mode) = (run.workers, run.servers, &run.mode);
        log.info(&format!("the run begins{from}: workers {workers}, servers {servers}, {mode}"));
        Ok(Self { writer, tracked, log, run, before: Vec::new() })
    }

    /// The user has ended the run.
    pub(crate) fn killed(&mut self) {
        self.tracked.status = Status::Killed;
        self.log.warn("a signal has ended the run");
        let (how, reason) = (event::EndKind::Interrupted, "a signal".to_string());
        // The end counts more than that it can't be recorded.
        let _ = self.writer.write(&Event::End(event::End { wall: wall(), how, reason }));
    }

    /// The run has failed.
    pub(crate) fn failed(&mut self, e: &Failure, dir: &Path) {
        let has_end = crate::ended::has_end(dir);
        if !has_end || e.diverged() {
            self.log.error(e.message());
        }
        if has_end {
            return;
        }
        let (how, reason) = (event::EndKind::Failed, e.message().to_string());
        // The failure itself counts more than that it can't be recorded.
        let _ = self.writer.write(&Event::End(event::End { wall: wall(), how, reason }));
    }

    /// Stores the servers' replies from before the training.
    pub(crate) fn before(&mut self, answers: Vec<Answer>) {
        self.before = answers;
    }

    /// Computes the totals from the servers' replies after the training.
    pub(crate) fn end(&mut self, after: &[Answer], job: &Job) -> Result<(), Failure> {
        // The servers may have other jobs.
        let ours = |s: &&ShardStatus| s.job_name == job.name;
        if !job.cluster.script.is_empty() && holds_no_model(after, ours) {
            eprintln!(
                "warning: no worker came to the servers, and nothing was trained on them: does {} call paraft.init()?",
                self.run.model
            );
        }
        // Each former leader of the shard has answered some pulls.
        let pulls = |shard: u32| {
            let all = after.iter().flatten().flat_map(|r| &r.shards);
            let of = all.filter(ours).filter(move |s| s.shard == shard);
            of.fold((0, 0), |(waited, bytes), s| (waited + s.pulls_waited, bytes + s.bytes_pulled))
        };
        for reply in after.iter().flatten() {
            let began = self
                .before
                .iter()
                .flatten()
                .find(|b| b.server == reply.server)
                .map_or(0.0, |b| b.cpu_seconds);
            self.writer.write(&Event::Server(event::Server {
                wall: wall(),
                server: ServerId(reply.server),
                cpu_seconds: reply.cpu_seconds - began,
                peak_rss_bytes: reply.peak_rss_bytes,
            }))?;
            for s in reply.shards.iter().filter(ours).filter(|s| s.role == "leader" && s.buckets > 0) {
                let (pulls_waited, bytes_pulled) = pulls(s.shard);
                self.writer.write(&Event::Shard(event::Shard {
                    wall: wall(),
                    shard: ShardId(s.shard),
                    server: ServerId(reply.server),
                    version: Version(s.version),
                    delay: s.delay_counts.clone(),
                    pushes: s.pushes,
                    pulls_waited,
                    bytes_pushed: s.bytes_pushed,
                    bytes_pulled,
                    pushes_lost: s.pushes_lost,
                    dropped: s.dropped,
                    staleness: s.staleness.iter().map(staleness).collect(),
                    waits: s.waits.iter().map(wait).collect(),
                }))?;
            }
        }
        Ok(())
    }

    /// Writes the summary, which ends the record.
    pub(crate) fn close(&mut self, dir: &Path) -> Result<RunRecord, Failure> {
        let record = RunRecord::load(dir)?;
        self.writer.write(&Event::Summary(record.summarize()))?;
        self.tracked.status = Status::Finished;
        self.log.info("the run has ended");
        Ok(record)
    }
}

/// Whether every server reports that it holds no model of the job.
fn holds_no_model(answers: &[Answer], ours: impl Fn(&&ShardStatus) -> bool) -> bool {
    let none = |a: &Answer| a.as_ref().is_ok_and(|r| r.shards.iter().filter(&ours).all(|s| s.buckets == 0));
    !answers.is_empty() && answers.iter().all(none)
}

fn wait(w: &Wait) -> event::Wait {
    event::Wait { worker: WorkerId(w.worker), of: WorkerId(w.of), seconds: w.seconds }
}

fn staleness(of: &WorkerStaleness) -> event::Staleness {
    let bins = |bins: &[Bin], sum| LogHistogram::from_bins(bins.iter().map(|b| (b.upper, b.count)), sum);
    event::Staleness {
        worker: WorkerId(of.worker),
        delay: of.delay_counts.clone(),
        distance: bins(&of.distance, of.distance_sum),
        age: bins(&of.age_seconds, of.age_seconds_sum),
    }
}
