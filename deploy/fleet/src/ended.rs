//! A run that has ended, read from its folder: no server is left to answer.
//!
//! The record says how it ended: a summary is the end of a run that finished or was stopped, an `end` line that of one
//! that failed or was interrupted. A launcher that was killed has written neither.

use crate::{
    failure::Failure,
    files::{JOB_FILE, REPORT_FILE},
    run_dir::held,
    shared::JobEnd,
};
use paraft_checkpoint::{Folder, MODEL_FILE, Manifest};
use paraft_proto::{CheckpointInfo, FleetShape, JobInfo};
use paraft_record::{EndKind, Event, METRICS_FILE, RecordError, Run, RunRecord, Summary, read_events};
use paraft_worker::{Job, checkpoints, exit, job::SamplerKind};
use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndState {
    /// It trained all that it was to train.
    Finished,
    /// It ended in order before that: by `paraft stop`, the first Ctrl-C, or its rule of early stopping.
    Stopped,
    /// A process failed, or the loss became NaN; with the reason.
    Failed(String),
    /// A signal ended it at once; with the reason.
    Interrupted(String),
    /// Its launcher is gone and has not recorded an end: it was killed, or its host was.
    NoEnd,
}

impl EndState {
    /// One word, for programs and tables.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Failed(_) => "failed",
            Self::Interrupted(_) => "interrupted",
            Self::NoEnd => "no-end",
        }
    }

    /// The recorded reason.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Failed(why) | Self::Interrupted(why) => {
                Some(why).filter(|why| !why.is_empty()).map(String::as_str)
            }
            Self::Finished | Self::Stopped | Self::NoEnd => None,
        }
    }

    /// For people.
    pub fn says(&self) -> String {
        match (self, self.reason()) {
            (Self::NoEnd, _) => "its launcher is gone and the record has no end".into(),
            (Self::Stopped, _) => "stopped before its end".into(),
            (_, Some(why)) => format!("{}: {why}", self.name()),
            (_, None) => self.name().into(),
        }
    }
}

/// A run that has ended, and what lies in its folder.
pub struct EndedRun {
    /// The folder.
    pub dir: PathBuf,
    /// How it ended.
    pub state: EndState,
    /// The record's first line.
    pub run: Run,
    /// The mode in which it ended.
    pub mode: String,
    /// The totals.
    pub summary: Summary,
    /// The last recorded step of the worker that came furthest.
    pub steps: u64,
    /// The steps that a worker was to train; `None` if only a script knows them, or workers share the samples.
    pub total_steps: Option<u64>,
    /// The report, if it was written.
    pub report: Option<PathBuf>,
    /// The final weights, if they were written.
    pub model: Option<PathBuf>,
    /// The folder of checkpoints, which may lie elsewhere.
    pub checkpoints: PathBuf,
    /// The checkpoints with all of their files, the latest last.
    pub saved: Vec<CheckpointInfo>,
    /// The resolved job, if it can be read.
    job: Option<Job>,
}

impl EndedRun {
    /// Reads the folder of a run that has ended.
    ///
    /// # Errors
    ///
    /// The record cannot be read, or has no beginning.
    pub fn read(dir: &Path) -> Result<Self, Failure> {
        let path = dir.join(METRICS_FILE);
        let events = read_events(&path).map_err(|e| unreadable(&e, dir))?;
        let end = RecordedEnd::of(&events);
        let record = RunRecord::from_events(events)
            .ok_or_else(|| unreadable(&RecordError::NoRun { path: path.clone() }, dir))?;
        let summary = record.summarize();
        let job = Job::load(&dir.join(JOB_FILE), &[]).ok();
        let total_steps = total_steps(&record.run, job.as_ref());
        let steps = end.steps;
        let state = end.state(dir, &record, &summary, total_steps);
        let checkpoints = job.as_ref().and_then(|job| checkpoints::folder(job, Some(dir)));
        let checkpoints = checkpoints.unwrap_or_else(|| dir.join("checkpoints"));
        let exists = |path: PathBuf| Some(path).filter(|path| path.is_file());
        Ok(Self {
            state,
            mode: record.switched_to().unwrap_or(&record.run.mode).to_string(),
            summary,
            steps,
            total_steps,
            report: report(dir),
            model: exists(dir.join(MODEL_FILE)),
            saved: saved(&Folder::new(&checkpoints)),
            checkpoints,
            job,
            run: record.run,
            dir: dir.to_path_buf(),
        })
    }

