//! The shards' images of one step, read in bucket order by the writer of a checkpoint.
//!
//! ```text
//!  shard 0 ─▶ bucket 0 ──▶ bucket 3 ...
//!  shard 1 ─▶   bucket 1 ─▶  bucket 4 ...     next(): bucket 0, 1, 2, 3, ...
//!  shard 2 ─▶     bucket 2 ─▶ ...
//! ```
//!
//! The client asks all shards at once, so each shard holds its image until its stream is read. The connection's
//! window bounds what has arrived and is unread.

use crate::{
    connect::{self, Transport},
    error::ClientError,
};
use paraft_common::{
    BucketId, Layout, Payload, ShardId, Step, TensorKind, WorkerId,
    codec::F32_BYTES,
    config::{LastEvaluation, ServerJob, Stopping},
    placement,
};
use paraft_proto::{
    Candidates, CheckpointPart, CheckpointRequest, Incoming, PROTOCOL, WithBulk, checkpoint_part::Kind,
    services,
};
use paraft_session::SessionError;
use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

/// A server answers an image request at once. A server that hangs must not delay the others.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The images of one step, while they are received.
pub struct CheckpointParts {
    step: Step,
    /// Whether these are images of the current state, not of a stored step.
    now: bool,
    /// The name of the job.
    job: String,
    layout: Layout,
    shards: u32,
    slots: usize,
    streams: BTreeMap<ShardId, Incoming<CheckpointPart>>,
    /// The remaining vectors: bucket and part.
    todo: VecDeque<(BucketId, usize)>,
    /// What the shards send in addition to the vectors.
    pub clocks: Vec<ClockOf>,
    /// The state of early stopping.
    pub stopping: Stopping,
    /// The founding number of shard 0. It identifies the job to the control group.
    pub founding: u64,
}

/// A worker's progress on one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOf {
    /// Which shard.
    pub shard: ShardId,
    /// Which worker.
    pub worker: WorkerId,
    /// The last step that the shard had fully applied.
    pub step: Step,
    /// Whether the worker had finished all its steps.
    pub finished: bool,
}

/// One vector of one bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Which bucket.
    pub bucket: BucketId,
    /// 0: the weights; n: the optimizer's slot n.
    pub part: usize,
    /// Where it begins in the flat vector, in values.
    pub offset: usize,
    /// `f32`, little-endian, as many as the bucket holds.
    pub payload: Payload,
    /// Number of updates that the bucket contains.
    pub version: u64,
    /// The schedule's clock, in steps of the fleet.
    pub clock: f64,
}

impl CheckpointParts {
    /// Asks each shard that holds buckets for its image of `step`. `job` is the caller's own job.
    pub async fn open(
        servers: &[String],
        shards: u32,
        transport: Transport,
        job: &ServerJob,
        step: Step,
    ) -> Result<Self, ClientError> {
        Self::ask_all(servers, shards, transport, job, step, false).await
    }

    /// Like [`Self::open`], for the current state. `step` is the caller's last step, and the caller pushes nothing
    /// meanwhile. In BSP a shard has such an image only after it has applied this step of every worker, or once all
    /// have finished.
    pub async fn take(
        servers: &[String],
        shards: u32,
        transport: Transport,
        job: &ServerJob,
        step: Step,
    ) -> Result<Self, ClientError> {
        Self::ask_all(servers, shards, transport, job, step, true).await
    }

    async fn ask_all(
        servers: &[String],
        shards: u32,
        transport: Transport,
        job: &ServerJob,
        step: Step,
        now: bool,
    ) -> Result<Self, ClientError> {
        let layout = job.layout();
        let slots = job.slots();
        let mut sections = Self {
            step,
            now,
            job: job.name.clone(),
            shards,
            slots,
            streams: BTreeMap::new(),
            todo: todo(&layout, slots),
            layout,
            clocks: Vec::new(),
            stopping: Stopping::default(),
            founding: 0,
        };
        let mut channels = BTreeMap::new();
        let mut failed = None;
        for shard in (0..shards).map(ShardId) {
            let buckets = placement::buckets_of(&sections.layout, shard, shards).len();
            if buckets > 0 {
                // Ask all shards, whatever one answers: a shard whose image is never fetched keeps no other image.
                let asked = sections.ask(shard, servers, transport, &mut channels, job, buckets).await;
                failed = failed.or(asked.err());
            }
        }
        failed.map_or(Ok(sections), Err)
    }

    /// Releases the images of `step` on shards that keep them. A shard that misses this keeps its image for a
    /// while.
    pub async fn release(servers: &[String], shards: u32, transport: Transport, job: &ServerJob, step: Step) {
        drop(Self::open(servers, shards, transport, job, step).await);
    }

