//! Guarantees of the store, one file each.
#![allow(clippy::unwrap_used)]

mod crash;
mod damage;
mod failing;
mod files;
mod ordinary;
mod reading;
mod torn;

use bytes::Bytes;
use paraft_store::{Disk, Log, LogOptions, Record, SharedLog, StoreError};
use std::{
    io,
    path::Path,
    sync::{Arc, mpsc},
};

pub(crate) const DIR: &str = "/server/log";
pub(crate) const SMALL: LogOptions = LogOptions { segment_bytes: 4096, sync: true };
/// Bytes of a segment before its table (the first segment's is empty), of the table of a log with one group that
/// was never purged, and of a record before its header.
pub(crate) const PREFIX: usize = 44;
pub(crate) const TABLE: usize = 48;
pub(crate) const HEAD: usize = 60;
/// The group of logs that have only one.
pub(crate) const KEY: u64 = 7;

/// A record whose bytes depend on its index and on `version`, which distinguishes two writes of an index.
pub(crate) fn record(index: u64, version: u8, payload_bytes: usize) -> Record {
    let header = Bytes::from(format!("entry {index}.{version}"));
    let payload: Bytes =
        (0..payload_bytes).map(|i| (i as u8).wrapping_mul(31) ^ version ^ index as u8).collect();
    // As from the network: in pieces of any length. It is read back in one piece.
    let cut = payload_bytes / 3;
    let payload = [payload.slice(..cut), payload.slice(cut..)].into_iter().collect();
    Record { index, header, payload }
}

/// The recovered content of a log.
#[derive(Debug)]
pub(crate) struct RecoveredLog {
    pub records: Vec<Record>,
    pub purged: Option<(u64, Bytes)>,
    pub torn_bytes: u64,
}

pub(crate) fn open_in(
    disk: &dyn Cloned,
    dir: &Path,
    options: LogOptions,
) -> Result<(Log, RecoveredLog), StoreError> {
    let (shared, torn_bytes) = SharedLog::open(disk.shared(), dir, options)?;
    let (log, found) = group(&shared, KEY)?;
    Ok((log, RecoveredLog { torn_bytes, ..found }))
}

/// Opens the log of one group.
pub(crate) fn group(shared: &SharedLog, key: u64) -> Result<(Log, RecoveredLog), StoreError> {
    let mut records = Vec::new();
    let (log, found) = shared.group(key, &mut |r| records.push(r))?;
    assert_eq!(found.records, records.len() as u64);
    // Everything that was recovered can be read back.
    let range = records.first().map_or(0, |r| r.index)..u64::MAX;
    assert_eq!(log.read(range, u64::MAX)?, records);
    Ok((log, RecoveredLog { records, purged: found.purged, torn_bytes: 0 }))
}

pub(crate) fn open(disk: &dyn Cloned) -> Result<(Log, RecoveredLog), StoreError> {
    open_in(disk, Path::new(DIR), SMALL)
}

/// Disks whose clones share their content.
pub(crate) trait Cloned {
    fn shared(&self) -> Arc<dyn Disk>;
}

impl<D: Disk + Clone + 'static> Cloned for D {
    fn shared(&self) -> Arc<dyn Disk> {
        Arc::new(self.clone())
    }
}

/// Appends and waits for completion.
pub(crate) fn append(log: &Log, records: Vec<Record>) -> io::Result<()> {
    let (send, outcome) = mpsc::channel();
    log.append(records, Box::new(move |done| send.send(done).unwrap()));
    outcome.recv().unwrap()
}

pub(crate) fn segment(first: u64) -> std::path::PathBuf {
    Path::new(DIR).join(format!("{first:016}.log"))
}