    /// Fails if a user asks for another job than this run's.
    ///
    /// # Errors
    ///
    /// The name is another job's.
    pub fn is_of(&self, job: &str) -> Result<(), Failure> {
        if job == self.run.name {
            return Ok(());
        }
        let why = format!("{}: that run has no job `{job}`", self.dir.display());
        Err(Failure::new(exit::CONFIG, why)
            .help(format!("it has ended, and its job was `{}`", self.run.name)))
    }

    /// The command that continues the training; `None` if it has finished or there is no whole checkpoint.
    pub fn resume(&self) -> Option<String> {
        let newest = PathBuf::from(&self.saved.last()?.path);
        if self.state == EndState::Finished {
            return None;
        }
        // Given the run's folder, --resume takes the checkpoint that `latest` names.
        let is_latest = Folder::new(&self.checkpoints).latest().as_ref() == Some(&newest);
        let from = match is_latest && self.checkpoints == self.dir.join("checkpoints") {
            true => self.dir.as_path(),
            false => newest.as_path(),
        };
        let quoted = |path: &Path| paraft_engines::fleet::quoted(&path.to_string_lossy());
        let from = quoted(from);
        // A script and its arguments are in the job file.
        Some(match (&self.job, self.run.of_script()) {
            (Some(_), _) => format!("paraft train {} --resume {from}", quoted(&self.dir.join(JOB_FILE))),
            (None, true) => format!("paraft launch --resume={from} SCRIPT"),
            (None, false) => format!("paraft train JOB --resume {from}"),
        })
    }

    /// The job as a control group would describe it.
    pub fn as_job(&self) -> JobInfo {
        let durability = self.job.as_ref().map_or(String::new(), |job| job.cluster.durability.name().into());
        let model = self.model.as_ref().and_then(|model| fs::metadata(model).ok()).map(|m| m.len());
        let bytes = model.or_else(|| self.saved.last().map(|c| c.bytes)).unwrap_or(0);
        let record = fs::metadata(self.dir.join(METRICS_FILE)).and_then(|m| m.modified()).ok();
        let ended =
            record.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map_or(0, |d| d.as_millis() as u64);
        JobInfo {
            name: self.run.name.clone(),
            mode: self.run.mode.clone(),
            workers: self.run.workers,
            durability: durability.clone(),
            state: self.state.name().into(),
            first_seen_ms: (self.run.wall * 1e3) as u64,
            checkpoints: self.saved.clone(),
            shape: Some(FleetShape { shards: self.run.shards, replicas: self.run.replicas, durability }),
            released: self.model.is_none() && self.saved.is_empty(),
            ended_ms: ended.max(1),
            bytes,
            run: self.dir.display().to_string(),
            ..JobInfo::default()
        }
    }
}

/// What the lines of a record say about the run's end.
#[derive(Clone, Debug, Default)]
pub struct RecordedEnd {
    /// The totals that the launcher wrote.
    pub summary: Option<Summary>,
    /// The last recorded step of the worker that came furthest.
    pub steps: u64,
    end: Option<EndState>,
    diverged: Option<String>,
}

impl RecordedEnd {
    /// Of the events of a record, or of its first and last ones.
    pub fn of(events: &[Event]) -> Self {
        let mut it = Self::default();
        for event in events {
            match event {
                Event::Summary(s) => it.summary = Some(s.clone()),
                Event::Diverged(d) => it.diverged = Some(d.reason.clone()),
                Event::End(e) if it.end.is_none() => {
                    it.end = Some(match e.how {
                        EndKind::Failed => EndState::Failed(e.reason.clone()),
                        EndKind::Interrupted => EndState::Interrupted(e.reason.clone()),
                    });
                }
                Event::Train(t) => it.steps = it.steps.max(t.step.0),
                Event::Worker(w) => it.steps = it.steps.max(w.steps),
                _ => {}
            }
        }
        it
    }

