//! Versions for readers, from any replica: the whole weights of a shard at one moment.

use super::{
    check_protocol, convert,
    readers::{Ended, Reader},
    shards::{ShardsService, unknown_caller},
};
use crate::{
    connections::{Rank, Visitor},
    replicas::Replica,
    shard::versions::{BASE_TIME, Base, KeptBucket, KeptVersion, Passed, Wanted},
};
use bytes::Bytes;
use futures::Stream;
use paraft_common::{Encoding, ShardId, Step, difference::Code};
use paraft_proto::{
    ReadVersionRequest, RefusalKind, VersionMessage, VersionOf, VersionPiece, version_message::Kind,
};
use paraft_tls::Need;
use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{sync::mpsc, time::Instant};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::Status;

/// The stream that answers the call.
pub type VersionStream = Pin<Box<dyn Stream<Item = Result<VersionMessage, Status>> + Send>>;

/// Messages of a stream that wait for the transport.
const MAX_WAITING: usize = 1;
/// How often a reader looks for its version while nothing is applied.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// A reader that waits hears so often that the server is there.
pub(super) const NEWS_INTERVAL: Duration = Duration::from_secs(1);
/// A reader holds memory of the server as long as it has its version, so it must take so many bytes a second, ...
const SLOWEST: u64 = 1 << 20;
/// ... with so much time beyond that.
const GRACE: Duration = Duration::from_secs(30);

pub(super) type Out = mpsc::Sender<VersionMessage>;

pub(super) async fn send(out: &Out, kind: Kind) -> Result<(), Ended> {
    out.send(VersionMessage { kind: Some(kind) }).await.map_err(|_| Ended::Gone)
}

/// The stream of a call that `sends` answers, in a task of its own; a refusal ends it.
pub(super) fn answer<F>(sends: impl FnOnce(Out) -> F) -> VersionStream
where
    F: Future<Output = Result<(), Ended>> + Send + 'static,
{
    let (out, rx) = mpsc::channel(MAX_WAITING);
    let answered = sends(out.clone());
    tokio::spawn(async move {
        if let Err(Ended::Refused(kind)) = answered.await {
            let _ = send(&out, Kind::Refused(kind.into())).await;
        }
    });
    Box::pin(ReceiverStream::new(rx).map(Ok))
}

impl ShardsService {
    pub(super) fn version(&self, request: ReadVersionRequest, by: Option<Visitor>) -> VersionStream {
        let service = self.clone();
        answer(|out| async move { service.send_version(request, by, &out).await })
    }

    async fn send_version(
        &self,
        request: ReadVersionRequest,
        by: Option<Visitor>,
        out: &Out,
    ) -> Result<(), Ended> {
        check_protocol(request.protocol)?;
        let by = by.as_ref().ok_or_else(unknown_caller)?;
        let hosted = self.may(by, Need::Reader, &request.job, request.shard).await?;
        let shard = hosted.shard.id();
        if request.founding != 0 && request.founding != hosted.founding {
            return Err(RefusalKind::OtherFounding(shard).into());
        }
        let dtype = type_of(&request.dtype)?;
        let conf = hosted.shard.configured();
        let conf = conf.ok_or_else(|| RefusalKind::Unavailable(format!("{shard} has no job yet")))?;
        if conf.job.all_reduce {
            let why = "the weights of an all-reduce job are with its ranks and not on the servers";
            return Err(RefusalKind::BadOrder(why.into()).into());
        }
        let only = convert::only(&hosted.shard, &request.only).map_err(|refusal| refusal.kind)?;
        let reader = self.readers.reader(&by.rights().to_string())?;
        by.is(Rank::Reader);
        let wanted = match request.exactly {
            true => Wanted::Exactly(Step(request.step)),
            false => Wanted::AtLeast(Step(request.step)),
        };
        if request.confirm {
            let confirmed = hosted.group.barrier().await;
            confirmed.map_err(|e| RefusalKind::Unavailable(format!("{shard}'s newest version: {e}")))?;
        }
        let of = |step| news(&hosted, step);
        let first = |step| VersionOf { job: hosted.shard.read(|meta| meta.job.clone()), ..of(step) };
        let kept = match hosted.shard.version_for_reader(wanted) {
            Ok(kept) => kept,
            Err(refused) => {
                send(out, Kind::Of(first(request.step))).await?;
                return Err(refused.into());
            }
        };
        tokio::spawn(copy_once_reached(hosted.clone(), Arc::downgrade(&kept)));
        send(out, Kind::Of(first(kept.step().0))).await?;
        let buckets = reached(&hosted, &kept, out).await?;
        let ids: Vec<_> = only.iter().map(|place| conf.buckets[*place].id).collect();
        let asked = |bucket: &Arc<KeptBucket>| ids.is_empty() || ids.contains(&bucket.id);
        let base = request.have.and_then(|step| hosted.shard.base(Step(step), dtype));
        let mut pace = Pace::begin();
        let mut values = BTreeMap::new();
        for bucket in buckets.into_iter().filter(asked) {
            let (bytes, own) = send_bucket(&hosted, &bucket, (dtype, base.as_ref()), &reader, out).await?;
            values.insert(bucket.id, own);
            pace.sent(bytes, shard, kept.step())?;
        }
        if request.remember
            && let Some(base) = hosted.shard.remember(kept.step(), dtype, values)
        {
            tokio::spawn(forget(hosted.clone(), Arc::downgrade(&base)));
        }
        send(out, Kind::Of(of(kept.step().0))).await
    }
}

