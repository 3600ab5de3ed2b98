//! Weights for a job that starts from another's (`start.from = "job:NAME"`). Each shard's leader reads them
//! from a local replica or another server, and takes them as it takes those that a worker sends.
//!
//! The leader keeps no state of its own for this: copied weights are in the shard's log. If a leader dies
//! meanwhile, its successor copies the rest, since the worker opens its stream there.

use super::{
    exchange::{INIT_PAUSE, MAX_INITS},
    reads,
    shards::ShardsService,
};
use crate::{
    connections::Visitor,
    raft::channel,
    replicas::Replica,
    shard::{
        InitPart,
        leader::{ConnId, Event, Message, Reply},
    },
};
use paraft_common::{
    BucketId, JobId, JobShard, Payload, ShardId,
    codec::F32_BYTES,
    config::{ServerJob, Start},
    placement,
};
use paraft_proto::{Candidates, PROTOCOL, ReadRequest, RefusalKind, from_shard, services};
use paraft_tls::{Need, access::DENIED};
use std::{collections::BTreeMap, time::Duration};
use tokio::{sync::mpsc, time::timeout};
use tonic::Status;

/// Pause between two rounds, while copied weights are applied, or because a server did not answer.
const PAUSE: Duration = Duration::from_secs(1);
/// Timeout for a server's next weights, before another server is asked.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// This server's name among its readers.
const OWN_READER: &str = "this server";

/// The job that the weights come from.
pub(super) struct Source(String);

/// Why copying fails.
enum Trouble {
    /// Temporary. `leader`: the address of a server that is said to have them, or empty.
    Passing { why: String, leader: String },
    /// Permanent.
    Lasting(String),
    /// The worker's stream has ended.
    Over,
}

impl Trouble {
    fn passing(why: &str) -> Self {
        Self::Passing { why: why.into(), leader: String::new() }
    }
}

impl ShardsService {
    /// The job whose weights the shard still needs to begin, if the caller may read them and they fit.
    pub(super) async fn source(
        &self,
        by: &Visitor,
        job: &ServerJob,
        hosted: &Replica,
    ) -> Result<Option<Source>, RefusalKind> {
        let begun = hosted.shard.configured().is_some_and(|c| c.is_initialised());
        let name = job.start.as_ref().and_then(Start::job).filter(|_| !begun);
        let Some(name) = name else { return Ok(None) };
        if name == job.name {
            return Err(RefusalKind::BadJob(format!("job `{name}` can't begin with its own weights")));
        }
        by.may(Need::Reader, name).await.map_err(|_| RefusalKind::Denied(DENIED.into()))?;
        // A follower may be behind, and may lead by the time the stream is open.
        if hosted.group.leadership().borrow().leads {
            let (id, _) = self.found(name).map_err(RefusalKind::BadJob)?;
            let replicas = self.replicas.all();
            let mut there = replicas.iter().filter(|(shard, _)| shard.job() == id);
            if let Some(conf) = there.find_map(|(_, r)| r.shard.configured()) {
                fits(name, &conf.job, job)?;
            }
        }
        Ok(Some(Source(name.into())))
    }

    /// The other job's id and number of shards. A server that knows the starting job knows every job that was
    /// submitted before it.
    fn found(&self, name: &str) -> Result<(JobId, u32), String> {
        self.agent.job_with_shards(name).ok_or_else(|| {
            format!("job `{name}`, with whose weights it is to begin, is not there, or its weights are gone")
        })
    }

