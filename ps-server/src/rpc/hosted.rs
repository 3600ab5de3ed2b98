//! The local replica that a request is about, if its caller may use it; or the reason why there is none.

use super::shards::ShardsService;
use crate::{connections::Visitor, replicas::Replica};
use paraft_common::{JobId, JobShard, ShardId};
use paraft_proto::RefusalKind;
use paraft_tls::{Need, access::DENIED};

impl ShardsService {
    /// The local replica of a job's shard, if the caller may do this with the job.
    pub(super) async fn may(
        &self,
        by: &Visitor,
        need: Need,
        job: &str,
        shard: u32,
    ) -> Result<Replica, RefusalKind> {
        let denied = |_| RefusalKind::Denied(DENIED.into());
        // Check the requested name before the reply reveals whether the job exists. Then check the name of
        // the job found, which may differ if the request named none.
        if !job.is_empty() {
            by.may(need, job).await.map_err(denied)?;
        }
        let hosted = self.hosted(job, shard);
        let found = match &hosted {
            Ok(replica) => replica.shard.configured().as_ref().map(|c| c.job.name.clone()),
            Err(_) if job.is_empty() => {
                self.agent.agreed.read(|s| s.jobs.get(JobId(0)).map(|j| j.name.clone()))
            }
            Err(_) => None,
        };
        if let Some(found) = found.filter(|found| found != job) {
            by.may(need, &found).await.map_err(denied)?;
        }
        hosted.map_err(|why| match why {
            // Callers do not learn the names of jobs that they may not see.
            RefusalKind::NoJob { asked, there } => {
                RefusalKind::NoJob { asked, there: there.into_iter().filter(|name| by.sees(name)).collect() }
            }
            why => why,
        })
    }

    /// The local replica of a job's shard; `job` is the job's name.
    pub(super) fn hosted(&self, job: &str, shard: u32) -> Result<Replica, RefusalKind> {
        let shard = ShardId(shard);
        let Some(id) = self.agent.job_named(job) else { return Err(self.no_such_job(job, shard)) };
        let name = JobShard::new(id, shard).ok_or(RefusalKind::WrongShard { shard })?;
        if let Some(replica) = self.replicas.get(name) {
            return Ok(replica);
        }
        // The server that hosts it, if agreed on, and why the local replica does not run, if there is one.
        let (leader, stopped) = (self.agent.host_of(name), self.replicas.why_stopped(name));
        Err(match self.agent.shape_of(id) {
            _ if leader.is_some() || stopped.is_some() => RefusalKind::NotLeader { shard, leader, stopped },
            Some(shape) if shard.0 < shape.shards => {
                RefusalKind::Unavailable(format!("{name} has no replicas yet"))
            }
            // This server may know an earlier job of this name, if it was away since.
            Some(_) => self.surely(shard, || RefusalKind::WrongShard { shard }),
            None => self.no_such_job(job, shard),
        })
    }

    fn no_such_job(&self, asked: &str, shard: ShardId) -> RefusalKind {
        self.surely(shard, || RefusalKind::NoJob { asked: asked.into(), there: self.agent.job_names() })
    }

    /// Refuses, if this server leads the control group, which knows all jobs. Another server may not know yet
    /// of a job that was just submitted.
    fn surely(&self, shard: ShardId, refusal: impl FnOnce() -> RefusalKind) -> RefusalKind {
        let (leads, known) = (self.agent.leads(), self.agent.fleet() != 0);
        let leader = self.agent.group().leader_address().filter(|_| !leads);
        match leader {
            Some(leader) => RefusalKind::NotLeader { shard, leader: Some(leader), stopped: None },
            None if leads && known => refusal(),
            None => RefusalKind::Unavailable("this server does not know its fleet's jobs at present".into()),
        }
    }
}
