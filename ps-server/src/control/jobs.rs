//! The agreed jobs of a fleet and their checkpoints: a part of the agreed state.
//!
//! A job has shards of its own from its submission, or from the founding of a fleet for this job, until it is
//! deleted or its weights were kept for long enough. The facts of a job come from its shards, which hold them
//! in their own logs. The checkpoints come from the workers that write them. Training needs only the places
//! of the shards.

mod difference;
mod job;

pub use difference::is_in;
pub use job::Job;
pub use paraft_changes::job::{Difference, JobFacts, JobState, Submission};

use paraft_changes::{control::Refusal, shape::Shape};
use paraft_common::{JobId, JobShard, checkpoint::KnownCheckpoint};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Jobs without shards are listed until there are more than this many.
pub const MAX_ENDED_JOBS: usize = 64;
/// Maximum number of jobs with shards.
pub const MAX_JOBS: usize = 4096;
/// The longest path of a checkpoint, in bytes.
pub const MAX_PATH_BYTES: usize = 1024;

/// All known jobs, by number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Jobs {
    all: BTreeMap<JobId, Job>,
    /// The number of the next job.
    next: u32,
}

impl Jobs {
    /// All of them, the latest last.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (JobId, &Job)> {
        self.all.iter().map(|(id, job)| (*id, job))
    }

    /// Names of jobs with shards, a few of them, for people.
    pub fn names(&self) -> Vec<String> {
        let held = self.iter().filter(|(_, j)| !j.released && !j.name.is_empty());
        held.map(|(_, j)| format!("`{}`", j.name)).take(16).collect()
    }

    /// By its number.
    pub fn get(&self, job: JobId) -> Option<&Job> {
        self.all.get(&job)
    }

    /// By the founding of its first shard that it runs in: see [`Job::founding`].
    pub fn begun_as(&self, founding: u64) -> Option<(JobId, &Job)> {
        self.iter().find(|(_, j)| founding != 0 && j.founding() == founding)
    }

    /// The job of this name that has shards; else a job without a name yet; else the latest that had the
    /// name. In a fleet that was founded for one job every name matches that job: its leader knows what it
    /// is.
    pub fn named(&self, name: &str) -> Option<(JobId, &Job)> {
        let holds = |j: &Job, name: &str| !j.released && j.name == name;
        let exact = || self.iter().find(|(_, j)| holds(j, name));
        let unnamed = || self.iter().find(|(_, j)| holds(j, ""));
        let ended = || self.iter().rfind(|(_, j)| j.name == name);
        let founded_for = || self.iter().find(|(_, j)| j.token == 0 && !j.released);
        exact().or_else(unnamed).or_else(ended).or_else(founded_for)
    }

    /// Whether this number belongs to a job that was deleted, or has no shards.
    pub fn is_gone(&self, job: JobId) -> bool {
        job.0 < self.next && self.get(job).is_none_or(|j| j.released)
    }

    /// Founds the fleet for one job.
    pub(super) fn found_for_job(&mut self, shape: Shape) {
        self.all.insert(JobId(0), Job::with(shape));
        self.next = self.next.max(1);
    }

    /// Adds a job; returns its number, and whether it is new.
    pub(super) fn submit(&mut self, s: &Submission) -> Result<(JobId, bool), Refusal> {
        let Submission { name, token, shape, keep_ms, seen_ms, run } = s;
        if let Some((id, _)) = self.iter().find(|(_, j)| *token != 0 && j.token == *token) {
            return Ok((id, false));
        }
        if name.is_empty() || name.chars().count() > JobFacts::NAME_CHARS {
            return Err(format!("a job's name has 1 to {} characters", JobFacts::NAME_CHARS).into());
        }
        if shape.shards == 0 || shape.shards > JobShard::SHARDS || shape.replicas % 2 == 0 {
            return Err(
                format!("a job has 1 to {} shards, and an odd number of replicas", JobShard::SHARDS).into()
            );
        }
        if let Some((id, there)) = self.iter().find(|(_, j)| !j.released && j.name == *name) {
            return Err(Refusal::NameTaken { job: id, name: name.clone(), state: there.state });
        }
        let hold = self.all.values().filter(|j| !j.released).count();
        if hold >= MAX_JOBS || self.next >= JobShard::JOBS {
            return Err(format!(
                "{hold} jobs have shards here, at most {MAX_JOBS} may: delete some that have ended"
            )
            .into());
        }
        let id = JobId(self.next);
        self.next += 1;
        let job = Job {
            name: name.clone(),
            token: *token,
            keep_ms: *keep_ms,
            first_seen_ms: *seen_ms,
            run: run.chars().take(MAX_PATH_BYTES / 4).collect(),
            ..Job::with(*shape)
        };
        self.all.insert(id, job);
        self.forget();
        Ok((id, true))
    }

    fn get_mut(&mut self, job: JobId) -> Result<&mut Job, Refusal> {
        self.all.get_mut(&job).ok_or(Refusal::NoJob(job))
    }

    /// Returns its state before.
    pub(super) fn stop(&mut self, id: JobId, now_ms: u64) -> Result<JobState, Refusal> {
        let job = self.get_mut(id)?;
        let before = job.state;
        match before {
            JobState::Running => {}
            // As far as is known: if its first worker has just begun, the job gets the order to stop when its
            // leaders report that.
            JobState::Waiting => job.ends(JobState::Stopped, now_ms),
            ended => return Err(format!("{id} is {} already", ended.name()).into()),
        }
        job.stopping = true;
        Ok(before)
    }

    pub(super) fn release(&mut self, id: JobId) -> Result<(), Refusal> {
        let job = self.get_mut(id)?;
        if !job.state.has_ended() {
            return Err(format!("{id} is {}", job.state.name()).into());
        }
        job.released = true;
        self.forget();
        Ok(())
    }

    /// Returns its last state.
    pub(super) fn delete(&mut self, id: JobId) -> Result<JobState, Refusal> {
        self.all.remove(&id).map(|job| job.state).ok_or(Refusal::NoJob(id))
    }

    pub(super) fn note(
        &mut self,
        shards: &BTreeMap<JobShard, u64>,
        facts: &JobFacts,
        state: JobState,
        seen_ms: u64,
    ) {
        let Some(id) = shards.keys().next().map(|s| s.job()) else { return };
        let Some(job) = self.all.get_mut(&id).filter(|j| !j.released) else { return };
        if job.first_seen_ms == 0 {
            job.first_seen_ms = seen_ms;
        }
        // If a fleet that was founded for one job has lost it, another may have begun in its place.
        if job.name != facts.name && job.token == 0 {
            (job.name, job.checkpoints) = (facts.name.clone(), Vec::new());
        }
        (job.foundings, job.facts) =
            (shards.iter().map(|(s, f)| (s.shard(), *f)).collect(), Some(facts.clone()));
        let state = if job.stopping && state == JobState::Finished { JobState::Stopped } else { state };
        if job.state != state {
            job.ends(state, seen_ms);
        }
    }

    /// The change after which the checkpoints in `folder` are `held`, as the job that began as `founding`
    /// reports; `None`: no change. A job that continues from a checkpoint writes to the same folder, and a
    /// checkpoint that is gone is gone from every job.
    pub fn difference(&self, founding: u64, folder: &str, held: Vec<KnownCheckpoint>) -> Option<Difference> {
        let (id, job) = self.begun_as(founding)?;
        let others = || self.iter().filter(|(other, _)| *other != id).map(|(_, j)| j);
        let stale = |h: &KnownCheckpoint| {
            let mut listed = others().flat_map(|j| &j.checkpoints).filter(|c| c.path == h.path);
            listed.any(|c| !c.is_same(h) || c.best != h.best)
        };
        let mut d = job.difference(folder, held.clone());
        let gone = others().flat_map(|j| j.gone(folder, &held));
        let more: BTreeSet<&String> = gone.filter(|p| !d.gone.contains(p)).collect();
        let more: Vec<String> = more.into_iter().cloned().collect();
        d.gone.extend(more);
        let told: Vec<KnownCheckpoint> =
            held.into_iter().filter(|h| stale(h) && d.held.iter().all(|t| t.path != h.path)).collect();
        d.held.extend(told);
        (!d.held.is_empty() || !d.gone.is_empty()).then_some(d)
    }

    /// `false` if there is no such job.
    pub(super) fn note_checkpoints(&mut self, founding: u64, difference: &Difference) -> bool {
        let Some(id) = self.begun_as(founding).map(|(id, _)| id) else { return false };
        for (other, job) in &mut self.all {
            match *other == id {
                true => job.change(difference),
                false => job.heed(difference),
            }
        }
        true
    }

    /// The shard is founded again: an unfinished job of an earlier founding is lost.
    pub(super) fn restart_shard(&mut self, shard: JobShard, founding: u64) {
        if let Some(job) = self.all.get_mut(&shard.job())
            && job.state == JobState::Running
            && job.foundings.get(&shard.shard()).is_some_and(|before| *before != founding)
        {
            // The time is unknown here, and a lost job is not kept for long anyway.
            job.state = JobState::Lost;
        }
    }

    /// Of the jobs without shards, keeps the last ones.
    fn forget(&mut self) {
        let released: Vec<JobId> = self.iter().filter(|(_, j)| j.released).map(|(id, _)| id).collect();
        let more = released.len().saturating_sub(MAX_ENDED_JOBS);
        for id in &released[..more] {
            self.all.remove(id);
        }
    }
}
