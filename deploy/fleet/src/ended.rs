//! A run that has ended, read from its folder: no server is left to answer.
//!
//! The record says how it ended: a summary is the end of a run that finished or was stopped, an `end` line that of one
//! that failed or was interrupted. A launcher that was killed has written neither.

use crate::{
    failure::Failure,
    files::{JOB_FILE, REPORT_FILE},
};
use paraft_checkpoint::{Folder, MODEL_FILE, Manifest};
use paraft_proto::{CheckpointInfo, FleetShape, JobInfo};
use paraft_record::{Event, METRICS_FILE, RecordError, Run, RunRecord, Summary, read_events};
use paraft_worker::{Job, checkpoints, exit};
use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

mod state;

pub(crate) use state::total_steps;
pub use state::{EndState, RecordedEnd, total_steps_of};

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

/// The report of the run in this folder, or of the comparison that the run is a part of, if it was written.
pub fn report(dir: &Path) -> Option<PathBuf> {
    let exists = |path: PathBuf| Some(path).filter(|path| path.is_file());
    exists(dir.join(REPORT_FILE)).or_else(|| exists(report_of_comparison(dir)?))
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
