//! Rows of a job's tables, for people: read from any replicas, changed at the shards' leaders.

use crate::{
    failure::Failure,
    orders::{self, ORDER_TIMEOUT},
};
use paraft_client::{RowsPart, RowsReply};
use paraft_common::TableSpec;
use paraft_proto::{EditRowsRequest, PROTOCOL, ReadRowsRequest, Refused};
use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

/// The timeout of one attempt of an edit.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(6);
/// Before all replicas of a shard are tried again.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// A table of a job on a fleet.
#[derive(Clone, Copy, Debug)]
pub struct TableAt<'a> {
    /// Some of the fleet's servers.
    pub servers: &'a [String],
    /// The job's name.
    pub job: &'a str,
    /// The table's name.
    pub table: &'a str,
}

/// What is read of a shard.
#[derive(Clone, Debug)]
pub struct ShardRows {
    /// The table.
    pub table: TableSpec,
    /// The founding of the shard's state, whose versions these are.
    pub founding: u64,
    /// The table's partitions on the shard, rising.
    pub partitions: Vec<u32>,
    /// The version of each partition that was sent.
    pub versions: BTreeMap<u32, u64>,
}

/// Takes what one shard sends.
pub trait Takes {
    /// The shard is read from its beginning: what came of it before is void.
    ///
    /// # Errors
    /// Reading ends with it.
    fn begin(&mut self) -> Result<(), Failure>;

    /// Whole rows as servers keep them, one after another.
    ///
    /// # Errors
    /// Reading ends with it.
    fn rows(&mut self, table: &TableSpec, rows: &[u8]) -> Result<(), Failure>;

    /// Ids whose rows were removed since the requested versions.
    ///
    /// # Errors
    /// Reading ends with it.
    fn removed(&mut self, ids: &[u64]) -> Result<(), Failure>;
}

/// Takes nothing.
impl Takes for () {
    fn begin(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn rows(&mut self, _: &TableSpec, _: &[u8]) -> Result<(), Failure> {
        Ok(())
    }

    fn removed(&mut self, _: &[u64]) -> Result<(), Failure> {
        Ok(())
    }
}

enum Ended {
    /// By this server; another one may do.
    Refused(Refused),
    Failed(Failure),
}

impl TableAt<'_> {
    /// The shards of the job.
    ///
    /// # Errors
    /// No server answers, or the fleet has no such job.
    pub fn shards(&self) -> Result<Vec<u32>, Failure> {
        let seen = orders::block_on(orders::seen(&mut self.servers.to_vec(), self.job))?;
        if seen.answers == 0 {
            let why = format!("no server answered at {}", self.servers.join(", "));
            return Err(Refused::unheard(why).into());
        }
        Ok(seen.shards.into_iter().collect())
    }

    /// Reads a shard from whichever replica sends it: these rows, or all, or those that have changed since a version.
    ///
    /// # Errors
    /// The fleet has no such job or table; no replica sends the shard in time; or `into` fails.
    pub fn read(
        &self,
        shard: u32,
        ids: &[u64],
        since: &HashMap<u32, u64>,
        into: &mut dyn Takes,
    ) -> Result<ShardRows, Failure> {
        let request = ReadRowsRequest {
            protocol: PROTOCOL,
            shard,
            job: self.job.into(),
            table: self.table.into(),
            ids: ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>().into(),
            since: since.clone(),
        };
        let mut failed = None;
        let read = orders::block_on(async {
            let (deadline, mut known) = (Instant::now() + ORDER_TIMEOUT, self.servers.to_vec());
            loop {
                let seen = orders::seen(&mut known, self.job).await?;
                let mut last = Refused::unheard(format!("no server has shard {shard} of job `{}`", self.job));
                for address in seen.replicas.get(&shard).into_iter().flatten() {
                    match read_from(address, request.clone(), into).await {
                        Ok(rows) => return Ok(Some(rows)),
                        Err(Ended::Failed(why)) => {
                            failed = Some(why);
                            return Ok(None);
                        }
                        Err(Ended::Refused(refused)) if refused.is_final() => return Err(refused),
                        Err(Ended::Refused(refused)) => {
                            let message = format!("shard {shard} at {address}: {}", refused.message);
                            last = Refused { message, ..refused };
                        }
                    }
                }
                if Instant::now() >= deadline {
                    return Err(last);
                }
                tokio::time::sleep(RETRY_DELAY).await;
            }
        })?;
        read.ok_or_else(|| failed.unwrap_or_else(|| Refused::unheard("nothing was read").into()))
    }

    /// Removes rows of a partition, or writes some, exactly once; returns how many.
    ///
    /// # Errors
    /// The shard's leader refuses, or none answers in time: the edit may be done or not.
    pub fn edit(&self, shard: u32, partition: u32, put: bool, bytes: Vec<u8>) -> Result<u64, Failure> {
        let (remove, put) = if put { (Vec::new(), bytes) } else { (bytes, Vec::new()) };
        let request = EditRowsRequest {
            protocol: PROTOCOL,
            shard,
            job: self.job.into(),
            table: self.table.into(),
            partition,
            token: orders::token(),
            remove: remove.into(),
            put: put.into(),
        };
        let asks = async |address: String| {
            paraft_client::edit_rows(&address, request.clone(), ATTEMPT_TIMEOUT).await
        };
        let deadline = Instant::now() + ORDER_TIMEOUT;
        let asked = orders::at_leader(self.servers, self.job, shard, deadline, asks);
        Ok(orders::block_on(asked).map(|(rows, _)| rows)?)
    }
}

async fn read_from(
    address: &str,
    request: ReadRowsRequest,
    into: &mut dyn Takes,
) -> Result<ShardRows, Ended> {
    let reply = paraft_client::read_rows(address, request).await;
    let mut reply: RowsReply = reply.map_err(Ended::Refused)?;
    let (table, founding) = (reply.table.clone(), reply.founding);
    let partitions = std::mem::take(&mut reply.partitions);
    let mut rows = ShardRows { table, founding, partitions, versions: BTreeMap::new() };
    into.begin().map_err(Ended::Failed)?;
    while let Some(part) = reply.next().await.map_err(Ended::Refused)? {
        let taken = match part {
            RowsPart::Begin { partition, version } => {
                rows.versions.insert(partition, version);
                Ok(())
            }
            RowsPart::Rows(bytes) => into.rows(&rows.table, &bytes),
            RowsPart::Removed(ids) => into.removed(&ids),
        };
        taken.map_err(Ended::Failed)?;
    }
    Ok(rows)
}
