//! A replica's answers to its peers: their calls, and the pieces of a snapshot that it receives.

use super::{
    group::Group,
    image::RawImage,
    incoming::Incoming,
    types::{Snapshot, SnapshotMeta, Types, Vote},
    wire::{self, SnapshotAnswer, SnapshotPiece, WireError},
};
use bytes::Bytes;
use openraft::{
    async_runtime::WatchReceiver,
    raft::{TransferLeaderRequest, VoteRequest},
};
use paraft_changes::ReplicaId;
use paraft_common::Payload;
use paraft_proto::{PeerCall, PeerRequest, WithBulk};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, Instant},
};

/// A partly received snapshot is dropped when its sender is silent for this long.
const SENDER_TIMEOUT: Duration = Duration::from_secs(30);

/// Bound on the term increase of one message. Elections raise a term by one, and no group ever has this many. A
/// larger increase would leave no higher terms for later leaders.
pub const MAX_TERM_JUMP: u64 = 1 << 32;

impl Group {
    /// Drops a partly received snapshot that will not complete: its sender is silent, or the log already contains
    /// its entries. Returns whether there is one that may complete.
    pub(super) async fn drop_stale_snapshot(&self) -> bool {
        let applied = self.applied_index();
        let mut slot = self.incoming.lock().await;
        let stale = slot.as_ref().is_some_and(|i| {
            let overtaken = i.meta.last_log_id.as_ref().is_some_and(|l| l.index <= applied);
            overtaken || i.last.elapsed() > SENDER_TIMEOUT
        });
        if stale {
            tracing::info!(group = %self.name, "a partly received snapshot is dropped");
            *slot = None;
        }
        slot.is_some()
    }

    /// Refuses a message that would move the term out of reach.
    pub(super) fn bounded(&self, vote: &Vote) -> Result<(), WireError> {
        let own = self.raft.server_metrics().borrow_watched().vote.leader_id().term;
        match vote.leader_id().term {
            theirs if theirs > own.saturating_add(MAX_TERM_JUMP) => Err(WireError::new(format!(
                "its term is {theirs}, that of {} is {own}: no election leads so far",
                self.name
            ))),
            _ => Ok(()),
        }
    }

    /// Answers a peer's call with the bytes of the reply.
    pub async fn answer(&self, request: WithBulk<PeerRequest>) -> Result<Bytes, WireError> {
        let WithBulk { message: request, bulk } = request;
        let to = ReplicaId(request.to);
        // The server answers for its earlier incarnations, including whether they have ended.
        let in_place = request.call() == PeerCall::Ended && to.server() == self.me.server();
        if to != self.me && !in_place {
            return Err(WireError::new(format!(
                "{to} is not here any more ({} is): it has lost its log",
                self.me
            )));
        }
        // Most messages wake the replica, after the answer: their news of the leader must count before the election
        // timer does.
        let mut wakes = true;
        let answer = match request.call() {
            PeerCall::Append => {
                let (rpc, arrival) = self.append_of(WithBulk { message: request, bulk })?;
                wakes = arrival.wakes;
                let answer = self.raft.append_entries(rpc).await;
                if let Ok(answer) = &answer {
                    self.appended(&arrival, answer);
                }
                reply(answer)
            }
            PeerCall::Vote => {
                let rpc: VoteRequest<Types> = wire::decode(&request.header)?;
                self.bounded(&rpc.vote)?;
                reply(self.raft.vote(rpc).await)
            }
            PeerCall::PreVote => {
                let rpc: VoteRequest<Types> = wire::decode(&request.header)?;
                self.bounded(&rpc.vote)?;
                reply(self.raft.pre_vote(rpc).await)
            }
            PeerCall::TransferLeader => {
                let rpc: TransferLeaderRequest<Types> = wire::decode(&request.header)?;
                self.bounded(rpc.from_leader())?;
                if *rpc.to_node_id() == self.me.0 && !self.stands.load(Relaxed) {
                    return Err(WireError::new(format!("{} cannot lead {} at present", self.me, self.name)));
                }
                self.ticks.lease_dropped(*rpc.from_leader());
                reply(self.raft.handle_transfer_leader(rpc).await)
            }
            PeerCall::Snapshot => self.snapshot_piece(&request.header, bulk).await,
            PeerCall::Sleep => {
                wakes = false;
                self.answer_sleep(&request.header)
            }
            PeerCall::Wake => self.answer_wake(),
            PeerCall::Ended => {
                wakes = false; // unless the leader has ended
                self.answer_ended(to, &request.header).await
            }
            PeerCall::Unspecified => Err(WireError::new("a call of no kind")),
        };
        if wakes && self.is_asleep() {
            self.wake();
        }
        answer
    }

