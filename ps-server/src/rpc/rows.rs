//! Rows of a table for readers, from any replica: some, all, or what has changed since a version; and changes of rows by
//! people.
//!
//! Partitions are read one after another, each as an image while updates continue. Rows that change before a reader has taken
//! them are kept for it, so a reader that is too slow is refused.

use super::{
    check_protocol,
    readers::{Ended, Reader},
    shards::{ShardsService, unknown_caller},
};
use crate::{
    connections::{Rank, Visitor},
    raft::LazyPart,
    replicas::Replica,
    shard::{
        bucket::Bucket,
        command::{Command, Proposal},
        leader::Event,
        partition::Partition,
    },
};
use futures::Stream;
use paraft_common::{
    Version,
    table::{ID_BYTES, MAX_PULLED_IDS, MAX_PUSH_BYTES, ROW_HEAD_WORDS, TableSpec},
};
use paraft_proto::{
    EditRowsReply, EditRowsRequest, ReadRowsRequest, RefusalKind, RowsBegin, RowsEnd, RowsMessage, RowsOf,
    rows_message::Kind,
};
use paraft_tls::Need;
use std::{pin::Pin, sync::atomic::Ordering::Relaxed};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::Status;

/// The stream that answers the call.
pub type RowsStream = Pin<Box<dyn Stream<Item = Result<RowsMessage, Status>> + Send>>;

/// Messages of a stream that wait for the transport.
const MAX_WAITING: usize = 1;
/// Of a partition's memory, what rows that are kept for readers may take: one part in so many, but [`ALWAYS_KEPT`].
const KEPT_DIVISOR: u64 = 8;
/// Bytes of rows that may be kept of any partition.
const ALWAYS_KEPT: u64 = 16 << 20;
/// Ids of removed rows in one message.
const REMOVED_IDS: usize = 1 << 15;

/// Where a stream's messages go; an error: the reader has gone.
struct Out(mpsc::Sender<RowsMessage>);

impl Out {
    async fn send(&self, kind: Kind) -> Result<(), Ended> {
        self.0.send(RowsMessage { kind: Some(kind) }).await.map_err(|_| Ended::Gone)
    }
}

impl ShardsService {
    pub(super) fn rows(&self, request: ReadRowsRequest, by: Option<Visitor>) -> RowsStream {
        let (tx, rx) = mpsc::channel(MAX_WAITING);
        let (service, out) = (self.clone(), Out(tx));
        tokio::spawn(async move {
            if let Err(Ended::Refused(kind)) = service.send_rows(request, by, &out).await {
                let _ = out.send(Kind::Refused(kind.into())).await;
            }
        });
        Box::pin(ReceiverStream::new(rx).map(Ok))
    }

    async fn send_rows(&self, request: ReadRowsRequest, by: Option<Visitor>, out: &Out) -> Result<(), Ended> {
        check_protocol(request.protocol)?;
        let by = by.as_ref().ok_or_else(unknown_caller)?;
        let hosted = self.may(by, Need::Reader, &request.job, request.shard).await?;
        let conf = hosted.shard.configured();
        let shard = hosted.shard.id();
        let conf = conf.ok_or_else(|| RefusalKind::Unavailable(format!("{shard} has no job yet")))?;
        let table = conf.job.tables.iter().position(|table| table.name == request.table);
        let table = table.ok_or_else(|| no_table(&conf.job.tables, &request.table))?;
        let ids = ids(&request)?;
        let reader = self.readers.reader(&by.rights().to_string())?;
        by.is(Rank::Reader);
        let job = hosted.shard.view(|_, meta| meta.job.clone());
        let places = (0..conf.buckets.len()).filter_map(|at| Some((at, conf.buckets[at].rows()?.place())));
        let places: Vec<_> = places.filter(|(_, (of, _))| usize::from(*of) == table).collect();
        let partitions = places.iter().map(|(_, (_, number))| *number).collect();
        out.send(Kind::Of(RowsOf { job, founding: hosted.founding, partitions })).await?;
        for (at, (_, number)) in places {
            let bucket = &conf.buckets[at];
            if ids.is_empty() {
                let since = request.since.get(&number).copied();
                send_partition(&hosted, bucket, since, &reader, out).await?;
            } else {
                send_some(&hosted, bucket, &ids, &reader, out).await?;
            }
        }
        Ok(())
    }
}

