//! A worker's stream to a shard: checks each message and passes it to the shard's leader, in order.

use super::{
    check_protocol, convert,
    shards::{ShardsService, unknown_caller},
};
use crate::{
    connections::{Rank, Visitor},
    replicas::Replica,
    shard::{
        leader::{Event, Liveness, MAX_AHEAD, Message, Reply},
        state::Shard,
        worker_state::FLEET,
    },
};
use futures::{Stream, StreamExt};
use paraft_common::{
    Durability, JobId, JobShard, Mode, SessionId, ShardId, WorkerId,
    config::{ServerJob, ServerJobError},
};
use paraft_lanes::shared::Shared;
use paraft_proto::{FromShard, Incoming, Open, Refusal, RefusalKind, ToShard, WithBulk, limits, to_shard};
use paraft_tls::Need;
use paraft_trace::{Moment, Span, Stage, Stages};
use std::{
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

/// Bound on the replies that wait for a slow reader, besides those for each bucket.
const REPLY_QUEUE: usize = 64;

/// Bound on unapplied entries while an initial state comes in. With the largest buckets, they hold as many
/// bytes as a worker may push without an ack.
pub(super) const MAX_INITS: u64 = (limits::PUSH_WINDOW_BYTES / limits::MAX_BUCKET_BYTES) as u64;
/// Pause between two checks of that bound.
pub(super) const INIT_PAUSE: Duration = Duration::from_millis(1);

/// The refusal of a message that cannot be read; `None`: the connection is broken or its peer is silent, which is no
/// mistake. The stream ends then, and the worker opens another.
fn unreadable(status: &Status) -> Option<RefusalKind> {
    (status.code() == Code::InvalidArgument).then(|| RefusalKind::Unreadable(status.message().to_string()))
}

/// What a stream answers: a refusal before it is open, or the leader's replies.
enum Source {
    One(Box<FromShard>),
    Many(mpsc::Receiver<Reply>, Reader),
}

/// The reader of a stream.
#[derive(Clone)]
struct Reader {
    pub shard: ShardId,
    pub worker: WorkerId,
    pub stages: Arc<Stages>,
    /// The shard's state.
    pub state: Arc<Shard>,
    /// Notified when the stream is open.
    pub opened: Arc<Notify>,
}

impl Reader {
    /// From now on, a worker on this host reads its pulled weights in place.
    fn shares(&self, with: &Shared) {
        if let Some(memory) = self.state.configured().as_ref().and_then(|conf| conf.share()) {
            with.offer(memory);
        }
    }

    /// Notes that a reply is about to be sent.
    pub fn takes(&self, reply: &Reply) {
        if let Reply::Opened { .. } = reply {
            self.opened.notify_one();
        }
        let Reply::Weights(w) = reply else { return };
        self.stages.note(Span {
            stage: Stage::Publish,
            begin: w.since,
            end: Moment::now(),
            step: w.done,
            shard: self.shard,
            bucket: Some(w.bucket),
            worker: Some(self.worker),
            bytes: w.payload.len() as u64,
            pass: None,
        });
    }
}

/// An open stream.
struct OpenStream {
    conn: u64,
    worker: WorkerId,
    hosted: Replica,
    liveness: Arc<Liveness>,
    /// To its worker. Only the leader keeps it open.
    replies: mpsc::WeakSender<Reply>,
    visitor: Option<Visitor>,
}

/// The messages that go out on a stream.
pub(super) type Replies = Pin<Box<dyn Stream<Item = Result<WithBulk<FromShard>, Status>> + Send>>;

impl ShardsService {
    /// `shared`: the memory in which the worker reads weights in place, once the shard has a job.
    pub(super) fn exchange(
        &self,
        mut inbound: Incoming<ToShard>,
        visitor: Option<Visitor>,
        shared: Option<Arc<Shared>>,
    ) -> Replies {
        let conn = self.streams.fetch_add(1, Relaxed) + 1;
        let service = self.clone();
        // No await before the response goes out: the worker sends Open only once it has the stream.
        let (tx, rx) = mpsc::channel(1);
        tokio::spawn(async move {
            if let Err(refusal) = service.serve(conn, &mut inbound, visitor, &tx).await {
                let _ = tx.send(Source::One(Box::new(refusal.into()))).await;
            }
        });
        let server = self.server;
        // One source, then the end. When a leader releases a stream, the stream must end for its worker, too;
        // otherwise the worker would wait for ever.
        let replies = ReceiverStream::new(rx).take(1).flat_map(move |source| -> Replies {
            match source {
                Source::One(m) => Box::pin(futures::stream::iter([Ok((*m).into())])),
                Source::Many(rx, reader) => Box::pin(ReceiverStream::new(rx).map({
                    let shared = shared.clone();
                    move |r| {
                        let r = r.taken();
                        reader.takes(&r);
                        if let (Reply::Weights(_), Some(shared)) = (&r, &shared) {
                            reader.shares(shared);
                        }
                        Ok(convert::reply(server, r).into())
                    }
                })),
            }
        });
        Box::pin(replies)
    }

    /// Whether another shard of the job is in this mode by this switch, as far as this server hosts one. Workers tell
    /// shards of switches that these have missed, after each pull; no switch begins with a worker's word.
    fn has_switched(&self, shard: JobShard, number: u64, mode: Mode) -> bool {
        let others = self.replicas.all().into_iter();
        let mut others = others.filter(|(other, _)| other.job() == shard.job() && *other != shard);
        others.any(|(_, r)| r.shard.read(|m| m.in_force.number == number && m.in_force.mode == mode))
    }

    /// Checks a stream's first message. Returns the shard's replica, the job, and its form for the log.
    async fn admitted(
        &self,
        open: &Open,
        visitor: Option<&Visitor>,
    ) -> Result<(Replica, ServerJob, String), RefusalKind> {
        check_protocol(open.protocol)?;
        if open.job.len() > limits::MAX_JOB_BYTES {
            return Err(RefusalKind::BadJob(format!("a job of {} bytes is too long", open.job.len())));
        }
        let bad = |e: ServerJobError| RefusalKind::BadJob(e.to_string());
        let job = ServerJob::decode(&open.job).map_err(bad)?;
        let by = visitor.ok_or_else(unknown_caller)?;
        let hosted = self.may(by, Need::Worker, &job.name, open.shard).await?;
        let name = hosted.shard.name();
        if open.founding != 0 && open.founding != hosted.founding {
            // The servers acknowledged pushes to this client that are gone: continuing would hide that.
            return Err(RefusalKind::StateLost(hosted.shard.id()));
        }
        if WorkerId(open.worker) == FLEET {
            return Err(RefusalKind::BadJob(format!("no worker has the number {}", open.worker)));
        }
        let running = hosted.shard.view(|conf, m| conf.map(|c| (c.job.is_same(&job), m.job.clone())));
        let text = match &running {
            // A running job continues, even if a later version of the servers would refuse to start it.
            Some((true, running)) => running.clone(),
            _ => {
                job.validate().map_err(bad)?;
                job.to_toml().map_err(bad)?
            }
        };
        let (stages, shards) = (job.stages.len(), hosted.shard.shards());
        if stages > shards as usize {
            return Err(RefusalKind::BadJob(format!(
                "the job has {stages} stages, each with shards of its own, and there are {shards}"
            )));
        }
        // The durability level decides where the replicas' logs are, and the logs exist before the job.
        if job.durability.on_disk() != hosted.folder.is_some() {
            let kept =
                if hosted.folder.is_some() { Durability::QuorumDisk } else { Durability::QuorumMemory };
            let (wants, has) =
                (job.durability, self.agent.shape_of(name.job()).map_or(kept, |shape| shape.durability));
            return Err(RefusalKind::BadJob(match name.job() {
                JobId(0) => format!(
                    "the job wants durability {wants}, the fleet was founded with {has}; start the servers with the job's \
                     --durability, or change cluster.durability"
                ),
                _ => format!(
                    "the job wants durability {wants}, and was submitted with {has}: use the job file that was submitted"
                ),
            }));
        }
        if running.is_none() && hosted.group.leadership().borrow().leads {
            self.agent.admit(&job, &text).await.map_err(RefusalKind::NoRoom)?;
        }
        Ok((hosted, job, text))
    }

    async fn serve(
        &self,
        conn: u64,
        inbound: &mut Incoming<ToShard>,
        visitor: Option<Visitor>,
        out: &mpsc::Sender<Source>,
    ) -> Result<(), Refusal> {
        let first = match self.opened(inbound.message()).await.map_err(RefusalKind::from)? {
            Ok(first) => first,
            Err(status) => return unreadable(&status).map_or(Ok(()), |refusal| Err(refusal.into())),
        };
        let Some(to_shard::Kind::Open(open)) = first.and_then(|m| m.message.kind) else {
            return Err(RefusalKind::NotOpened.into());
        };
        let (hosted, job, text) = self.admitted(&open, visitor.as_ref()).await?;
        let by = visitor.as_ref().ok_or_else(unknown_caller)?;
        // Each worker is told why the job cannot start; only worker 0 asks for the initial weights, as only
        // one worker sends those of the seed.
        let source = self.source(by, &job, &hosted).await?.filter(|_| open.worker == 0);
        by.is(Rank::Worker);
        // A worker may await weights for each bucket, and an ack for each step that it may be ahead of
        // replication, for the step that it is in, and for one push that was sent again.
        let buckets = job.buckets() + 2;
        let (tx, rx) = mpsc::channel(REPLY_QUEUE + (MAX_AHEAD as usize + 3) * buckets);
        let (shard, worker) = (hosted.shard.id(), WorkerId(open.worker));
        let (stages, state) = (self.replicas.stages().clone(), hosted.shard.clone());
        let opened = Arc::new(Notify::new());
        let reader = Reader { shard, worker, stages, state, opened: opened.clone() };
        let _ = out.send(Source::Many(rx, reader)).await;
        let replies = tx.downgrade();
        let liveness = Arc::new(Liveness::default());
        let event = Event::Open {
            conn,
            tx,
            worker,
            session: (open.session > 0).then_some(SessionId(open.session)),
            job: text,
            liveness: liveness.clone(),
        };
        if hosted.leader.send(event).await.is_err() {
            return Ok(()); // shutting down
        }
        // These tasks end with this stream.
        let mut copies = JoinSet::new();
        if let Some(source) = source {
            let (service, hosted, alive) = (self.clone(), hosted.clone(), replies.clone());
            copies.spawn(async move {
                opened.notified().await;
                service.inherit(source, hosted, conn, alive).await;
            });
        }
        let stream = OpenStream { conn, worker, hosted, liveness, replies, visitor };
        self.relay(&stream, inbound).await;
        let _ = stream.hosted.leader.send(Event::Closed(conn)).await;
        Ok(())
    }

    /// Checks a stream's messages and passes them to the shard's leader, until the stream ends.
    async fn relay(&self, stream: &OpenStream, inbound: &mut Incoming<ToShard>) {
        let OpenStream { conn, worker, hosted, liveness, replies, visitor } = stream;
        let (name, shard) = (hosted.shard.name(), hosted.shard.id());
        loop {
            let m = match inbound.message().await {
                Ok(Some(m)) => m,
                Ok(None) => return,
                Err(status) => {
                    if let (Some(refusal), Some(tx)) = (unreadable(&status), replies.upgrade()) {
                        let _ = tx.try_send(Reply::Refused(refusal.into()));
                    }
                    return;
                }
            };
            liveness.heard();
            visitor.iter().for_each(Visitor::speaks);
            if let Some(to_shard::Kind::Heartbeat(h)) = &m.message.kind
                && !h.host.is_empty()
                && shard == ShardId(0)
            {
                hosted.counters.take_about(&hosted.shard, *worker, convert::about(h));
            }
            let m = match convert::message(&hosted.shard, m) {
                Ok(Some(m)) => m,
                Ok(None) => continue,
                Err(refusal) => {
                    self.status.count_refusal(name);
                    let Some(tx) = replies.upgrade() else { return };
                    let _ = tx.send(Reply::Refused(refusal)).await;
                    continue;
                }
            };
            if let Message::SwitchMode { number, mode } = m
                && !self.has_switched(name, number, mode)
            {
                tracing::debug!(shard = shard.0, worker = worker.0, number, %mode, "no shard here has switched so");
                continue;
            }
            let finish = matches!(m, Message::Finish);
            liveness.waits(true);
            if matches!(m, Message::Init { .. }) {
                // Initial state is not acknowledged, so no window holds the worker back. A large model would
                // pile up here at the network's speed, while the disk writes it.
                while hosted.group.unapplied() > MAX_INITS && replies.strong_count() > 0 {
                    tokio::time::sleep(INIT_PAUSE).await;
                }
            }
            let event = match m.payload_bytes() {
                0 => Event::Message(*conn, m),
                bytes => Event::Bulk(*conn, m, hosted.queued.room(bytes).await),
            };
            let sent = hosted.leader.send(event).await;
            liveness.waits(false);
            if sent.is_err() {
                return;
            }
            if finish {
                tracing::debug!(shard = shard.0, worker = worker.0, "finished");
            }
        }
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
