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
    BucketId, BucketSpec, Layout, Payload, ShardId, Step, TensorKind, WorkerId,
    codec::F32_BYTES,
    config::{LastEvaluation, ServerJob, Stopping},
    placement,
};
use paraft_proto::{
    CheckpointPart, CheckpointRequest, Incoming, PROTOCOL, PartHeader, checkpoint_part::Kind, services,
};
use paraft_session::{
    SessionError,
    fetch::{Fetch, VectorId},
};
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
    streams: BTreeMap<ShardId, (Fetch, Incoming<CheckpointPart>)>,
    /// The remaining vectors.
    todo: VecDeque<VectorId>,
    /// The partitions of tables.
    partitions: BTreeMap<BucketId, PartitionParts>,
    /// The partition that is received, what is missing of it, and its next part.
    tiles: (BucketId, PartitionParts, u32),
    /// Bytes of a row of each table.
    row_bytes: Vec<u64>,
    /// What the shards send in addition to the vectors.
    pub clocks: Vec<ClockOf>,
    /// The state of early stopping.
    pub stopping: Stopping,
    /// The founding number of shard 0. It identifies the job to the control group.
    pub founding: u64,
}

/// What a shard sends of a partition of a table.
#[derive(Clone, Copy, Debug, Default)]
struct PartitionParts {
    rows: u64,
    /// Bytes of what it knows of ids that are no rows.
    history: u64,
}

/// Something of a partition of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum TablePart {
    /// Whole rows, as the server keeps them.
    Rows(Payload),
    /// What the partition knows of ids that are no rows: for each piece the partition's number and the length of the rest,
    /// in four bytes each, and the rest.
    History(Payload),
}