/// The type of a version's values, by its name.
pub(super) fn type_of(name: &str) -> Result<Encoding, RefusalKind> {
    match name {
        "" | "f32" => Ok(Encoding::F32),
        "bf16" => Ok(Encoding::Bf16),
        "f16" => Ok(Encoding::F16),
        other => {
            let other: String = other.chars().take(20).collect();
            let why = format!("`{}` is no type of a version: f32, bf16 or f16", other.escape_debug());
            Err(RefusalKind::BadOrder(why))
        }
    }
}

/// How fast a reader takes its version.
pub(super) struct Pace {
    sent: u64,
    began: Instant,
}

impl Pace {
    pub(super) fn begin() -> Self {
        Self { sent: 0, began: Instant::now() }
    }

    /// It has taken so many bytes more.
    ///
    /// # Errors
    /// It is too slow.
    pub(super) fn sent(&mut self, bytes: u64, shard: ShardId, step: Step) -> Result<(), RefusalKind> {
        self.sent += bytes;
        if self.began.elapsed() <= GRACE + Duration::from_secs(self.sent / SLOWEST) {
            return Ok(());
        }
        let (sent, step, seconds) = (self.sent, step.0, self.began.elapsed().as_secs());
        Err(RefusalKind::Overloaded(format!(
            "version {step} of {shard} was taken too slowly: {sent} bytes in {seconds} s. Read it over a faster connection, \
             or in bf16"
        )))
    }
}

/// What a reader of version `step` hears of the shard, without the job.
fn news(hosted: &Replica, step: u64) -> VersionOf {
    VersionOf {
        job: String::new(),
        founding: hosted.founding,
        step,
        reached: hosted.shard.reached().0.0,
        shards: hosted.shard.shards(),
        over: hosted.shard.is_over(),
        pending: false,
    }
}

/// Copies a version as soon as it is reached, whether its readers take it or not: until then it shares memory with the shard,
/// and updates that replace much of that would wait.
async fn copy_once_reached(hosted: Replica, kept: Weak<KeptVersion>) {
    let mut applied = hosted.applied.clone();
    loop {
        applied.mark_unchanged();
        // Only its readers keep it.
        match kept.upgrade().map(|kept| kept.buckets()) {
            Some(Ok(Some(buckets))) => {
                let copies = move || buckets.iter().for_each(|bucket| drop(bucket.bytes()));
                let _ = tokio::task::spawn_blocking(copies).await;
                return;
            }
            Some(Ok(None)) => {}
            None | Some(Err(Passed)) => return,
        }
        tokio::select! {
            changed = applied.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
        }
    }
}

/// Waits until the replica has reached the version.
async fn reached(
    hosted: &Replica,
    kept: &Arc<KeptVersion>,
    out: &Out,
) -> Result<Vec<Arc<KeptBucket>>, Ended> {
    let (mut applied, mut told, mut told_end) = (hosted.applied.clone(), Instant::now(), false);
    loop {
        applied.mark_unchanged();
        hosted.shard.take_if_unchanged(kept);
        match kept.buckets() {
            Ok(Some(buckets)) => return Ok(buckets),
            Ok(None) => {}
            Err(Passed) => {
                let (shard, (reached, _)) = (hosted.shard.id(), hosted.shard.reached());
                return Err(RefusalKind::NoVersion { shard, step: kept.step(), reached }.into());
            }
        }
        // At the end the servers may go soon.
        let ends = !told_end && hosted.shard.is_over();
        if told.elapsed() >= NEWS_INTERVAL || ends {
            told_end |= ends;
            send(out, Kind::Of(news(hosted, kept.step().0))).await?;
            told = Instant::now();
        }
        tokio::select! {
            changed = applied.changed() => changed.map_err(|_| {
                RefusalKind::Unavailable(format!("this replica of {} has ended", hosted.shard.id()))
            })?,
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
            () = out.closed() => return Err(Ended::Gone),
        }
    }
}

async fn send_bucket(
    hosted: &Replica,
    bucket: &Arc<KeptBucket>,
    (dtype, base): (Encoding, Option<&Arc<Base>>),
    reader: &Reader,
    out: &Out,
) -> Result<(u64, Bytes), Ended> {
    let _room = tokio::select! {
        room = reader.room(bucket.bytes().len()) => room,
        () = out.closed() => return Err(Ended::Gone),
    };
    let (own, base) = (bucket.clone(), base.cloned());
    let made = tokio::task::spawn_blocking(move || {
        let encoded = own.encoded(dtype);
        let (code, payload) =
            match base.as_ref().and_then(|base| Some((base.step, base.buckets.get(&own.id)?))) {
                Some((step, old)) => encoded.difference(step, old),
                None => (Code::Whole, encoded.values.clone()),
            };
        (encoded, code, payload)
    });
    let (encoded, code, payload) = made.await.map_err(|_| Ended::Gone)?;
    hosted.counters.bytes_pulled.fetch_add(payload.len() as u64, Relaxed);
    let sent = payload.len() as u64;
    let (version, digest, code) = (bucket.version.0, encoded.digest, code.number());
    send(out, Kind::Piece(VersionPiece { bucket: bucket.id.0, version, digest, payload, code })).await?;
    Ok((sent, encoded.values.clone()))
}

/// Forgets a version once no reader has named it for a while.
async fn forget(hosted: Replica, base: Weak<Base>) {
    let mut left = BASE_TIME;
    loop {
        tokio::time::sleep(left).await;
        let Some(base) = base.upgrade() else { return };
        match hosted.shard.forget_base(&base) {
            Some(more) => left = more,
            None => return,
        }
    }
}