    /// The next vector, in the order of the flat vector; `None` after the last.
    pub async fn next(&mut self) -> Result<Option<Piece>, ClientError> {
        let Some((bucket, part)) = self.todo.pop_front() else { return Ok(None) };
        let shard = placement::shard_of(&self.layout, bucket, self.shards);
        let broken = |what: String| -> ClientError { SessionError::Protocol { shard, what }.into() };
        let stream = self.streams.get_mut(&shard).ok_or_else(|| broken("no stream".into()))?;
        let (p, bulk) = match stream.message().await {
            Ok(Some(WithBulk { message: CheckpointPart { kind: Some(Kind::Piece(p)) }, bulk })) => (p, bulk),
            Ok(Some(_)) => return Err(broken("a message out of place".into())),
            Ok(None) => return Err(lost(shard, self.step, "the stream ended early")),
            Err(s) => return Err(lost(shard, self.step, s.message())),
        };
        let spec = self.layout.buckets()[bucket.0 as usize];
        let payload = bulk.into_iter().next().unwrap_or_default();
        if (p.bucket, p.part as usize) != (bucket.0, part) || payload.len() != spec.len * F32_BYTES {
            let (b, n, bytes) = (p.bucket, p.part, payload.len());
            return Err(broken(format!(
                "part {n} of bucket {b} with {bytes} bytes instead of {bucket}'s {part}"
            )));
        }
        let (version, clock) = (p.version, p.clock);
        Ok(Some(Piece { bucket, part, offset: spec.offset, payload, version, clock }))
    }

    /// Number of the optimizer's state vectors.
    pub fn slots(&self) -> usize {
        self.slots
    }

    async fn ask(
        &mut self,
        shard: ShardId,
        servers: &[String],
        transport: Transport,
        channels: &mut BTreeMap<String, tonic::transport::Channel>,
        job: &ServerJob,
        buckets: usize,
    ) -> Result<(), ClientError> {
        let began = Instant::now();
        // The leader is one of `servers`, or a server that they name: when the fleet has changed, the job lists
        // only the first servers. A server that does not lead says so at once.
        let mut candidates = Candidates::of(servers.to_vec());
        while let Some(address) = candidates.next() {
            let mut leader = String::new();
            match self.ask_one(shard, &address, transport, channels, &mut leader).await {
                Ok((header, stream)) => {
                    // Another client may have written the same values in another order.
                    if ServerJob::from_toml(&header.job).ok().as_ref() != Some(job)
                        || header.buckets as usize != buckets
                        || header.step != self.step.0
                    {
                        let what = "an image of another job or step".to_string();
                        return Err(SessionError::Protocol { shard, what }.into());
                    }
                    self.note(shard, &header);
                    self.streams.insert(shard, stream);
                    return Ok(());
                }
                Err(cause) => candidates.failed(&address, cause, &leader),
            }
        }
        let causes = candidates.causes().to_vec();
        Err(SessionError::Unreachable { shard, waited: began.elapsed(), causes }.into())
    }

    async fn ask_one(
        &self,
        shard: ShardId,
        address: &str,
        transport: Transport,
        channels: &mut BTreeMap<String, tonic::transport::Channel>,
        leader: &mut String,
    ) -> Result<(paraft_proto::PartHeader, Incoming<CheckpointPart>), String> {
        let ask = async {
            let channel = match channels.get(address) {
                Some(c) => c.clone(),
                None => connect::channel(address, transport).await?,
            };
            channels.insert(address.to_string(), channel.clone());
            let request = CheckpointRequest {
                protocol: PROTOCOL,
                shard: shard.0,
                step: self.step.0,
                now: self.now,
                job: self.job.clone(),
            };
            let reply = services::checkpoint(&channel, request).await;
            let mut stream = reply.map_err(|s| s.message().to_string())?;
            match stream.message().await.map_err(|s| s.message().to_string())?.and_then(|m| m.message.kind) {
                Some(Kind::Header(header)) => Ok((header, stream)),
                Some(Kind::Refused(r)) => {
                    *leader = r.leader;
                    Err(r.message)
                }
                Some(Kind::Piece(_)) | None => Err("a message out of place".into()),
            }
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, ask).await {
            Ok(r) => r,
            Err(_) => Err(format!("no answer within {ANSWER_TIMEOUT:?}")),
        }
    }

    fn note(&mut self, shard: ShardId, header: &paraft_proto::PartHeader) {
        self.clocks.extend(header.members.iter().map(|m| ClockOf {
            shard,
            worker: WorkerId(m.worker),
            step: Step(m.clock),
            finished: m.finished,
        }));
        if shard == ShardId(0) {
            self.founding = header.founding;
        }
        if let Some(s) = header.stopping.filter(|_| shard == ShardId(0)) {
            let (epoch, loss_sum, correct, count) = (s.epoch, s.loss_sum, s.correct, s.count);
            let evaluated = s.evaluated.then_some(LastEvaluation { epoch, loss_sum, correct, count });
            self.stopping = Stopping { best_loss: s.best_loss, bad: s.bad, stop: s.stop, evaluated };
        }
    }
}

fn todo(layout: &Layout, slots: usize) -> VecDeque<(BucketId, usize)> {
    let parts = |kind| if kind == TensorKind::Param { slots } else { 0 };
    let of = |(i, b): (u32, &paraft_common::BucketSpec)| (0..=parts(b.kind)).map(move |p| (BucketId(i), p));
    (0u32..).zip(layout.buckets()).flat_map(of).collect()
}

fn lost(shard: ShardId, step: Step, cause: &str) -> ClientError {
    let what = format!("its image of {step} was lost on the way: {cause}");
    SessionError::Protocol { shard, what }.into()
}
