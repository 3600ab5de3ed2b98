//! A worker's stream to a shard: checks each message and passes it to the shard's leader, in order.

use super::{
    audit::Audit, checkpoint, convert, readers::Readers, rights::visitor, status::StatusService, switch,
};
use crate::{
    connections::{self, Rank, Visitor},
    control::Agent,
    replicas::{Replica, Replicas},
    shard::{
        leader::{Event, Liveness, MAX_AHEAD, Message, Reply, lowest},
        state::Shard,
        worker_state::FLEET,
    },
};
use futures::{Stream, StreamExt};
use paraft_common::{
    Durability, JobId, JobShard, SessionId, ShardId, WorkerId,
    config::{ServerJob, ServerJobError},
};
use paraft_lanes::shared::Shared;
use paraft_proto::{
    CheckpointRequest, FromShard, Incoming, PROTOCOL, Refusal, RefusalKind, SaveReply, SaveRequest,
    StatusReply, StatusRequest, SwitchModeReply, SwitchModeRequest, ToShard, WithBulk, bulk, limits,
    services::{self, Handler},
    shards_server::{Shards, ShardsServer},
    to_shard,
};
use paraft_tls::{Access, Need, access::DENIED};
use paraft_trace::{Moment, Span, Stage, Stages};
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, Semaphore, mpsc},
    task::JoinSet,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, body::Body};
use tower::Service;

/// Bound on the replies that wait for a slow reader, besides those for each bucket.
const REPLY_QUEUE: usize = 64;

/// Bound on unapplied entries while an initial state comes in. With the largest buckets, they hold as many
/// bytes as a worker may push without an ack.
pub(super) const MAX_INITS: u64 = (limits::PUSH_WINDOW_BYTES / limits::MAX_BUCKET_BYTES) as u64;
/// Pause between two checks of that bound.
pub(super) const INIT_PAUSE: Duration = Duration::from_millis(1);

/// Timeout for a stream's first message: its client sends it as soon as it has the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of streams without a first message, over all connections. Each connection has a bound of
/// its own, but many connections together would reach a million streams.
pub const MAX_UNOPENED_STREAMS: usize = 4096;

/// The service for workers.
#[derive(Clone)]
pub struct ShardsService {
    /// This server.
    pub server: u64,
    /// The shards hosted here.
    pub replicas: Arc<Replicas>,
    /// Knows the addresses of the other servers.
    pub agent: Arc<Agent>,
    /// Answers Status.
    pub status: StatusService,
    /// Numbers the streams.
    pub streams: Arc<AtomicU64>,
    /// Permits for streams without a first message: [`MAX_UNOPENED_STREAMS`].
    pub unopened: Arc<Semaphore>,
    /// The readers of weights.
    pub readers: Arc<Readers>,
    /// Records what people ask of jobs.
    pub audit: Arc<Audit>,
    /// How to reach other servers, to fetch their weights.
    pub access: Access,
}

#[tonic::async_trait]
impl Shards for ShardsService {
    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let mut all = {
            let StatusRequest { digest, logs } = request.into_inner();
            self.status.reply(digest, logs).await
        };
        if !by.may_read_all() {
            // A job that has not begun has no name yet, and nothing to show.
            all.shards.retain(|s| by.sees(&s.job_name));
            all.stopped.clear();
        }
        Ok(Response::new(all))
    }

    async fn switch_mode(
        &self,
        request: Request<SwitchModeRequest>,
    ) -> Result<Response<SwitchModeReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let request = request.into_inner();
        let hosted = self.may(&by, Need::Submit, &request.job, request.shard).await;
        let reply = switch::reply(hosted, &request).await;
        let why = reply.refused.as_ref().map(|r| r.message.as_str());
        // A server that does not lead the shard refuses, and knows nothing of the order.
        if reply.refused.as_ref().is_none_or(|r| r.leader.is_empty()) {
            let act =
                format!("switch of job `{}`, shard {}, to {}", request.job, request.shard, request.mode);
            self.audit.note(&by, act, why);
        }
        Ok(Response::new(reply))
    }

    async fn save(&self, request: Request<SaveRequest>) -> Result<Response<SaveReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let request = request.into_inner();
        let hosted = self.may(&by, Need::Submit, &request.job, 0).await;
        let reply = match hosted.and_then(|hosted| save(&hosted, &request)) {
            Ok(worker) => SaveReply { worker: worker.0, refused: None },
            Err(kind) => SaveReply { refused: Some(kind.into()), ..SaveReply::default() },
        };
        let refused = reply.refused.as_ref();
        if refused.is_none_or(|r| r.leader.is_empty()) {
            let act = format!("checkpoint of job `{}` now", request.job);
            self.audit.note(&by, act, refused.map(|r| r.message.as_str()));
        }
        Ok(Response::new(reply))
    }
}

