//! A replica's metrics: the leader of its group, and the members that are behind.

use super::{group_name::GroupName, machine::Raft};
use openraft::{ServerState, async_runtime::WatchReceiver, errors::Fatal};
use paraft_changes::ReplicaId;
use paraft_common::ServerId;
use std::collections::BTreeSet;
use tokio::sync::watch;

/// The leader of a group, to this replica's knowledge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    /// The Raft term.
    pub term: u64,
    /// The leader's server, if one is known.
    pub leader: Option<ServerId>,
    /// This replica leads.
    pub leads: bool,
    /// Leader, follower, candidate or learner.
    pub role: Role,
}

/// A replica's role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Role {
    Leader,
    Follower,
    Candidate,
    #[default]
    Learner,
    /// Its storage failed, or the server stopped it.
    Stopped,
}

impl Role {
    /// The name in status and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Role::Leader => "leader",
            Role::Follower => "follower",
            Role::Candidate => "candidate",
            Role::Learner => "learner",
            Role::Stopped => "stopped",
        }
    }
}

/// A member that lacks at most this many entries has caught up: they are in flight.
const CAUGHT_UP_ENTRIES: u64 = 64;

/// The members that lack more than a few of the entries applied here, or any entry from before the last change of
/// membership (when they were added, say); a member that was never reached lacks it. Empty if this replica does not
/// lead. Both indices are from one moment: reports of two servers are not, and under load that alone makes many
/// entries.
pub(super) fn behind(raft: &Raft) -> BTreeSet<ReplicaId> {
    let metrics = raft.metrics();
    let m = metrics.borrow_watched();
    let applied = m.last_applied.as_ref().map_or(0, |l| l.index);
    let since = m.membership_config.log_id().as_ref().map_or(0, |l| l.index);
    let all = m.replication.iter().flatten();
    let has = |matched: &u64| matched + CAUGHT_UP_ENTRIES >= applied && *matched >= since;
    let behind = all.filter(|(_, matched)| !matched.as_ref().map(|l| l.index).is_some_and(|l| has(&l)));
    behind.map(|(id, _)| ReplicaId(*id)).collect()
}

pub(super) fn watch_leadership(raft: &Raft, group: GroupName) -> watch::Receiver<Leadership> {
    let mut metrics = raft.server_metrics();
    let (tx, rx) = watch::channel(Leadership::default());
    let raft = raft.clone();
    tokio::spawn(async move {
        loop {
            let now = {
                let m = metrics.borrow_watched();
                let role = match m.state {
                    ServerState::Leader => Role::Leader,
                    ServerState::Candidate => Role::Candidate,
                    ServerState::Learner => Role::Learner,
                    ServerState::Follower => Role::Follower,
                    ServerState::Shutdown => Role::Stopped,
                };
                Leadership {
                    term: m.vote.leader_id().term,
                    leader: m.current_leader.map(|l| ReplicaId(l).server()),
                    leads: role == Role::Leader && m.current_leader == Some(m.id),
                    role,
                }
            };
            tx.send_if_modified(|old| std::mem::replace(old, now) != now);
            if now.role == Role::Stopped || metrics.changed().await.is_err() {
                match &raft.metrics().borrow_watched().running_state {
                    Ok(()) | Err(Fatal::Stopped) => tracing::info!(%group, "this replica has ended"),
                    Err(e) => tracing::error!(%group, error = %e, "this replica has stopped"),
                }
                let _ = tx.send(Leadership { role: Role::Stopped, ..Leadership::default() });
                return;
            }
        }
    });
    rx
}