/// The shards of a job.
#[derive(Clone, Copy, Debug)]
pub struct JobShards<'a> {
    /// All servers, or some of them.
    pub servers: &'a [String],
    /// Number of shards.
    pub shards: u32,
    /// How to reach the servers.
    pub transport: Transport,
    /// The job, as the caller has it.
    pub job: &'a ServerJob,
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
    /// Asks each shard that holds buckets for its image of `step`.
    pub async fn open(of: JobShards<'_>, step: Step) -> Result<Self, ClientError> {
        Self::ask_all(of, step, false).await
    }

    /// Like [`Self::open`], for the current state. `step` is the caller's last step, and the caller pushes nothing
    /// meanwhile. In BSP a shard has such an image only after it has applied this step of every worker, or once all
    /// have finished.
    pub async fn take(of: JobShards<'_>, step: Step) -> Result<Self, ClientError> {
        Self::ask_all(of, step, true).await
    }

    async fn ask_all(of: JobShards<'_>, step: Step, now: bool) -> Result<Self, ClientError> {
        let JobShards { servers, shards, transport, job } = of;
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
            partitions: BTreeMap::new(),
            tiles: (BucketId(0), PartitionParts::default(), 0),
            row_bytes: job.tables.iter().map(|table| table.row_bytes()).collect(),
            layout,
            clocks: Vec::new(),
            stopping: Stopping::default(),
            founding: 0,
        };
        let mut channels = BTreeMap::new();
        let mut failed = None;
        // Ask all shards, whatever one answers: a shard whose image is never fetched keeps no other image.
        for (shard, wanted) in sections.by_shard() {
            let fetch = Fetch::new(servers.to_vec(), wanted);
            failed = failed.or(sections.ask(shard, fetch, transport, &mut channels, job).await.err());
        }
        failed.map_or(Ok(sections), Err)
    }

    /// Releases the images of `step` on shards that keep them. A shard that misses this keeps its image for a
    /// while.
    pub async fn release(of: JobShards<'_>, step: Step) {
        drop(Self::open(of, step).await);
    }

    /// The next vector, in the order of the flat vector; `None` after the last.
    pub async fn next(&mut self) -> Result<Option<Piece>, ClientError> {
        let Some((bucket, part)) = self.todo.pop_front() else { return Ok(None) };
        let shard = placement::shard_of(&self.layout, bucket, self.shards);
        let broken = |what: String| -> ClientError { SessionError::Protocol { shard, what }.into() };
        let (fetch, stream) = self.streams.get_mut(&shard).ok_or_else(|| broken("no stream".into()))?;
        let mut message = match stream.message().await {
            Ok(Some(message)) => message,
            Ok(None) => return Err(lost(shard, self.step, "the stream ended early")),
            Err(s) => return Err(lost(shard, self.step, s.message())),
        };
        let (version, clock) = match message.message.kind.take() {
            Some(Kind::Piece(p)) if (p.bucket, p.part) == (bucket.0, part) => (p.version, p.clock),
            _ => return Err(broken("a message out of place".into())),
        };
        let payload = message.payload();
        fetch.arrived((bucket, part), &payload).map_err(broken)?;
        let offset = self.layout.buckets()[bucket.0 as usize].offset;
        Ok(Some(Piece { bucket, part: part as usize, offset, payload, version, clock }))
    }

    /// For each table its rows, and the bytes of what its partitions know of other ids, once the parts are open.
    pub fn table_sizes(&self) -> Vec<(u64, u64)> {
        let of = |table: usize| {
            let partitions = self.layout.partitions(table).filter_map(|b| self.partitions.get(&BucketId(b)));
            partitions.fold((0, 0), |(rows, bytes), of| (rows + of.rows, bytes + of.history))
        };
        (0..self.row_bytes.len()).map(of).collect()
    }

    /// The next part of a table, and the table: partition by partition the rows, then what it knows of other ids. Call it after
    /// [`Self::next`] has returned `None`. `None`: there are no more.
    pub async fn next_of_tables(&mut self) -> Result<Option<(usize, TablePart)>, ClientError> {
        while self.tiles.1.rows == 0 && self.tiles.1.history == 0 {
            let Some((bucket, parts)) = self.partitions.pop_first() else { return Ok(None) };
            self.tiles = (bucket, parts, 1);
        }
        let (bucket, ref mut missing, ref mut part) = self.tiles;
        let shard = placement::shard_of(&self.layout, bucket, self.shards);
        let broken = |what: String| -> ClientError { SessionError::Protocol { shard, what }.into() };
        let (_, stream) = self.streams.get_mut(&shard).ok_or_else(|| broken("no stream".into()))?;
        let message = match stream.message().await {
            Ok(Some(message)) => message,
            Ok(None) => return Err(lost(shard, self.step, "the stream ended early")),
            Err(s) => return Err(lost(shard, self.step, s.message())),
        };
        match &message.message.kind {
            Some(Kind::Piece(p)) if (p.bucket, p.part) == (bucket.0, *part) => {}
            _ => return Err(broken("a message out of place".into())),
        }
        *part += 1;
        let payload = message.payload();
        let (table, len) =
            (self.layout.partition(bucket).map_or(0, |(table, _)| table), payload.len() as u64);
        let misfit = |missing| broken(format!("{len} bytes for {missing} of {bucket}"));
        if missing.rows == 0 {
            let left = missing.history.checked_sub(len).filter(|_| len > 0);
            missing.history = left.ok_or_else(|| misfit("the history"))?;
            return Ok(Some((table, TablePart::History(payload))));
        }
        let row = self.row_bytes[table].max(1);
        let left = missing.rows.checked_sub(len / row).filter(|_| len > 0 && len.is_multiple_of(row));
        missing.rows = left.ok_or_else(|| misfit("the rows"))?;
        Ok(Some((table, TablePart::Rows(payload))))
    }

    /// Number of the optimizer's state vectors.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The vectors of each shard, and their bytes.
    fn by_shard(&self) -> BTreeMap<ShardId, Vec<(VectorId, usize)>> {
        let mut all = BTreeMap::<ShardId, Vec<_>>::new();
        for id in &self.todo {
            let bytes = self.layout.buckets()[id.0.0 as usize].len * F32_BYTES;
            all.entry(placement::shard_of(&self.layout, id.0, self.shards)).or_default().push((*id, bytes));
        }
        all
    }

    async fn ask(
        &mut self,
        shard: ShardId,
        mut fetch: Fetch,
        transport: Transport,
        channels: &mut BTreeMap<String, tonic::transport::Channel>,
        job: &ServerJob,
    ) -> Result<(), ClientError> {
        let (began, buckets) = (Instant::now(), fetch.buckets().len());
        // The leader is one of the servers, or a server that they name: when the fleet has changed, the job lists
        // only the first servers. A server that does not lead says so at once.
        while let Some(address) = fetch.next_server() {
            match self.ask_one(shard, &address, transport, channels, &mut fetch).await {
                Ok(None) => {}
                Ok(Some((header, stream))) => {
                    // Another client may have written the same values in another order.
                    if ServerJob::from_toml(&header.job).ok().as_ref() != Some(job)
                        || header.buckets as usize != buckets
                        || header.step != self.step.0
                    {
                        let what = "an image of another job or step".to_string();
                        return Err(SessionError::Protocol { shard, what }.into());
                    }
                    self.note(shard, &header);
                    self.streams.insert(shard, (fetch, stream));
                    return Ok(());
                }
                Err(cause) => fetch.failed(cause),
            }
        }
        let causes = fetch.causes().to_vec();
        Err(SessionError::Unreachable { shard, waited: began.elapsed(), causes }.into())
    }

    /// `None`: this server refuses.
    async fn ask_one(
        &self,
        shard: ShardId,
        address: &str,
        transport: Transport,
        channels: &mut BTreeMap<String, tonic::transport::Channel>,
        fetch: &mut Fetch,
    ) -> Result<Option<(PartHeader, Incoming<CheckpointPart>)>, String> {
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
                Some(Kind::Header(header)) => Ok(Some((header, stream))),
                Some(Kind::Refused(refused)) => {
                    fetch.refused(refused);
                    Ok(None)
                }
                Some(Kind::Piece(_)) | None => Err("a message out of place".to_string()),
            }
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, ask).await {
            Ok(r) => r,
            Err(_) => Err(format!("no answer within {ANSWER_TIMEOUT:?}")),
        }
    }

    fn note(&mut self, shard: ShardId, header: &PartHeader) {
        self.clocks.extend(header.members.iter().map(|m| ClockOf {
            shard,
            worker: WorkerId(m.worker),
            step: Step(m.clock),
            finished: m.finished,
        }));
        let here = placement::ids_of(&self.layout, shard, self.shards);
        let partitions = here.filter(|b| self.layout.partition(*b).is_some());
        let parts = header.rows.iter().zip(&header.history);
        let parts = parts.map(|(rows, history)| PartitionParts { rows: *rows, history: *history });
        self.partitions.extend(partitions.zip(parts));
        if shard == ShardId(0) {
            self.founding = header.founding;
        }
        if let Some(s) = header.stopping.filter(|_| shard == ShardId(0)) {
            let (number, loss_sum, correct, count) = (s.epoch, s.loss_sum, s.correct, s.count);
            let evaluated = s.evaluated.then_some(LastEvaluation { number, loss_sum, correct, count });
            self.stopping = Stopping { best_loss: s.best_loss, bad: s.bad, stop: s.stop, evaluated };
        }
    }
}

fn todo(layout: &Layout, slots: usize) -> VecDeque<VectorId> {
    let parts = |kind| if kind == TensorKind::Param { slots as u32 } else { 0 };
    let of = |(i, b): (u32, &BucketSpec)| (0..=parts(b.kind)).map(move |p| (BucketId(i), p));
    (0u32..).zip(layout.buckets()).flat_map(of).collect()
}

fn lost(shard: ShardId, step: Step, cause: &str) -> ClientError {
    let what = format!("its image of {step} was lost on the way: {cause}");
    SessionError::Protocol { shard, what }.into()
}
