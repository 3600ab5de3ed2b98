//! The fleet's jobs, as far as this server knows them.

use super::Agent;
use crate::{
    control::state::{Command, Outcome, Shape, UNKNOWN_JOB},
    replicas::Replica,
};
use paraft_common::{JobId, JobShard, checkpoint::KnownCheckpoint};

impl Agent {
    /// Commits the current checkpoints of a folder, if they are not agreed on already. `job` is the founding
    /// of shard 0 that the job runs in.
    pub async fn note_checkpoints(
        &self,
        job: u64,
        folder: &str,
        held: Vec<KnownCheckpoint>,
    ) -> Result<(), String> {
        let difference = self.agreed.read(|s| {
            s.jobs.begun_as(job).ok_or(UNKNOWN_JOB)?;
            Ok::<_, String>(s.jobs.difference(job, folder, held))
        })?;
        let Some(difference) = difference else { return Ok(()) };
        match self.propose(Command::Checkpoints { job, difference }).await? {
            Outcome::Refused(why) => Err(why.to_string()),
            Outcome::Done | Outcome::Joined(_) | Outcome::Submitted(_) | Outcome::Ended(_) => Ok(()),
        }
    }

    /// The job with exactly this name that has shards, and their number: no other job's weights may be served
    /// for it.
    pub fn job_with_shards(&self, name: &str) -> Option<(JobId, u32)> {
        self.agreed.read(|s| {
            let (id, job) = s.jobs.iter().find(|(_, j)| !j.released && j.name == name)?;
            Some((id, job.shape.shards))
        })
    }

    /// Whether it is agreed on that a job has begun.
    pub fn has_begun(&self, job: JobId) -> bool {
        self.agreed.read(|s| s.jobs.get(job).is_some_and(|j| j.facts.is_some()))
    }

    /// The job of this name, as far as this server knows. An empty name means the job that the fleet was
    /// founded for.
    pub fn job_named(&self, name: &str) -> Option<JobId> {
        if name.is_empty() {
            return Some(JobId(0));
        }
        let (fleet, agreed) = self.agreed.read(|s| (s.fleet, s.jobs.named(name).map(|(id, _)| id)));
        // Before the control group's log is read, or while its storage fails, the local replicas know their
        // jobs.
        let trained = || {
            let of = |(shard, r): &(JobShard, Replica)| {
                r.shard.configured().is_some_and(|c| c.job.name == name).then_some(shard.job())
            };
            self.replicas.all().iter().find_map(of).or_else(|| self.shape_of(JobId(0)).map(|_| JobId(0)))
        };
        if fleet == 0 { trained() } else { agreed }
    }

    /// Names of jobs with shards: a few of them.
    pub fn job_names(&self) -> Vec<String> {
        self.agreed.read(|s| s.jobs.names())
    }

    /// The shape of a job, if known here: as agreed on or, for the job that the fleet is founded for, from
    /// the start options.
    pub fn shape_of(&self, job: JobId) -> Option<Shape> {
        let founding = || self.options.shape.filter(|s| job == JobId(0) && s.shards > 0);
        self.agreed.read(|s| match s.fleet {
            0 => founding(),
            _ => s.shape_of(job),
        })
    }

    /// A server of a shard, from the agreed state: where to send a worker that asked here.
    pub fn host_of(&self, shard: JobShard) -> Option<String> {
        self.hosts_of(shard).into_iter().next()
    }

    /// The addresses of a shard's servers, except this one.
    pub fn hosts_of(&self, shard: JobShard) -> Vec<String> {
        self.agreed.read(|s| {
            let voters = s.shards.get(&shard).into_iter().flat_map(|place| &place.voters);
            let others = voters.filter(|n| n.server() != self.options.server);
            others.filter_map(|n| s.servers.get(&n.server())).map(|m| m.address.clone()).collect()
        })
    }
}