/// Answers a request to change rows; `hosted` is the requested replica, or why there is none here.
pub async fn edit(hosted: Result<Replica, RefusalKind>, request: EditRowsRequest) -> EditRowsReply {
    match edited(hosted, request).await {
        Ok(rows) => EditRowsReply { rows, refused: None },
        Err(kind) => EditRowsReply { refused: Some(kind.into()), ..EditRowsReply::default() },
    }
}

async fn edited(hosted: Result<Replica, RefusalKind>, request: EditRowsRequest) -> Result<u64, RefusalKind> {
    check_protocol(request.protocol)?;
    let Replica { leader, shard, .. } = hosted?;
    let conf = shard.configured();
    let conf = conf.ok_or_else(|| RefusalKind::Unavailable(format!("{} has no job yet", shard.id())))?;
    let tables = &conf.job.tables;
    let table = tables.iter().position(|table| table.name == request.table);
    let table = table.ok_or_else(|| no_table(tables, &request.table))?;
    let put = !request.put.is_empty();
    if put && !request.remove.is_empty() || request.token == 0 {
        let why = "an edit removes rows or writes some, and has a token";
        return Err(RefusalKind::BadOrder(why.into()));
    }
    let payload = if put { request.put } else { request.remove };
    if payload.len() > MAX_PUSH_BYTES {
        let why = format!("an edit of {} bytes; it has at most 1 MiB", payload.len());
        return Err(RefusalKind::BadOrder(why));
    }
    let place = (table as u16, request.partition);
    let bucket = conf.buckets.iter().find(|b| b.rows().is_some_and(|rows| rows.place() == place));
    let found = bucket.and_then(|bucket| Some((bucket.id, bucket.rows()?)));
    let (bucket, partition) = found.ok_or_else(|| {
        let (number, name) = (request.partition, &tables[table].name);
        RefusalKind::BadOrder(format!("{} has no partition {number} of table `{name}`", shard.id()))
    })?;
    partition.check_edit(put, &payload).map_err(RefusalKind::BadOrder)?;
    let command = Command::EditRows { bucket, token: request.token, put };
    let (tx, rx) = oneshot::channel();
    let stopping = |_| RefusalKind::Unavailable("the server is shutting down".into());
    let edit = Proposal { command, payload: payload.into() };
    leader.send(Event::EditRows(edit, tx)).await.map_err(stopping)?;
    // Without an answer it has stepped down; the edit may have taken effect or not.
    rx.await.unwrap_or_else(|_| {
        Err(RefusalKind::Unavailable("another server leads the shard now; ask again".into()))
    })
}

fn no_table(there: &[TableSpec], asked: &str) -> RefusalKind {
    let asked: String = asked.chars().take(100).collect();
    let names: Vec<_> = there.iter().map(|table| table.name.as_str()).collect();
    let there = if names.is_empty() { "none".into() } else { names.join(", ") };
    RefusalKind::BadOrder(format!("the job has no table `{}`; its tables: {there}", asked.escape_debug()))
}

fn ids(request: &ReadRowsRequest) -> Result<Vec<u64>, RefusalKind> {
    let (ids, rest) = request.ids.as_chunks::<ID_BYTES>();
    if !rest.is_empty() || ids.len() > MAX_PULLED_IDS {
        let why = format!(
            "{} bytes of ids: they are 8 bytes each, and at most {MAX_PULLED_IDS}",
            request.ids.len()
        );
        return Err(RefusalKind::BadOrder(why));
    }
    Ok(ids.iter().map(|id| u64::from_le_bytes(*id)).collect())
}

