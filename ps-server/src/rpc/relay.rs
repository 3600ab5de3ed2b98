//! Versions from a process that has read them itself.
//!
//! ```text
//!  servers ──▶ relay ──▶ readers, other relays
//! ```
//!
//! To a reader a relay is one more process with each shard of the job. Which version the servers will send it does not know
//! before they do, so its first answer is `pending`.

use super::{
    check_protocol,
    readers::{Ended, Reader, Readers},
    rights::visitor,
    shards::unknown_caller,
    versions::{NEWS_INTERVAL, Out, Pace, VersionStream, answer, send, type_of},
};
use crate::{
    connections::{self, Rank, Visitor},
    shard::versions::Encoded,
};
use bytes::Bytes;
use paraft_common::{BucketId, Encoding, Layout, ShardId, Step, TensorKind, difference::Code, placement};
use paraft_proto::{
    EditRowsReply, EditRowsRequest, PROTOCOL, ReadRowsRequest, ReadVersionRequest, RefusalKind, SaveReply,
    SaveRequest, ShardStatus, StatusReply, StatusRequest, SwitchModeReply, SwitchModeRequest, VersionOf,
    VersionPiece, shards_server::Shards, version_message::Kind,
};
use paraft_tls::{Need, access::DENIED};
use std::{collections::BTreeMap, sync::Arc};
use tonic::{Request, Response, Status};

/// The job that a relay relays.
#[derive(Clone, Debug)]
pub struct RelayedJob {
    /// Its name.
    pub name: String,
    /// The servers' job, in TOML.
    pub toml: String,
    /// Its tensors and buckets.
    pub layout: Layout,
    /// Its shards.
    pub shards: u32,
    /// The founding of shard 0.
    pub founding: u64,
}

/// A version that a relay has.
#[derive(Debug)]
pub struct RelayedVersion {
    /// Its step.
    pub step: Step,
    /// The founding of each shard.
    pub foundings: BTreeMap<u32, u64>,
    /// Updates of each bucket, and its values.
    pub buckets: BTreeMap<BucketId, (u64, Arc<Encoded>)>,
}

/// Why a relay has no version for a reader.
#[derive(Debug)]
pub enum Missed {
    /// The job has ended before it, at this step.
    Ended(Step),
    /// Another one may do, or the servers refuse.
    Refused(RefusalKind),
}

/// Where a relay has its versions from.
pub trait Origin: Send + Sync + 'static {
    /// The job.
    fn job(&self) -> Arc<RelayedJob>;

    /// The newest version that was heard of, and whether it is the last.
    fn reached(&self) -> (Step, bool);

    /// One of the last versions.
    fn held(&self, dtype: Encoding, step: Step) -> Option<Arc<RelayedVersion>>;

    /// The newest version of the servers, of this step or a later one; `confirm`: as a majority says.
    fn next(
        &self,
        dtype: Encoding,
        least: Step,
        confirm: bool,
    ) -> impl Future<Output = Result<Arc<RelayedVersion>, Missed>> + Send;
}

/// The service of a relay.
pub struct RelayService<O> {
    address: String,
    origin: Arc<O>,
    readers: Arc<Readers>,
}

impl<O> Clone for RelayService<O> {
    fn clone(&self) -> Self {
        Self { address: self.address.clone(), origin: self.origin.clone(), readers: self.readers.clone() }
    }
}

impl<O: Origin> RelayService<O> {
    /// For a relay that listens here.
    pub fn new(address: String, origin: Arc<O>) -> Self {
        Self { address, origin, readers: Arc::default() }
    }

    async fn send_version(
        &self,
        request: ReadVersionRequest,
        by: Option<Visitor>,
        out: &Out,
    ) -> Result<(), Ended> {
        check_protocol(request.protocol)?;
        let by = by.as_ref().ok_or_else(unknown_caller)?;
        let job = self.origin.job();
        let name = if request.job.is_empty() { &job.name } else { &request.job };
        by.may(Need::Reader, name).await.map_err(|_| RefusalKind::Denied(DENIED.into()))?;
        let shard = ShardId(request.shard);
        if *name != job.name || shard.0 >= job.shards {
            return Err(RefusalKind::WrongShard { shard }.into());
        }
        let dtype = type_of(&request.dtype)?;
        let buckets = buckets_of(&job, shard, &request.only)?;
        let reader = self.readers.reader(&by.rights().to_string())?;
        by.is(Rank::Reader);
        let step = Step(request.step);
        let held = self.origin.held(dtype, step).filter(|_| request.exactly);
        let (version, was_told) = match held {
            Some(version) => (version, false),
            None => (self.wait(&request, &job, dtype, out).await?, true),
        };
        let founding = version.foundings.get(&shard.0).copied().unwrap_or(0);
        if request.founding != 0 && request.founding != founding {
            return Err(RefusalKind::OtherFounding(shard).into());
        }
        let (reached, over) = self.origin.reached();
        if request.exactly && version.step != step {
            return Err(RefusalKind::NoVersion { shard, step, reached: reached.max(version.step) }.into());
        }
        let of = |toml: &str| {
            let (job, step, shards) = (toml.to_string(), version.step.0, job.shards);
            let reached = reached.max(version.step).0;
            Kind::Of(VersionOf { job, founding, step, reached, shards, over, pending: false })
        };
        send(out, of(if was_told { "" } else { &job.toml })).await?;
        let base = request.have.and_then(|step| self.origin.held(dtype, Step(step)));
        let mut pace = Pace::begin();
        for id in buckets {
            let Some((updates, encoded)) = version.buckets.get(&id) else {
                return Err(RefusalKind::Unavailable(format!("the relay has no {id}")).into());
            };
            let old = base.as_ref().and_then(|base| Some((base.step, base.buckets.get(&id)?.1.clone())));
            let bytes = send_bucket((id, *updates), encoded, old, &reader, out).await?;
            pace.sent(bytes, shard, version.step)?;
        }
        send(out, of("")).await
    }

