//! Valid Raft messages of a sender that is not a member, which must be refused. For `paraft verify ledger` and the
//! tests; no server sends them.

use super::{
    types::{Committed, LogId, SnapshotMeta, Types, Vote},
    wire::{self, SnapshotPiece},
};
use bytes::Bytes;
use openraft::raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest};
use paraft_changes::ReplicaId;
use paraft_common::Payload;
use paraft_proto::PeerCall;

/// One message of each kind, in this term, of a group: the header, and the payloads.
pub fn forged(term: u64, from: ReplicaId) -> Vec<(PeerCall, Bytes, Vec<Payload>)> {
    let last = Some(LogId::new(Committed::new(term), u64::MAX >> 8));
    let (candidate, leader) = (Vote::new(term, from.0), Vote::new_committed(term, from.0));
    // As if the leader had asked for it, so that a lease does not block the vote.
    let ask = VoteRequest::<Types> { vote: candidate, last_log_id: last, leadership_transfer: true };
    let append = AppendEntriesRequest::<Types> {
        vote: leader,
        prev_log_id: None,
        entries: Vec::new(),
        leader_commit: last,
    };
    let head = wire::encode(&(SnapshotMeta { last_log_id: last, ..SnapshotMeta::default() }, &[0u8; 8][..]));
    let payload: Payload = head.unwrap_or_default().to_vec().into();
    let piece = SnapshotPiece { image: term, index: 0, last: true, crc: wire::checksum(&payload) };
    let transfer = TransferLeaderRequest::<Types>::new(leader, from.0, last);
    [
        (PeerCall::Vote, wire::encode(&ask), Vec::new()),
        (PeerCall::PreVote, wire::encode(&ask), Vec::new()),
        (PeerCall::Append, wire::encode(&append), Vec::new()),
        (PeerCall::Snapshot, wire::encode(&(leader, piece)), vec![payload]),
        (PeerCall::TransferLeader, wire::encode(&transfer), Vec::new()),
    ]
    .into_iter()
    .filter_map(|(call, header, bulk)| Some((call, header.ok()?, bulk)))
    .collect()
}
