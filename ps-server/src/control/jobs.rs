//! The jobs of a fleet and their checkpoints, as far as they are agreed on: a part of the agreed state.
//!
//! A job is named by the founding of shard 0 that it runs in: two jobs of the same name on one fleet differ in it.
//! What a job is comes from its shards, who hold it in their own logs; what checkpoints there are comes from the
//! workers that write them. Nothing here is needed to train: it is what is left to ask when they are gone.

use paraft_common::{
    Durability, ModeChoice, ShardId,
    checkpoint::{KnownCheckpoint, MAX_KNOWN_CHECKPOINTS},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// Jobs that do not run any more are listed until there are more than this many of them.
pub const MAX_ENDED_JOBS: usize = 16;
/// The longest path of a checkpoint, in bytes.
pub const MAX_PATH_BYTES: usize = 1024;

/// What a job is; fixed from its beginning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFacts {
    /// Its name, at most [`JobFacts::NAME_CHARS`] characters of it.
    pub name: String,
    /// BSP, SSP(s) or ASP.
    pub mode: ModeChoice,
    /// The workers that it was made for, from 1.
    pub workers: u32,
    /// What an acknowledged push survives.
    pub durability: Durability,
    /// Where the first release kept what the job asked of its log.
    pub log: Retired,
}

/// The place of a number in what is written by position, which nothing reads any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired;

impl Serialize for Retired {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u32(0)
    }
}

impl<'de> Deserialize<'de> for Retired {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        u32::deserialize(d).map(|_| Self)
    }
}

impl JobFacts {
    /// Characters of a job's name that are kept.
    pub const NAME_CHARS: usize = 200;
}

/// Whether a job goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobState {
    /// Some worker has something to do, or will when it comes back.
    Running,
    /// Every worker that was left has finished, on every shard.
    Finished,
    /// A shard has lost its state before the job had finished; a checkpoint is where it can go on from.
    Lost,
}

impl JobState {
    /// The word in status.
    pub fn name(self) -> &'static str {
        match self {
            JobState::Running => "running",
            JobState::Finished => "finished",
            JobState::Lost => "lost",
        }
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The founding of each shard that it runs in; shard 0's names the job.
    pub shards: BTreeMap<ShardId, u64>,
    /// What it is.
    pub facts: JobFacts,
    /// Whether it goes on.
    pub state: JobState,
    /// When the control group first heard of it, in ms of unix time, by the clock of its leader then.
    pub first_seen_ms: u64,
    /// Its checkpoints, the latest last; at most [`MAX_KNOWN_CHECKPOINTS`].
    pub checkpoints: Vec<KnownCheckpoint>,
}

impl Job {
    /// What names it: the founding of shard 0.
    pub fn founding(&self) -> u64 {
        self.shards.get(&ShardId(0)).copied().unwrap_or(0)
    }

    /// The checkpoint that was written last.
    pub fn latest(&self) -> Option<&KnownCheckpoint> {
        self.checkpoints.last()
    }

    /// What must change so that this job's checkpoints in `folder` are these. What `held` does not know (who wrote one,
    /// its loss) stays as it is.
    fn difference(&self, folder: &str, mut held: Vec<KnownCheckpoint>) -> Difference {
        for h in &mut held {
            if let Some(known) = self.checkpoints.iter().find(|k| k.is_same(h)) {
                h.worker = h.worker.or(known.worker);
                h.loss = h.loss.or(known.loss);
            }
        }
        let gone = self.gone(folder, &held).cloned().collect();
        held.retain(|h| !self.checkpoints.contains(h));
        // What would be let go at once is not worth an entry of the log.
        if self.checkpoints.len() >= MAX_KNOWN_CHECKPOINTS {
            let oldest = self.checkpoints.iter().filter(|k| !k.best).map(|k| k.written_ms).min();
            let known = |h: &KnownCheckpoint| self.checkpoints.iter().any(|k| k.path == h.path);
            held.retain(|h| h.best || known(h) || Some(h.written_ms) > oldest);
        }
        Difference { held, gone }
    }

    /// Those in `folder` that are not among `held`.
    fn gone(&self, folder: &str, held: &[KnownCheckpoint]) -> impl Iterator<Item = &String> {
        let there: BTreeSet<&str> = held.iter().map(|h| h.path.as_str()).collect();
        let gone = move |p: &&String| is_in(p, folder) && !there.contains(p.as_str());
        self.checkpoints.iter().map(|k| &k.path).filter(gone)
    }

    /// Another job has told of the folder that this one has written to as well.
    fn heed(&mut self, d: &Difference) {
        self.checkpoints.retain_mut(|c| {
            let told = d.held.iter().find(|h| h.path == c.path);
            c.best = told.map_or(c.best, |h| h.best);
            !d.gone.contains(&c.path) && told.is_none_or(|h| h.is_same(c))
        });
    }

