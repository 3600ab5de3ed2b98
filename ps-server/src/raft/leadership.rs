//! Who leads a group, and who of it is behind: what a replica's metrics say.

use super::{
    machine::Raft,
    replica::{GroupName, ReplicaId},
    replicated::Logged,
};
use openraft::{ServerState, async_runtime::WatchReceiver, errors::Fatal};
use paraft_common::ServerId;
use std::collections::BTreeSet;
use tokio::sync::watch;

/// Who leads a group, as this replica knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    /// The Raft term.
    pub term: u64,
    /// The leader's server, if one is known.
    pub leader: Option<ServerId>,
    /// It is this replica.
    pub leads: bool,
    /// leader, follower, candidate or learner.
    pub role: Role,
}

/// A replica's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Role {
    Leader,
    Follower,
    Candidate,
    #[default]
    Learner,
    /// Its storage failed, or it was told to stop.
    Stopped,
}

impl Role {
    /// The word in status and metrics.
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

/// Who lacks so few entries has caught up: they are on their way.
const NEARLY: u64 = 64;

/// Those who lack more than a few of the entries that are applied here, or anything of what was there when the membership
/// was last changed (when they were taken in, say); who was never reached lacks it. Nobody, where this replica does not
/// lead. Both indices are of the same moment: reports of two servers are not, and under load that alone is many entries.
pub(super) fn behind<C: Logged>(raft: &Raft<C>) -> BTreeSet<ReplicaId> {
    let metrics = raft.metrics();
    let m = metrics.borrow_watched();
    let applied = m.last_applied.as_ref().map_or(0, |l| l.index);
    let since = m.membership_config.log_id().as_ref().map_or(0, |l| l.index);
    let all = m.replication.iter().flatten();
    let has = |matched: &u64| matched + NEARLY >= applied && *matched >= since;
    let behind = all.filter(|(_, matched)| !matched.as_ref().map(|l| l.index).is_some_and(|l| has(&l)));
    behind.map(|(id, _)| ReplicaId(*id)).collect()
}

pub(super) fn watch_leadership<C: Logged>(raft: &Raft<C>, group: GroupName) -> watch::Receiver<Leadership> {
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
