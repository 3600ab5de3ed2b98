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
    BucketId, JobId, JobShard, ShardId,
    codec::F32_BYTES,
    config::{ServerJob, Start},
    placement,
};
use paraft_proto::{
    FromShard, Incoming, PROTOCOL, ReadRequest, RefusalKind, WithBulk, from_shard::Kind, services,
};
use paraft_session::fetch::{Fetch, VectorId};
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
    /// Temporary.
    Passing(String),
    /// Permanent.
    Lasting(String),
    /// The worker's stream has ended.
    Over,
}

impl Trouble {
    fn passing(why: &str) -> Self {
        Self::Passing(why.into())
    }
}

/// Where the weights go: the shard, through the leader's stream of the worker that waits for them.
type Target<'a> = (&'a Replica, ConnId, &'a mpsc::WeakSender<Reply>);

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
            let mut missing = BTreeMap::<ShardId, Vec<(VectorId, usize)>>::new();
            if let Some(conf) = hosted.shard.configured() {
                let layout = conf.job.layout(); // both jobs have the same layout
                for bucket in conf.buckets.iter().filter(|b| !b.initialised()) {
                    missing
                        .entry(placement::shard_of(&layout, bucket.id, shards))
                        .or_default()
                        .push(((bucket.id, 0), bucket.spec.len * F32_BYTES));
                }
                if missing.is_empty() {
                    let shard = hosted.shard.id().0;
                    return tracing::info!(shard, from, "starts from the weights of another job");
                }
            }
            for (shard, wanted) in missing {
                match self.copy((from, id), shard, wanted, (&hosted, conn, &alive)).await {
                    Ok(()) => {}
                    Err(Trouble::Over) => return,
                    Err(Trouble::Passing(_)) if !self.agent.has_begun(id) => {
                        let why = format!(
                            "job `{from}`, with whose weights it is to begin, has not begun itself: it has none"
                        );
                        return refuse(&alive, why).await;
                    }
                    Err(Trouble::Passing(why)) => {
                        tracing::warn!(from, shard = shard.0, why, "weights are not copied yet");
                    }
                    Err(Trouble::Lasting(why)) => return refuse(&alive, why).await,
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Copies these vectors of a shard of the other job.
    async fn copy(
        &self,
        (from, id): (&str, JobId),
        shard: ShardId,
        wanted: Vec<(VectorId, usize)>,
        to: Target<'_>,
    ) -> Result<(), Trouble> {
        let lasting = || Trouble::Lasting(format!("job `{from}` has no {shard}"));
        let name = JobShard::new(id, shard).ok_or_else(lasting)?;
        let here = self.replicas.get(name);
        let hosts = match here {
            Some(_) => vec![OWN_READER.into()],
            None => self.agent.hosts_of(name),
        };
        let known = || self.agent.job_with_shards(from).is_some_and(|(known, _)| known == id);
        if hosts.is_empty() && !known() {
            return Err(lasting());
        }
        let mut fetch = Fetch::new(hosts, wanted);
        // One of them may be down.
        while let Some(address) = fetch.next_server() {
            match self.copy_from(here.clone(), &address, (from, shard), &mut fetch, to).await {
                Ok(()) => {}
                Err(Trouble::Passing(why)) => fetch.failed(why),
                ended => return ended,
            }
        }
        match fetch.causes().last() {
            _ if fetch.is_complete() => Ok(()),
            Some((at, why)) => Err(Trouble::Passing(format!("{at}: {why}"))),
            None => Err(Trouble::passing("no server has this shard now")),
        }
    }

    /// Copies from a replica of this server or from the server at `address`, until it has sent everything or refuses.
    async fn copy_from(
        &self,
        here: Option<Replica>,
        address: &str,
        (from, shard): (&str, ShardId),
        fetch: &mut Fetch,
        to: Target<'_>,
    ) -> Result<(), Trouble> {
        let silent = |_| Trouble::Passing(format!("silent for {} s", READ_TIMEOUT.as_secs()));
        let broken = |s: Status| Trouble::passing(s.message());
        let (job, only) = (from.into(), fetch.buckets());
        let request = ReadRequest { protocol: PROTOCOL, shard: shard.0, only, job, ..Default::default() };
        let read = timeout(READ_TIMEOUT, self.read_from(here, address, request));
        let mut read = read.await.map_err(silent)??;
        // To its end, also when nothing is missing any more: a stream that is dropped earlier is reset.
        while let Some(message) =
            timeout(READ_TIMEOUT, read.message()).await.map_err(silent)?.map_err(broken)?
        {
            if !give(to, from, fetch, message).await? {
                return Ok(());
            }
        }
        match fetch.is_complete() {
            true => Ok(()),
            false => Err(Trouble::passing("its answer ended early")),
        }
    }

    async fn read_from(
        &self,
        here: Option<Replica>,
        address: &str,
        request: ReadRequest,
    ) -> Result<Incoming<FromShard>, Trouble> {
        let Some(here) = here else {
            let channel = channel(address, &self.access).map_err(|e| Trouble::passing(&e))?;
            return services::read(&channel, request).await.map_err(|s| Trouble::passing(s.message()));
        };
        let reader = self.readers.reader(OWN_READER).map_err(|full| Trouble::passing(&full.to_string()))?;
        Ok(Incoming::of(reads::replies(|out| async move {
            reads::send_weights(&here, request, &reader, &out).await
        })))
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
        let results = if j.takes_means() { format!(", {} results", j.results_len) } else { String::new() };
        format!(
            "{} parameters and {} statistics{results} in buckets of {}{stages}{norms}",
            j.params_len, j.buffers_len, j.bucket_len
        )
    };
    Err(RefusalKind::BadJob(format!(
        "it is to begin with the weights of job `{name}`, which has {}; this one has {}",
        model(there),
        model(here)
    )))
}

/// Passes the weights in a message to the shard's leader, as the worker of this stream would. `false`: the server
/// refuses.
async fn give(
    (hosted, conn, alive): Target<'_>,
    from: &str,
    fetch: &mut Fetch,
    mut message: WithBulk<FromShard>,
) -> Result<bool, Trouble> {
    let bucket = match message.message.kind.take() {
        Some(Kind::Weights(w)) => BucketId(w.bucket),
        Some(Kind::Refused(refused)) => {
            fetch.refused(refused);
            return Ok(false);
        }
        _ => return Err(Trouble::passing("a message out of place")),
    };
    let payload = message.payload();
    let fits = fetch.arrived((bucket, 0), &payload);
    fits.map_err(|why| Trouble::Lasting(format!("the weights of job `{from}`: {why}")))?;
    // As with weights from a worker: they are not acknowledged.
    while hosted.group.unapplied() > MAX_INITS {
        if alive.strong_count() == 0 {
            return Err(Trouble::Over);
        }
        tokio::time::sleep(INIT_PAUSE).await;
    }
    let room = hosted.queued.room(payload.len()).await;
    let init = Message::Init { bucket, part: InitPart::FRESH, payload };
    hosted.leader.send(Event::Bulk(conn, init, room)).await.map_err(|_| Trouble::Over)?;
    Ok(true)
}