/// Asks a worker for a checkpoint of the current step; returns that worker.
fn save(hosted: &Replica, request: &SaveRequest) -> Result<WorkerId, RefusalKind> {
    if request.protocol != PROTOCOL {
        return Err(RefusalKind::Protocol { client: request.protocol, server: PROTOCOL });
    }
    let shard = hosted.shard.id();
    if !hosted.group.leadership().borrow().leads {
        let leader = hosted.group.leader_address();
        return Err(RefusalKind::NotLeader { shard, leader, stopped: None });
    }
    let none = |why: &str| RefusalKind::Unavailable(why.into());
    let conf = hosted.shard.configured().ok_or_else(|| none("no job has begun here yet"))?;
    if let Some(why) = cannot_save(&conf.job) {
        return Err(RefusalKind::BadJob(why.into()));
    }
    if hosted.shard.is_over() {
        return Err(RefusalKind::BadOrder(format!(
            "job `{}` has ended: no worker is left to write a checkpoint",
            conf.job.name
        )));
    }
    let writer = lowest(&hosted.shard).ok_or_else(|| none("no worker trains"))?;
    hosted.counters.save.store(true, Relaxed);
    Ok(writer)
}

/// Why no worker can write a checkpoint between any two steps.
fn cannot_save(job: &ServerJob) -> Option<&'static str> {
    match () {
        () if job.chunks.is_some() => {
            Some("with leased samples checkpoints are cut between epochs: set checkpoint.every_epochs")
        }
        () if !job.stages.is_empty() => {
            Some("a job with stages has checkpoints at steps that were set before: checkpoint.every_steps")
        }
        () => None,
    }
}

impl Handler for ShardsService {
    const NAME: &'static str = "paraft.v1.Shards";

    async fn handle(self, request: http::Request<Body>) -> http::Response<Body> {
        let visitor = connections::of(request.extensions());
        match request.uri().path() {
            services::EXCHANGE => {
                let inbound = Incoming::new(request.into_body(), limits::MAX_MESSAGE_BYTES);
                bulk::respond(self.exchange(inbound, visitor, None))
            }
            services::READ => match self.only(request).await {
                Ok(request) => bulk::respond(self.read(request, visitor)),
                Err(refused) => refused,
            },
            services::CHECKPOINT => match self.only(request).await {
                Ok(request) => bulk::respond(self.checkpoint(request, visitor).await),
                Err(refused) => refused,
            },
            _ => match ShardsServer::new(self).call(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
        }
    }
}

/// The refusal of a request whose connection is unknown to the door.
pub(super) fn nobody() -> RefusalKind {
    RefusalKind::Denied("nobody knows who asks".into())
}

/// The refusal for an unreadable message or a broken connection.
pub(super) fn unreadable(status: Status) -> RefusalKind {
    RefusalKind::Unreadable(status.message().to_string())
}

/// What a stream answers: a refusal before it is open, or the leader's replies.
enum Source {
    One(Box<FromShard>),
    Many(mpsc::Receiver<Reply>, Reader),
}

/// The reader of a stream.
#[derive(Clone)]
pub(super) struct Reader {
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