    /// How the run in this folder ended; `total_steps`: as [`total_steps_of`] says.
    pub fn state(
        &self,
        dir: &Path,
        record: &RunRecord,
        summary: &Summary,
        total_steps: Option<u64>,
    ) -> EndState {
        let in_order = || match trained_all(record, summary, self.steps, total_steps) {
            true => EndState::Finished,
            false => EndState::Stopped,
        };
        match (&self.diverged, &self.end) {
            // A comparison writes the totals of such a run too.
            (Some(why), _) => EndState::Failed(why.clone()),
            _ if self.summary.is_some() => in_order(),
            (None, Some(end)) => end.clone(),
            // The processes of an engine have no launcher that ends the record.
            (None, None) => match JobEnd::of_run(dir) {
                Some(JobEnd::Done) => in_order(),
                Some(JobEnd::Failed { worker, node, code, said }) => {
                    let last = said.lines().next_back().unwrap_or_default();
                    EndState::Failed(format!("worker w{worker} on {node}, code {code}: {last}"))
                }
                None => EndState::NoEnd,
            },
        }
    }
}

impl RecordedEnd {
    /// Of a run that ends in order, before its record says so.
    pub fn in_order(record: &RunRecord) -> Self {
        let trained = record.train.iter().map(|t| t.step.0);
        let steps = trained.chain(record.workers.iter().map(|w| w.steps)).max().unwrap_or(0);
        Self { summary: Some(record.summarize()), steps, ..Self::default() }
    }

    /// Notes in the record how the run in this folder ended, for its report.
    pub fn note(&self, dir: &Path, record: &mut RunRecord) {
        let total = total_steps_of(dir, &record.run);
        let state = self.state(dir, record, &record.summarize(), total);
        let at = match total {
            Some(total) => format!("at step {} of {total}", self.steps),
            None => format!("at step {}", self.steps),
        };
        let why = state.reason().map(|why| format!(": {why}")).unwrap_or_default();
        record.end = match state {
            EndState::Finished => None,
            EndState::Stopped => Some(format!("The run was stopped before its end, {at}.")),
            EndState::Failed(_) => Some(format!("The run failed {at}{why}.")),
            EndState::Interrupted(_) => Some(format!("The run was interrupted {at}{why}.")),
            EndState::NoEnd if held(dir).is_some() => Some(format!("The run is still going on, {at}.")),
            EndState::NoEnd if !record.run.founding.is_empty() => {
                Some(format!("The record has no end, {at}: only a launcher writes one."))
            }
            EndState::NoEnd => Some(format!("The record has no end, {at}: the launcher was killed.")),
        };
    }
}

/// The report of the run in this folder, or of the comparison that the run is a part of, if it was written.
pub fn report(dir: &Path) -> Option<PathBuf> {
    let exists = |path: PathBuf| Some(path).filter(|path| path.is_file());
    exists(dir.join(REPORT_FILE)).or_else(|| exists(report_of_comparison(dir)?))
}

/// The steps that a worker of this run is to train; `None` if only a script knows them, or workers share the samples.
pub fn total_steps_of(dir: &Path, run: &Run) -> Option<u64> {
    total_steps(run, Job::load(&dir.join(JOB_FILE), &[]).ok().as_ref())
}

/// Whether the record in this folder says that the run has ended. It reads only the record's last lines.
pub fn has_end(dir: &Path) -> bool {
    let last = || -> io::Result<Vec<u8>> {
        let mut file = File::open(dir.join(METRICS_FILE))?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(MAX_LAST_LINES)))?;
        let mut last = Vec::new();
        file.read_to_end(&mut last)?;
        Ok(last)
    };
    let is_end = |line: &[u8]| {
        matches!(serde_json::from_slice(line), Ok(Event::Summary(_) | Event::End(_) | Event::Diverged(_)))
    };
    last().is_ok_and(|last| last.split(|byte| *byte == b'\n').rev().any(is_end))
}