    fn change(&mut self, d: &Difference) {
        self.checkpoints.retain(|c| !d.gone.contains(&c.path));
        for h in &d.held {
            // Also where one list names a path twice: it comes from the network.
            self.checkpoints.retain(|c| c.path != h.path);
            self.checkpoints.push(h.clone());
        }
        self.checkpoints
            .sort_by(|a, b| (a.written_ms, a.step, &a.path).cmp(&(b.written_ms, b.step, &b.path)));
        while self.checkpoints.len() > MAX_KNOWN_CHECKPOINTS {
            let oldest = self.checkpoints.iter().position(|c| !c.best).unwrap_or(0);
            self.checkpoints.remove(oldest);
        }
    }
}

/// Whether `path` is directly in `folder`.
pub fn is_in(path: &str, folder: &str) -> bool {
    Path::new(path).parent() == Some(Path::new(folder))
}

/// A change of a job's checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// There, and as they are now.
    pub held: Vec<KnownCheckpoint>,
    /// Paths of those that are not there any more.
    pub gone: Vec<String>,
}

/// All jobs that are known, the latest last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Jobs(Vec<Job>);

impl Jobs {
    /// All of them, the latest last.
    pub fn iter(&self) -> std::slice::Iter<'_, Job> {
        self.0.iter()
    }

    /// The job of this name: see [`Job::founding`].
    pub fn get(&self, founding: u64) -> Option<&Job> {
        self.0.iter().find(|j| j.founding() == founding)
    }

    pub(super) fn note(
        &mut self,
        shards: &BTreeMap<ShardId, u64>,
        facts: &JobFacts,
        state: JobState,
        seen_ms: u64,
    ) {
        let named = shards.get(&ShardId(0)).copied().unwrap_or(0);
        if let Some(job) = self.0.iter_mut().find(|j| j.founding() == named) {
            (job.shards, job.facts, job.state) = (shards.clone(), facts.clone(), state);
        } else {
            let (shards, facts) = (shards.clone(), facts.clone());
            self.0.push(Job { shards, facts, state, first_seen_ms: seen_ms, checkpoints: Vec::new() });
        }
        self.forget();
    }

    /// What must change so that the checkpoints in `folder` are these, which the job `founding` tells; `None`: nothing.
    /// A job that goes on from a checkpoint writes to the same folder, and what is gone there is gone from every job.
    pub fn difference(&self, founding: u64, folder: &str, held: Vec<KnownCheckpoint>) -> Option<Difference> {
        let others = || self.0.iter().filter(|j| j.founding() != founding);
        let stale = |h: &KnownCheckpoint| {
            let mut listed = others().flat_map(|j| &j.checkpoints).filter(|c| c.path == h.path);
            listed.any(|c| !c.is_same(h) || c.best != h.best)
        };
        let mut d = self.get(founding)?.difference(folder, held.clone());
        let gone = others().flat_map(|j| j.gone(folder, &held));
        let more: BTreeSet<&String> = gone.filter(|p| !d.gone.contains(p)).collect();
        let more: Vec<String> = more.into_iter().cloned().collect();
        d.gone.extend(more);
        let told: Vec<KnownCheckpoint> =
            held.into_iter().filter(|h| stale(h) && d.held.iter().all(|t| t.path != h.path)).collect();
        d.held.extend(told);
        (!d.held.is_empty() || !d.gone.is_empty()).then_some(d)
    }

    /// False where there is no such job.
    pub(super) fn note_checkpoints(&mut self, founding: u64, difference: &Difference) -> bool {
        if self.get(founding).is_none() {
            return false;
        }
        for job in &mut self.0 {
            match job.founding() == founding {
                true => job.change(difference),
                false => job.heed(difference),
            }
        }
        true
    }

    /// The shard begins anew: what ran in an earlier founding of it, and had not finished, is lost.
    pub(super) fn begun_anew(&mut self, shard: ShardId, founding: u64) {
        let lost = |j: &&mut Job| {
            j.state == JobState::Running && j.shards.get(&shard).is_some_and(|before| *before != founding)
        };
        self.0.iter_mut().filter(lost).for_each(|j| j.state = JobState::Lost);
        self.forget();
    }

    fn forget(&mut self) {
        let ended = |j: &Job| j.state != JobState::Running;
        while self.0.iter().filter(|j| ended(j)).count() > MAX_ENDED_JOBS
            && let Some(oldest) = self.0.iter().position(ended)
        {
            self.0.remove(oldest);
        }
    }
}