    /// Waits for a stream's first message, with a timeout and a bound on streams that wait.
    async fn opened<T>(&self, says: impl Future<Output = T>) -> Result<T, RefusalKind> {
        let Ok(_waits) = self.unopened.try_acquire() else {
            let why = format!("{MAX_UNOPENED_STREAMS} streams of this server have not said what they want");
            return Err(RefusalKind::Overloaded(why));
        };
        tokio::time::timeout(OPEN_TIMEOUT, says).await.map_err(|_| RefusalKind::NotOpened)
    }

    /// The first message of a stream; `None`: it has no kind, or the stream has ended.
    async fn first(&self, inbound: &mut Incoming<ToShard>) -> Result<Option<to_shard::Kind>, Refusal> {
        let first = self.opened(inbound.message()).await?.map_err(unreadable)?;
        Ok(first.and_then(|m| m.message.kind))
    }

    /// The only message of a request, or the error as a response.
    async fn only<M: bulk::Bulk>(&self, request: http::Request<Body>) -> Result<M, http::Response<Body>> {
        let only = services::only(request, limits::MAX_MESSAGE_BYTES);
        let not_heard = |kind: RefusalKind| {
            let status = match &kind {
                RefusalKind::Overloaded(_) => Status::resource_exhausted,
                _ => Status::deadline_exceeded,
            };
            services::refuse(status(kind.to_string()))
        };
        Ok(self.opened(only).await.map_err(not_heard)??.message)
    }

    async fn checkpoint(&self, request: CheckpointRequest, by: Option<Visitor>) -> checkpoint::Parts {
        let hosted = match &by {
            Some(by) => self.may(by, Need::Worker, &request.job, request.shard).await,
            None => Err(nobody()),
        };
        if hosted.is_ok() {
            by.inspect(|v| v.is(Rank::Reader));
        }
        checkpoint::parts(hosted, request).await
    }

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

