//! For `fuzz/`: what a peer's bytes are read as.

use super::{
    records::entry_of,
    replicated::Change,
    types::{Entry, LogId, SnapshotMeta, Types, Vote},
    wire::{self, SnapshotAnswer, SnapshotPiece},
};
use crate::shard::Command;
use bytes::Bytes;
use openraft::{
    EntryPayload,
    raft::{
        AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, VoteRequest,
        VoteResponse,
    },
    type_config::alias::CommittedLeaderIdOf,
};
use paraft_common::Payload;
use paraft_store::Record;
use serde::{Serialize, de::DeserializeOwned};

/// Reads `bytes` as everything that is ever decoded of a peer or of a replica's folder. What can be read must be
/// written back as it came.
///
/// # Panics
/// When it is not.
pub fn read_as_anything(bytes: &[u8], payloads: &[Payload]) {
    if let Some(mut request) = back::<AppendEntriesRequest<Types>>(bytes) {
        let attached = wire::attach(&mut request, payloads.to_vec());
        assert!(attached.is_err() || wire::payloads(&request.entries) == payloads);
    }
    back::<AppendEntriesResponse<Types>>(bytes);
    back::<VoteRequest<Types>>(bytes);
    back::<VoteResponse<Types>>(bytes);
    back::<TransferLeaderRequest<Types>>(bytes);
    back::<(Vote, SnapshotPiece)>(bytes);
    back::<SnapshotAnswer>(bytes);
    back::<SnapshotResponse<Types>>(bytes);
    // A snapshot's first piece, and the head of its file.
    back::<(SnapshotMeta, Vec<u8>, Vec<u32>)>(bytes);
    back::<(SnapshotMeta, Vec<u8>)>(bytes);
    back::<Vote>(bytes);
    back::<LogId>(bytes);
    if let Some(entry) = back::<Entry>(bytes) {
        let payload = payloads.first().cloned().unwrap_or_default();
        let header = bytes.to_vec().into();
        let read = entry_of(Record { index: entry.log_id.index, header, payload });
        assert!(read.is_ok(), "an entry that was just read");
    }
}

/// The change that a record of a log with this header holds.
pub fn change_of(header: &[u8]) -> Option<Change> {
    match wire::decode::<Entry>(header).ok()?.payload {
        EntryPayload::Normal(change) => Some(change),
        EntryPayload::Blank | EntryPayload::Membership(_) => None,
    }
}

/// The header of a record that holds this change: entry `index` of term 1.
///
/// # Panics
/// Never: every change can be written.
pub fn header_of(index: u64, change: Change) -> Bytes {
    let log_id = LogId::new(CommittedLeaderIdOf::<Types>::new(1), index);
    wire::encode(&Entry { log_id, payload: EntryPayload::Normal(change) }).expect("a change can be written")
}

/// What a snapshot of log index `index` says before its parts, in its file.
///
/// # Panics
/// Never, as above.
pub fn snapshot_head(index: u64, head: &[u8]) -> Bytes {
    let last_log_id = Some(LogId::new(CommittedLeaderIdOf::<Types>::new(1), index));
    wire::encode(&(SnapshotMeta { last_log_id, ..SnapshotMeta::default() }, head)).expect("likewise")
}

/// An index of the log as a purge point's tag has it.
///
/// # Panics
/// Never, as above.
pub fn purge_tag(index: u64) -> Bytes {
    wire::encode(&LogId::new(CommittedLeaderIdOf::<Types>::new(1), index)).expect("likewise")
}

/// An append of two entries.
///
/// # Panics
/// Never, as above.
pub fn append() -> Bytes {
    let entry = |index| wire::decode(&header_of(index, Change::Shard(Command::Fence.into())));
    let entries = [7, 8].map(|i| entry(i).expect("it was just written")).into();
    let vote = Vote::new_committed(3, 1);
    let prev_log_id = Some(LogId::new(CommittedLeaderIdOf::<Types>::new(1), 6));
    let request = AppendEntriesRequest::<Types> { vote, prev_log_id, entries, leader_commit: None };
    wire::encode(&request).expect("likewise")
}

fn back<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let value: T = wire::decode(bytes).ok()?;
    // Maps and sets put their keys in order: what is written is read again to the same bytes.
    let written = wire::encode(&value).expect("what was read can be written");
    let again: T = wire::decode(&written).expect("what was written can be read");
    assert_eq!(wire::encode(&again).expect("likewise"), written);
    Some(value)
}