    /// Waits for a version from the servers; the reader hears each second that it is heard.
    async fn wait(
        &self,
        request: &ReadVersionRequest,
        job: &RelayedJob,
        dtype: Encoding,
        out: &Out,
    ) -> Result<Arc<RelayedVersion>, Ended> {
        let pending = |toml: &str, ended: Option<Step>| {
            let (reached, over) = self.origin.reached();
            Kind::Of(VersionOf {
                job: toml.into(),
                founding: if request.shard == 0 { job.founding } else { request.founding },
                step: request.step,
                reached: ended.unwrap_or(reached).0,
                shards: job.shards,
                over: over || ended.is_some(),
                pending: true,
            })
        };
        send(out, pending(&job.toml, None)).await?;
        let mut next = std::pin::pin!(self.origin.next(dtype, Step(request.step), request.confirm));
        loop {
            tokio::select! {
                version = &mut next => match version {
                    Ok(version) => return Ok(version),
                    Err(Missed::Refused(kind)) => return Err(kind.into()),
                    Err(Missed::Ended(last)) => {
                        send(out, pending("", Some(last))).await?;
                        return Err(Ended::Gone);
                    }
                },
                () = tokio::time::sleep(NEWS_INTERVAL) => send(out, pending("", None)).await?,
                () = out.closed() => return Err(Ended::Gone),
            }
        }
    }
}

/// The buckets of a shard that a reader asks for.
fn buckets_of(job: &RelayedJob, shard: ShardId, only: &[u32]) -> Result<Vec<BucketId>, RefusalKind> {
    let ids = (0u32..).zip(job.layout.buckets()).filter(|(_, b)| b.kind != TensorKind::Rows);
    let here: Vec<_> = ids
        .map(|(id, _)| BucketId(id))
        .filter(|id| placement::shard_of(&job.layout, *id, job.shards) == shard)
        .collect();
    if let Some(bucket) = only.iter().map(|id| BucketId(*id)).find(|id| !here.contains(id)) {
        return Err(RefusalKind::WrongBucket { bucket, shard });
    }
    Ok(here.into_iter().filter(|id| only.is_empty() || only.contains(&id.0)).collect())
}

async fn send_bucket(
    (id, version): (BucketId, u64),
    encoded: &Arc<Encoded>,
    old: Option<(Step, Arc<Encoded>)>,
    reader: &Reader,
    out: &Out,
) -> Result<u64, Ended> {
    let _room = tokio::select! {
        room = reader.room(encoded.values.len()) => room,
        () = out.closed() => return Err(Ended::Gone),
    };
    let own = encoded.clone();
    let made = tokio::task::spawn_blocking(move || match old {
        Some((step, old)) => own.difference(step, &old.values),
        None => (Code::Whole, own.values.clone()),
    });
    let (code, payload): (Code, Bytes) = made.await.map_err(|_| Ended::Gone)?;
    let (sent, digest, code) = (payload.len() as u64, encoded.digest, code.number());
    send(out, Kind::Piece(VersionPiece { bucket: id.0, version, digest, payload, code })).await?;
    Ok(sent)
}

fn only_versions() -> Status {
    Status::unimplemented("a relay sends versions of the weights, and nothing else: ask a server")
}

#[tonic::async_trait]
impl<O: Origin> Shards for RelayService<O> {
    type ReadRowsStream = super::rows::RowsStream;
    type ReadVersionStream = VersionStream;

    async fn read_version(
        &self,
        request: Request<ReadVersionRequest>,
    ) -> Result<Response<VersionStream>, Status> {
        let by = connections::of(request.extensions());
        let (service, request) = (self.clone(), request.into_inner());
        Ok(Response::new(answer(|out| async move { service.send_version(request, by, &out).await })))
    }

    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let (job, (reached, _)) = (self.origin.job(), self.origin.reached());
        let shard = |shard| ShardStatus {
            shard,
            job_name: job.name.clone(),
            role: "relay".into(),
            version: reached.0,
            ..ShardStatus::default()
        };
        let shards = if by.sees(&job.name) { (0..job.shards).map(shard).collect() } else { Vec::new() };
        let version = env!("CARGO_PKG_VERSION").into();
        let (address, protocol) = (self.address.clone(), PROTOCOL);
        Ok(Response::new(StatusReply { address, protocol, version, shards, ..StatusReply::default() }))
    }

    async fn read_rows(
        &self,
        _: Request<ReadRowsRequest>,
    ) -> Result<Response<super::rows::RowsStream>, Status> {
        Err(only_versions())
    }

    async fn switch_mode(&self, _: Request<SwitchModeRequest>) -> Result<Response<SwitchModeReply>, Status> {
        Err(only_versions())
    }

    async fn edit_rows(&self, _: Request<EditRowsRequest>) -> Result<Response<EditRowsReply>, Status> {
        Err(only_versions())
    }

    async fn save(&self, _: Request<SaveRequest>) -> Result<Response<SaveReply>, Status> {
        Err(only_versions())
    }
}