/// Maximal bytes of the end line and of those that workers wrote after it.
const MAX_LAST_LINES: u64 = 1 << 16;

fn unreadable(e: &RecordError, dir: &Path) -> Failure {
    let failure = Failure::new(exit::DATA, e);
    match e {
        RecordError::NoRun { .. } => failure.help(format!(
            "its launcher ended before the training began, or the file is cut; what its processes said is in {}: *.log, *.stderr",
            dir.display()
        )),
        RecordError::DamagedLine { .. } => failure.help("remove that line; the others may be whole"),
        _ => failure.help("give the folder of a run, as `paraft train` printed it"),
    }
}

/// The steps of a worker in the whole job.
pub(crate) fn total_steps(run: &Run, job: Option<&Job>) -> Option<u64> {
    let is_shared = job.is_some_and(|job| job.train.sampler == SamplerKind::Leased);
    if run.of_script() || run.samples_budget == 0 || is_shared {
        return None;
    }
    let resumed = run.resumed_step.map_or(0, |step| step.0);
    let share = job.map_or(run.batch.saturating_mul(run.workers.into()), |job| {
        (job.train.batch as u64).saturating_mul(job.shares().into())
    });
    let a_step = job.map_or(1, |job| job.local.minibatches());
    let minibatches = run.samples_budget / share.max(1);
    Some(resumed.saturating_add(minibatches.div_ceil(a_step.max(1))))
}

/// Whether a run that ended in order trained all that it was to train.
fn trained_all(record: &RunRecord, summary: &Summary, steps: u64, total_steps: Option<u64>) -> bool {
    let run = &record.run;
    // A script alone knows its end.
    let unknown = run.samples_budget == 0;
    // A stopped run is evaluated at its end too, within the epoch that it was in.
    let passes = run.epochs > 0 && record.evals.iter().any(|e| !e.is_final && e.epoch >= run.epochs);
    unknown
        || passes
        || summary.samples >= run.samples_budget
        || total_steps.is_some_and(|total| steps >= total)
}

/// The report of a comparison, of which this run is a part.
fn report_of_comparison(dir: &Path) -> Option<PathBuf> {
    let above = dir.parent()?;
    above.join("compare.json").is_file().then(|| above.join(REPORT_FILE))
}

/// The checkpoints whose files are all there, the latest last.
fn saved(folder: &Folder) -> Vec<CheckpointInfo> {
    let best = folder.best();
    let of = |(path, manifest): (PathBuf, Option<Manifest>)| {
        let manifest = manifest.filter(|m| is_whole(&path, m))?;
        let versions = || manifest.buckets.iter().map(|b| b.version);
        let best = best.as_ref().filter(|(best, _)| *best == path);
        Some(CheckpointInfo {
            path: path.display().to_string(),
            step: manifest.step,
            lowest_version: versions().min().unwrap_or(0),
            highest_version: versions().max().unwrap_or(0),
            bytes: manifest.files.values().map(|f| f.bytes).sum(),
            loss: best.map(|(_, loss)| *loss),
            written_ms: (manifest.written * 1e3) as u64,
            best: best.is_some(),
            ..CheckpointInfo::default()
        })
    };
    folder.manifests().into_iter().rev().filter_map(of).collect()
}

/// Whether its files have their lengths; --resume compares their checksums.
fn is_whole(path: &Path, manifest: &Manifest) -> bool {
    let has = |(name, stamp): (&String, &paraft_checkpoint::manifest::FileStamp)| {
        fs::metadata(path.join(name)).is_ok_and(|m| m.len() == stamp.bytes)
    };
    !manifest.files.is_empty() && manifest.files.iter().all(has)
}

#[cfg(test)]
#[path = "ended_tests.rs"]
mod tests;
