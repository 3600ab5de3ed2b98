//! Entry points for `fuzz/`: the decoders of a peer's bytes.

use super::{
    records::entry_of,
    types::{Committed, Entry, LogId, SnapshotMeta, Types, Vote},
    wire::{self, SnapshotAnswer, SnapshotPiece},
};
use bytes::Bytes;
use openraft::{
    EntryPayload,
    raft::{
        AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, VoteRequest,
        VoteResponse,
    },
};
use paraft_changes::Change;
use paraft_common::Payload;
use paraft_store::Record;
use serde::{Serialize, de::DeserializeOwned};

/// Decodes `bytes` as every type that is ever read from a peer or a replica's folder. What decodes must encode to
/// the same bytes.
///
/// # Panics
/// If it does not.
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

/// The change in a log record with this header.
pub fn change_of(header: &[u8]) -> Option<Change> {
    match wire::decode::<Entry>(header).ok()?.payload {
        EntryPayload::Normal(change) => Some(change),
        EntryPayload::Blank | EntryPayload::Membership(_) => None,
    }
}

/// The header of a record with this change: entry `index` of term 1.
///
/// # Panics
/// Never: every change can be encoded.
pub fn header_of(index: u64, change: Change) -> Bytes {
    let log_id = LogId::new(Committed::new(1), index);
    wire::encode(&Entry { log_id, payload: EntryPayload::Normal(change) }).expect("a change can be written")
}

/// The head of a snapshot file of log index `index`.
///
/// # Panics
/// Never: a log index can be encoded.
pub fn snapshot_head(index: u64, head: &[u8]) -> Bytes {
    let last_log_id = Some(LogId::new(Committed::new(1), index));
    wire::encode(&(SnapshotMeta { last_log_id, ..SnapshotMeta::default() }, head))
        .expect("a log index can be written")
}

/// A log index as the tag of a purge point.
///
/// # Panics
/// Never: a log index can be encoded.
pub fn purge_tag(index: u64) -> Bytes {
    wire::encode(&LogId::new(Committed::new(1), index)).expect("a log index can be written")
}

/// An append with these changes.
///
/// # Panics
/// Never: a log index can be encoded.
pub fn append(changes: impl IntoIterator<Item = Change>) -> Bytes {
    let entry = |(index, change)| wire::decode::<Entry>(&header_of(index, change));
    let entries = (7..).zip(changes).map(|e| entry(e).expect("it was just written")).collect();
    let vote = Vote::new_committed(3, 1);
    let prev_log_id = Some(LogId::new(Committed::new(1), 6));
    let request = AppendEntriesRequest::<Types> { vote, prev_log_id, entries, leader_commit: None };
    wire::encode(&request).expect("a log index can be written")
}

fn back<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let value: T = wire::decode(bytes).ok()?;
    // Maps and sets encode their keys in order, so encoding again gives the same bytes.
    let written = wire::encode(&value).expect("what was read can be written");
    let again: T = wire::decode(&written).expect("what was written can be read");
    assert_eq!(wire::encode(&again).expect("a log index can be written"), written);
    Some(value)
}
