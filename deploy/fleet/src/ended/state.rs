//! How a run ended, as its record and its folder tell.

use crate::{files::JOB_FILE, run_dir::held, shared::JobEnd};
use paraft_record::{EndKind, Event, Run, RunEnd, RunRecord, Summary};
use paraft_worker::{Job, job::SamplerKind};
use std::path::Path;

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
    /// A launcher holds its folder: it goes on.
    Running,
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
            Self::Running => "running",
            Self::NoEnd => "no-end",
        }
    }

    /// The recorded reason.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Failed(why) | Self::Interrupted(why) => {
                Some(why).filter(|why| !why.is_empty()).map(String::as_str)
            }
            Self::Finished | Self::Stopped | Self::Running | Self::NoEnd => None,
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

    /// Of a run that ends in order, before its record says so.
    pub fn in_order(record: &RunRecord) -> Self {
        let trained = record.train.iter().map(|t| t.step.0);
        let steps = trained.chain(record.workers.iter().map(|w| w.steps)).max().unwrap_or(0);
        Self { summary: Some(record.summarize()), steps, ..Self::default() }
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
                None if held(dir).is_some() => EndState::Running,
                None => EndState::NoEnd,
            },
        }
    }

    /// Notes in the record how the run in this folder ended. What people read of it is said here alone.
    pub fn note(&self, dir: &Path, record: &mut RunRecord) {
        let total = total_steps_of(dir, &record.run);
        let state = self.state(dir, record, &record.summarize(), total);
        let at = match total {
            Some(total) => format!("at step {} of {total}", self.steps),
            None => format!("at step {}", self.steps),
        };
        let why = state.reason().map(|why| format!(": {why}")).unwrap_or_default();
        let sentence = match state {
            EndState::Finished => None,
            EndState::Stopped => Some(format!("The run was stopped before its end, {at}.")),
            EndState::Failed(_) => Some(format!("The run failed {at}{why}.")),
            EndState::Interrupted(_) => Some(format!("The run was interrupted {at}{why}.")),
            EndState::Running => Some(format!("The run is still going on, {at}.")),
            EndState::NoEnd if !record.run.founding.is_empty() => {
                Some(format!("The record has no end, {at}: only a launcher writes one."))
            }
            EndState::NoEnd => Some(format!("The record has no end, {at}: the launcher was killed.")),
        };
        let reason = state.reason().map(str::to_string);
        record.end = Some(RunEnd { state: state.name(), reason, sentence });
    }
}

/// The steps that a worker of this run is to train; `None` if only a script knows them, or workers share the samples.
pub fn total_steps_of(dir: &Path, run: &Run) -> Option<u64> {
    total_steps(run, Job::load(&dir.join(JOB_FILE), &[]).ok().as_ref())
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