    async fn snapshot_piece(&self, header: &[u8], bulk: Vec<Payload>) -> Result<Bytes, WireError> {
        let (vote, piece): (Vote, SnapshotPiece) = wire::decode(header)?;
        self.bounded(&vote)?;
        // A former leader would fill the memory with a snapshot that is not installed in the end.
        if self.raft.server_metrics().borrow_watched().vote > vote {
            return Err(WireError::new(format!("a snapshot of {} from an earlier term", self.name)));
        }
        let payload = bulk.into_iter().next().unwrap_or_default();
        if wire::checksum(&payload) != piece.crc {
            return Err(WireError::new(format!(
                "piece {} of a snapshot of {} is damaged",
                piece.index, self.name
            )));
        }
        let mut slot = self.incoming.lock().await;
        // The sender retries. A second snapshot would be received into memory that this one still occupies.
        if self.installing.load(SeqCst) {
            return Err(WireError::new(format!("a snapshot of {} is being installed", self.name)));
        }
        let known = slot.as_ref().is_some_and(|i| i.image == piece.image);
        if !known {
            if piece.index > 0 {
                return wire::encode(&SnapshotAnswer::Next(0));
            }
            let (meta, head): (SnapshotMeta, Vec<u8>) = wire::decode(&payload.to_bytes())?;
            // Without room it would be received in vain.
            self.state.room_for(&head).map_err(WireError::new)?;
            let (image, parts) = (piece.image, Vec::new());
            *slot = Some(Incoming { last: Instant::now(), image, meta, head, parts });
            self.begun.notify_one();
        }
        let Some(incoming) = slot.as_mut() else { return Err(WireError::new("no snapshot is under way")) };
        incoming.last = Instant::now();
        if piece.index == incoming.parts.len() as u64 + 1 {
            incoming.parts.push(payload);
        }
        // Otherwise it is a duplicate or a gap: the answer names the next piece.
        let received = incoming.parts.len() as u64;
        if !(piece.last && piece.index == received) {
            return wire::encode(&SnapshotAnswer::Next(received + 1));
        }
        let Some(done) = slot.take() else { return Err(WireError::new("no snapshot is under way")) };
        let _installing = InstallingGuard::of(&self.installing);
        // Installing takes as long as the disk and the state need; the group's maintenance must not wait for it.
        drop(slot);
        let image =
            RawImage { head: done.head.into(), parts: done.parts.into_iter().map(Into::into).collect() };
        let snapshot = Snapshot { meta: done.meta, snapshot: image };
        let installed = self.raft.install_full_snapshot(vote, snapshot).await;
        reply(installed.map(|response| SnapshotAnswer::Done(response.vote)))
    }
}

/// A snapshot is being installed until this is dropped.
struct InstallingGuard(Arc<AtomicBool>);

impl InstallingGuard {
    fn of(flag: &Arc<AtomicBool>) -> Self {
        flag.store(true, SeqCst);
        Self(flag.clone())
    }
}

impl Drop for InstallingGuard {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

fn reply<T: serde::Serialize, E: fmt::Display>(result: Result<T, E>) -> Result<Bytes, WireError> {
    wire::encode(&result.map_err(WireError::new)?)
}