    /// Copies until the shard has all of its weights, or its worker's stream has ended.
    pub(super) async fn inherit(
        self,
        source: Source,
        hosted: Replica,
        conn: ConnId,
        alive: mpsc::WeakSender<Reply>,
    ) {
        let Source(from) = &source;
        while alive.strong_count() > 0 {
            let (id, shards) = match self.found(from) {
                Ok(found) => found,
                Err(why) => return refuse(&alive, why).await,
            };
            let mut missing = BTreeMap::<ShardId, Vec<u32>>::new();
            if let Some(conf) = hosted.shard.configured() {
                let layout = conf.job.layout(); // both jobs have the same layout
                for bucket in conf.buckets.iter().filter(|b| !b.initialised()) {
                    missing
                        .entry(placement::shard_of(&layout, bucket.id, shards))
                        .or_default()
                        .push(bucket.id.0);
                }
                if missing.is_empty() {
                    let shard = hosted.shard.id().0;
                    return tracing::info!(shard, from, "starts from the weights of another job");
                }
            }
            for (shard, buckets) in missing {
                match self.copy((from, id), shard, buckets, (&hosted, conn, &alive)).await {
                    Ok(()) => {}
                    Err(Trouble::Over) => return,
                    Err(Trouble::Passing { .. }) if !self.agent.has_begun(id) => {
                        let why = format!(
                            "job `{from}`, with whose weights it is to begin, has not begun itself: it has none"
                        );
                        return refuse(&alive, why).await;
                    }
                    Err(Trouble::Passing { why, .. }) => {
                        tracing::warn!(from, shard = shard.0, why, "weights are not copied yet");
                    }
                    Err(Trouble::Lasting(why)) => return refuse(&alive, why).await,
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Copies these buckets of a shard of the other job.
    async fn copy(
        &self,
        (from, id): (&str, JobId),
        shard: ShardId,
        only: Vec<u32>,
        to: (&Replica, ConnId, &mpsc::WeakSender<Reply>),
    ) -> Result<(), Trouble> {
        let lasting = || Trouble::Lasting(format!("job `{from}` has no {shard}"));
        let name = JobShard::new(id, shard).ok_or_else(lasting)?;
        let passing = Trouble::passing;
        let request =
            ReadRequest { protocol: PROTOCOL, shard: shard.0, only, job: from.into(), ..Default::default() };
        if let Some(here) = self.replicas.get(name) {
            let (tx, mut rx) = mpsc::channel(reads::MAX_WAITING_COPIES);
            let reader = self.readers.reader(OWN_READER).map_err(|full| passing(&full.to_string()))?;
            let pours = tokio::spawn(async move { reads::send_weights(&here, request, &reader, &tx).await });
            while let Some(message) = rx.recv().await {
                if let Some(from_shard::Kind::Weights(w)) = message.kind {
                    give(to, BucketId(w.bucket), w.payload.into(), from).await?;
                }
            }
            return match pours.await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(refused)) => Err(passing(&refused.kind.to_string())),
                Err(e) => Err(passing(&e.to_string())),
            };
        }
        let hosts = self.agent.hosts_of(name);
        if hosts.is_empty() && self.agent.job_with_shards(from).is_none_or(|(known, _)| known != id) {
            return Err(lasting());
        }
        let mut candidates = Candidates::of(hosts);
        // One of them may be down. Weights that arrive twice are taken once.
        while let Some(address) = candidates.next() {
            match self.copy_from(&address, &request, from, to).await {
                Err(Trouble::Passing { why, leader }) => candidates.failed(&address, why, &leader),
                ended => return ended,
            }
        }
        let last = candidates.causes().last();
        Err(last.map_or_else(
            || passing("no server has this shard now"),
            |(at, why)| passing(&format!("{at}: {why}")),
        ))
    }

    /// Copies from another server.
    async fn copy_from(
        &self,
        address: &str,
        request: &ReadRequest,
        from: &str,
        to: (&Replica, ConnId, &mpsc::WeakSender<Reply>),
    ) -> Result<(), Trouble> {
        let silent = |_| Trouble::passing(&format!("silent for {} s", READ_TIMEOUT.as_secs()));
        let status = |s: Status| Trouble::passing(s.message());
        let channel = channel(address, &self.access).map_err(|e| Trouble::passing(&e))?;
        let read = timeout(READ_TIMEOUT, services::read(&channel, request.clone())).await.map_err(silent)?;
        let mut read = read.map_err(status)?;
        loop {
            let next = timeout(READ_TIMEOUT, read.message()).await.map_err(silent)?.map_err(status)?;
            let Some(mut m) = next else { return Ok(()) };
            match m.message.kind {
                Some(from_shard::Kind::Weights(w)) => {
                    let payload = m.bulk.pop().unwrap_or_default();
                    give(to, BucketId(w.bucket), payload, from).await?;
                }
                Some(from_shard::Kind::Refused(r)) => {
                    return Err(Trouble::Passing { why: r.message, leader: r.leader });
                }
                _ => {}
            }
        }
    }
}

async fn refuse(alive: &mpsc::WeakSender<Reply>, why: String) {
    if let Some(tx) = alive.upgrade() {
        let _ = tx.send(Reply::Refused(RefusalKind::BadJob(why).into())).await;
    }
}

/// Whether the weights of one job fit another.
fn fits(name: &str, there: &ServerJob, here: &ServerJob) -> Result<(), RefusalKind> {
    if there.all_reduce {
        let why = format!("the weights of job `{name}` are with its ranks and not on the servers");
        return Err(RefusalKind::BadJob(why));
    }
    if there.layout() == here.layout() {
        return Ok(());
    }
    let model = |j: &ServerJob| {
        let stages = match j.stages.len() {
            0 => String::new(),
            _ => format!(", and stages of {:?}", j.stages),
        };
        let rows = j.constraints.iter().filter(|c| c.rule.row() > 1).count();
        let norms =
            if rows == 0 { String::new() } else { format!(", and norms of the rows of {rows} parameters") };
        format!(
            "{} parameters and {} statistics in buckets of {}{stages}{norms}",
            j.params_len, j.buffers_len, j.bucket_len
        )
    };
    Err(RefusalKind::BadJob(format!(
        "it is to begin with the weights of job `{name}`, which has {}; this one has {}",
        model(there),
        model(here)
    )))
}

/// Passes a bucket's weights to the shard's leader, as the worker of this stream would.
async fn give(
    (hosted, conn, alive): (&Replica, ConnId, &mpsc::WeakSender<Reply>),
    bucket: BucketId,
    payload: Payload,
    from: &str,
) -> Result<(), Trouble> {
    let conf = hosted.shard.configured().ok_or(Trouble::Over)?;
    let len = conf.buckets.iter().find(|b| b.id == bucket).map_or(0, |b| b.spec.len * F32_BYTES);
    if payload.len() != len {
        let got = payload.len();
        return Err(Trouble::Lasting(format!(
            "{bucket} has {len} bytes of weights, and in job `{from}` {got}"
        )));
    }
    // As with weights from a worker: they are not acknowledged.
    while hosted.group.unapplied() > MAX_INITS {
        if alive.strong_count() == 0 {
            return Err(Trouble::Over);
        }
        tokio::time::sleep(INIT_PAUSE).await;
    }
    let room = hosted.queued.room(payload.len()).await;
    let init = Message::Init { bucket, part: InitPart::FRESH, payload };
    hosted.leader.send(Event::Bulk(conn, init, room)).await.map_err(|_| Trouble::Over)
}
