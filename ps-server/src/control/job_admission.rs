//! Asks the servers whether a job may begin; [`crate::admission`] decides.

use super::agent::Agent;
use crate::admission::{Answer, judge};
use paraft_common::{JobShard, ServerId, config::ServerJob, need::Need};
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

/// How long an answer is valid: the workers of a job come together, each to every shard.
const ANSWER_TTL: Duration = Duration::from_millis(500);

/// The last answer: its time, its job, and the result.
pub(super) type LastAdmission = tokio::sync::Mutex<Option<(Instant, String, Result<(), String>)>>;

impl Agent {
    /// Whether all servers that answer have room for the job; the error has the numbers. `text` is the job in
    /// its form for the log.
    pub async fn admit(&self, job: &ServerJob, text: &str) -> Result<(), String> {
        let mut last = self.admitted.lock().await;
        if let Some((at, known, answer)) = &*last
            && at.elapsed() < ANSWER_TTL
            && known == text
        {
            return answer.clone();
        }
        let own = self.server();
        let others: Vec<(ServerId, String)> = self.agreed.read(|s| {
            let others = s.servers.iter().filter(|(id, _)| **id != own);
            others.map(|(id, m)| (*id, m.address.clone())).collect()
        });
        let asked = others.into_iter().map(|(id, address)| self.ask_for_room(id, address, text));
        let answers = futures::future::join_all(asked).await.into_iter().flatten();
        let answers: Vec<Answer> = std::iter::once(self.room_for(job)).chain(answers).collect();
        let verdict = judge(&answers);
        if let Err(why) = &verdict {
            tracing::warn!(job = job.name, "not admitted: {why}");
        }
        *last = Some((Instant::now(), text.to_string(), verdict.clone()));
        verdict
    }

    /// `None`: it does not answer, or is of a release without this request.
    async fn ask_for_room(&self, id: ServerId, address: String, text: &str) -> Option<Answer> {
        let asked = self.calls.room(&address, id, text).await;
        asked
            .inspect_err(
                |why| tracing::info!(server = %id, why, "a server did not say whether it has room for the job"),
            )
            .ok()
    }

    /// This server's answer about a job.
    pub fn room_for(&self, job: &ServerJob) -> Answer {
        let id = self.job_named(&job.name).unwrap_or_default();
        let hosted = self.replicas().all().into_iter().find(|(shard, _)| shard.job() == id);
        let known = hosted.map(|(_, r)| r.shard.shards()).or_else(|| self.shape_of(id).map(|s| s.shards));
        let shards = known.unwrap_or(1);
        let agreed: Vec<JobShard> = self.agreed.read(|s| {
            let here = |(shard, p): (&JobShard, &super::state::Place)| {
                p.voters.iter().any(|n| n.server() == self.server()).then_some(*shard)
            };
            s.shards.iter().filter(|(shard, _)| shard.job() == id).filter_map(here).collect()
        });
        let held = self.replicas().all().into_iter().map(|(shard, _)| shard).filter(|s| s.job() == id);
        let here: BTreeSet<JobShard> = held.chain(agreed).collect();
        let (mut all, mut wanted) = (Need::default(), 0u64);
        for shard in here {
            let need = Need::of(job, shard.shard(), shards);
            let held = self.replicas().get(shard).map_or(0, |r| r.held());
            all = all + need;
            wanted = wanted.saturating_add(need.total().saturating_sub(held));
        }
        let room = self.replicas().room();
        let promised = room.promised_to(|shard| shard.job() != id);
        let (server, memory, quota) = (self.server(), room.memory(), self.job_memory());
        Answer { server, need: all, wanted, promised, memory, quota }
    }
}