/// Sends these rows of a partition, of those that it has.
async fn send_some(
    hosted: &Replica,
    bucket: &Bucket,
    ids: &[u64],
    reader: &Reader,
    out: &Out,
) -> Result<(), Ended> {
    let Some(partition) = bucket.rows() else { return Ok(()) };
    let (spec, number) = (partition.spec(), partition.place().1);
    let here: Vec<u64> = ids.iter().copied().filter(|id| spec.partition_of(*id) == number).collect();
    let len = spec.row_bytes() as usize;
    let mut sent = 0;
    // Each message has one version; a partition's rows may come in several.
    for ids in here.chunks((1 << 20) / len) {
        let _room = reader.room(ids.len() * len).await;
        let Some((Version(version), rows)) = bucket.find_rows(ids) else { return Ok(()) };
        if sent == 0 {
            out.send(Kind::Partition(RowsBegin { partition: number, version })).await?;
        }
        sent += (rows.len() / len) as u64;
        hosted.counters.bytes_pulled.fetch_add(rows.len() as u64, Relaxed);
        out.send(Kind::Rows(rows.into())).await?;
    }
    if here.is_empty() { Ok(()) } else { out.send(Kind::End(RowsEnd { rows: sent, removed: 0 })).await }
}

/// Sends a partition: all of it, or what has changed since a version.
async fn send_partition(
    hosted: &Replica,
    bucket: &Bucket,
    since: Option<u64>,
    reader: &Reader,
    out: &Out,
) -> Result<(), Ended> {
    let (Some(partition), Some((Version(version), image))) = (bucket.rows(), bucket.image_rows()) else {
        return Ok(());
    };
    let number = partition.place().1;
    let removed = since.map_or(Some(Vec::new()), |since| image.removed_since(since));
    let removed = removed.ok_or_else(|| {
        RefusalKind::BadOrder(format!(
            "partition {number} of table `{}` no longer knows all rows that were removed since version {}: read all rows",
            partition.spec().name,
            since.unwrap_or_default(),
        ))
    })?;
    out.send(Kind::Partition(RowsBegin { partition: number, version })).await?;
    let mut sent = RowsEnd { rows: 0, removed: removed.len() as u64 };
    let len = partition.spec().row_bytes() as usize;
    for tile in image.into_tiles() {
        let _room = reader.room(tile.bytes()).await;
        let mut rows = tile.read();
        drop(tile);
        if let Some(since) = since {
            rows = changed(&rows, len, since).into();
        }
        if !rows.is_empty() {
            sent.rows += (rows.len() / len) as u64;
            hosted.counters.bytes_pulled.fetch_add(rows.len() as u64, Relaxed);
            out.send(Kind::Rows(rows)).await?;
        }
        check_kept(partition)?;
    }
    for ids in removed.chunks(REMOVED_IDS) {
        let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        out.send(Kind::Removed(ids.into())).await?;
    }
    out.send(Kind::End(sent)).await
}

/// The rows of a tile whose last update is after a version.
fn changed(rows: &[u8], len: usize, since: u64) -> Vec<u8> {
    let touched = |row: &[u8]| {
        let word = row[4 * (ROW_HEAD_WORDS - 1)..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
        // Versions go on beyond what a row's word holds.
        (word.wrapping_sub(since as u32) as i32) > 0
    };
    rows.chunks_exact(len).filter(|row| touched(row)).flatten().copied().collect()
}

fn check_kept(partition: &Partition) -> Result<(), RefusalKind> {
    let kept = partition.outdated().0;
    if kept <= (partition.bytes() / KEPT_DIVISOR).max(ALWAYS_KEPT) {
        return Ok(());
    }
    let (name, number) = (&partition.spec().name, partition.place().1);
    Err(RefusalKind::Overloaded(format!(
        "partition {number} of table `{name}` changes faster than it is read: {kept} bytes of older rows are kept"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_changed_since_a_version_are_those_touched_after_it() {
        let row = |touched: u32| [[0; 4], [0; 4], [0; 4], touched.to_le_bytes(), [7; 4]].concat();
        let tile = [row(3), row(4), row(5), row(u32::MAX)].concat();
        assert_eq!(changed(&tile, 20, 3), [row(4), row(5)].concat());
        assert!(changed(&tile, 20, 5).is_empty());
        let beyond = u64::from(u32::MAX) - 1;
        assert_eq!(changed(&tile, 20, beyond), tile, "versions 2^32 + 3 to 2^32 + 5 are after it");
    }
}