    async fn serve(
        &self,
        conn: u64,
        inbound: &mut Incoming<ToShard>,
        visitor: Option<Visitor>,
        out: &mpsc::Sender<Source>,
    ) -> Result<(), Refusal> {
        let Some(to_shard::Kind::Open(open)) = self.first(inbound).await? else {
            return Err(RefusalKind::NotOpened.into());
        };
        if open.protocol != PROTOCOL {
            return Err(RefusalKind::Protocol { client: open.protocol, server: PROTOCOL }.into());
        }
        if open.job.len() > limits::MAX_JOB_BYTES {
            return Err(RefusalKind::BadJob(format!("a job of {} bytes is too long", open.job.len())).into());
        }
        let bad = |e: ServerJobError| RefusalKind::BadJob(e.to_string());
        let job = ServerJob::decode(&open.job).map_err(bad)?;
        let by = visitor.as_ref().ok_or_else(nobody)?;
        let hosted = self.may(by, Need::Worker, &job.name, open.shard).await?;
        let (name, shard) = (hosted.shard.name(), hosted.shard.id());
        if open.founding != 0 && open.founding != hosted.founding {
            // The servers acknowledged pushes to this client that are gone: continuing would hide that.
            return Err(RefusalKind::StateLost(shard).into());
        }
        if WorkerId(open.worker) == FLEET {
            return Err(RefusalKind::BadJob(format!("no worker has the number {}", open.worker)).into());
        }
        // A worker may await weights for each bucket, and an ack for each step that it may be ahead of
        // replication, for the step that it is in, and for one push that was sent again.
        let running = hosted.shard.view(|conf, m| conf.map(|c| (c.job == job, m.job.clone())));
        let text = match &running {
            // A running job continues, even if a later version of the servers would refuse to start it.
            Some((true, running)) => running.clone(),
            _ => {
                job.validate().map_err(bad)?;
                job.to_toml().map_err(bad)?
            }
        };
        let shards = hosted.shard.shards();
        if job.stages.len() > shards as usize {
            let stages = job.stages.len();
            return Err(RefusalKind::BadJob(format!(
                "the job has {stages} stages, each with shards of its own, and there are {shards}"
            ))
            .into());
        }
        // The durability level decides where the replicas' logs are, and the logs exist before the job.
        if job.durability.on_disk() != hosted.folder.is_some() {
            let kept =
                if hosted.folder.is_some() { Durability::QuorumDisk } else { Durability::QuorumMemory };
            let (wants, has) =
                (job.durability, self.agent.shape_of(name.job()).map_or(kept, |shape| shape.durability));
            let why = match name.job() {
                JobId(0) => format!(
                    "the job wants durability {wants}, the fleet was founded with {has}; start the servers with the job's \
                     --durability, or change cluster.durability"
                ),
                _ => format!(
                    "the job wants durability {wants}, and was submitted with {has}: use the job file that was submitted"
                ),
            };
            return Err(RefusalKind::BadJob(why).into());
        }
        if running.is_none() && hosted.group.leadership().borrow().leads {
            self.agent.admit(&job, &text).await.map_err(RefusalKind::NoRoom)?;
        }
        // Each worker is told why the job cannot start; only worker 0 asks for the initial weights, as only
        // one worker sends those of the seed.
        let source = self.source(by, &job, &hosted).await?.filter(|_| open.worker == 0);
        visitor.iter().for_each(|v| v.is(Rank::Worker));
        let buckets = job.buckets() + 2;
        let (tx, rx) = mpsc::channel(REPLY_QUEUE + (MAX_AHEAD as usize + 3) * buckets);
        let worker = WorkerId(open.worker);
        let (stages, state) = (self.replicas.stages().clone(), hosted.shard.clone());
        let opened = Arc::new(Notify::new());
        let reader = Reader { shard, worker, stages, state, opened: opened.clone() };
        let _ = out.send(Source::Many(rx, reader)).await;
        // Only the leader keeps the stream open.
        let weak = tx.downgrade();
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
            let (service, hosted, alive) = (self.clone(), hosted.clone(), weak.clone());
            copies.spawn(async move {
                opened.notified().await;
                service.inherit(source, hosted, conn, alive).await;
            });
        }
        loop {
            let m = match inbound.message().await {
                Ok(Some(m)) => m,
                Ok(None) => break,
                Err(status) => {
                    // On a broken connection nothing receives the refusal.
                    if let Some(tx) = weak.upgrade() {
                        let _ = tx.try_send(Reply::Refused(unreadable(status).into()));
                    }
                    break;
                }
            };
            liveness.heard();
            visitor.iter().for_each(Visitor::speaks);
            if let Some(to_shard::Kind::Heartbeat(h)) = &m.message.kind
                && !h.host.is_empty()
                && shard == ShardId(0)
            {
                hosted.counters.take_about(&hosted.shard, worker, convert::about(h));
            }
            let m = match convert::message(&hosted.shard, m) {
                Ok(Some(m)) => m,
                Ok(None) => continue,
                Err(refusal) => {
                    self.status.count_refusal(name);
                    let Some(tx) = weak.upgrade() else { break };
                    let _ = tx.send(Reply::Refused(refusal)).await;
                    continue;
                }
            };
            let finish = matches!(m, Message::Finish);
            liveness.waits(true);
            if matches!(m, Message::Init { .. }) {
                // Initial state is not acknowledged, so no window holds the worker back. A large model would
                // pile up here at the network's speed, while the disk writes it.
                while hosted.group.unapplied() > MAX_INITS && weak.strong_count() > 0 {
                    tokio::time::sleep(INIT_PAUSE).await;
                }
            }
            let event = match m.payload_bytes() {
                0 => Event::Message(conn, m),
                bytes => Event::Bulk(conn, m, hosted.queued.room(bytes).await),
            };
            let sent = hosted.leader.send(event).await;
            liveness.waits(false);
            if sent.is_err() {
                break;
            }
            if finish {
                tracing::debug!(shard = shard.0, worker = open.worker, "finished");
            }
        }
        let _ = hosted.leader.send(Event::Closed(conn)).await;
        Ok(())
    }
}
