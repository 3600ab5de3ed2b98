//! Rows of a table on one shard: readers get them from any server with a replica, an operator changes them at the leader.

use crate::connect::{Transport, channel, shards};
use bytes::Bytes;
use paraft_common::{TableSpec, config::ServerJob};
use paraft_proto::{EditRowsRequest, ReadRowsRequest, Refused, RowsMessage, rows_message::Kind};
use std::time::Duration;
use tonic::Streaming;

/// A server that sends nothing for so long is given up.
const SILENCE: Duration = Duration::from_secs(10);

/// A part of a reply, in this order for each partition.
#[derive(Clone, Debug, PartialEq)]
pub enum RowsPart {
    /// A partition begins.
    Begin {
        /// Its number in the table.
        partition: u32,
        /// The version of its rows.
        version: u64,
    },
    /// Whole rows of [`TableSpec::row_bytes`] each, as a server keeps them.
    Rows(Bytes),
    /// Ids whose rows were removed since the version that the request names, and are none now.
    Removed(Vec<u64>),
}

/// A reply with rows.
#[derive(Debug)]
pub struct RowsReply {
    /// The table.
    pub table: TableSpec,
    /// The founding of the shard's state, whose versions these are.
    pub founding: u64,
    /// The table's partitions on this shard, rising.
    pub partitions: Vec<u32>,
    stream: Streaming<RowsMessage>,
    /// In a partition: rows and removed ids so far.
    open: Option<(u64, u64)>,
}

fn broken(what: &str) -> Refused {
    Refused::unheard(format!("the server's reply is out of order: {what}"))
}

/// Asks a server for rows.
///
/// # Errors
/// The server refuses, or does not answer.
pub async fn read_rows(address: &str, request: ReadRowsRequest) -> Result<RowsReply, Refused> {
    let name = request.table.clone();
    let asks = async {
        let channel = channel(address, Transport::Auto).await.map_err(Refused::unheard)?;
        let reply = shards(channel).read_rows(request).await;
        let mut stream = reply.map_err(|s| crate::orders::refused(address, &s))?.into_inner();
        match next(&mut stream).await? {
            Some(Kind::Of(of)) => {
                let job = ServerJob::from_toml(&of.job).map_err(|e| Refused::unheard(e.to_string()))?;
                let table = job.tables.into_iter().find(|table| table.name == name);
                let table = table.ok_or_else(|| broken("another job"))?;
                Ok(RowsReply { table, founding: of.founding, partitions: of.partitions, stream, open: None })
            }
            Some(Kind::Refused(refused)) => Err(refused),
            _ => Err(broken("it does not begin")),
        }
    };
    let late = |_| Err(Refused::unheard(format!("no answer within {SILENCE:?}")));
    tokio::time::timeout(SILENCE, asks).await.unwrap_or_else(late)
}

async fn next(stream: &mut Streaming<RowsMessage>) -> Result<Option<Kind>, Refused> {
    let message = tokio::time::timeout(SILENCE, stream.message()).await;
    let message = message.map_err(|_| Refused::unheard(format!("silent for {SILENCE:?}")))?;
    let message = message.map_err(|s| Refused::unheard(format!("the reply broke off: {}", s.message())))?;
    Ok(message.and_then(|message| message.kind))
}

impl RowsReply {
    /// The next part; `None` behind the last.
    ///
    /// # Errors
    /// The server refuses to continue, or the reply breaks off.
    pub async fn next(&mut self) -> Result<Option<RowsPart>, Refused> {
        loop {
            let part = match (next(&mut self.stream).await?, &mut self.open) {
                (None, None) => return Ok(None),
                (Some(Kind::Partition(begin)), None) => {
                    self.open = Some((0, 0));
                    RowsPart::Begin { partition: begin.partition, version: begin.version }
                }
                (Some(Kind::Rows(rows)), Some((count, _))) => {
                    let row = self.table.row_bytes();
                    if !(rows.len() as u64).is_multiple_of(row) {
                        return Err(broken("a row is cut"));
                    }
                    *count += rows.len() as u64 / row;
                    RowsPart::Rows(rows)
                }
                (Some(Kind::Removed(ids)), Some((_, count))) => {
                    let (ids, rest) = ids.as_chunks::<8>();
                    if !rest.is_empty() {
                        return Err(broken("an id is cut"));
                    }
                    *count += ids.len() as u64;
                    RowsPart::Removed(ids.iter().map(|id| u64::from_le_bytes(*id)).collect())
                }
                (Some(Kind::End(end)), Some(sent)) => {
                    if *sent != (end.rows, end.removed) {
                        return Err(broken("rows are missing"));
                    }
                    self.open = None;
                    continue;
                }
                (Some(Kind::Refused(refused)), _) => return Err(refused),
                _ => return Err(broken("a part is out of place")),
            };
            return Ok(Some(part));
        }
    }
}

/// Changes rows at the leader of a shard; returns how many were removed or written. Repeat it with the same token.
///
/// # Errors
/// The server refuses, or does not answer.
pub async fn edit_rows(address: &str, request: EditRowsRequest, within: Duration) -> Result<u64, Refused> {
    let asking = async |channel| {
        let reply = shards(channel).edit_rows(request.clone()).await?.into_inner();
        Ok(reply.refused.map_or(Ok(reply.rows), Err))
    };
    crate::orders::asked(address, within, asking).await
}
