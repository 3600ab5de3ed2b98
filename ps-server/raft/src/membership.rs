//! The members of a group: adding and removing learners and voters, and transferring the leadership.

use super::{
    group::Group,
    leadership::{Role, behind},
    network::Addresses,
};
use openraft::{BasicNode, ChangeMembers, async_runtime::WatchReceiver};
use paraft_changes::ReplicaId;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

/// The voters and learners of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// Every member and its address.
    pub members: BTreeMap<ReplicaId, String>,
    /// The members that vote.
    pub voters: BTreeSet<ReplicaId>,
    /// A change is in progress: the membership is joint, or not committed yet.
    pub changing: bool,
    /// Its log index.
    pub index: u64,
}

/// Interval between two checks while there is something to look after. The leader finishes a joint membership that
/// two checks have seen.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Election timeouts that a transfer may take, including an election if it fails.
const TRANSFER_ELECTIONS: u32 = 4;

impl Group {
    /// The effective membership.
    pub fn membership(&self) -> Membership {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        let now = &m.membership_config;
        Membership {
            members: now.nodes().map(|(id, n)| (ReplicaId(*id), n.addr.clone())).collect(),
            voters: now.voter_ids().map(ReplicaId).collect(),
            changing: now.get_joint_config().len() > 1
                || now.log_id() != m.committed_membership_config.log_id(),
            index: now.log_id().as_ref().map_or(0, |l| l.index),
        }
    }

    /// If this replica leads: the members that lack at most a few entries.
    pub fn caught_up(&self) -> BTreeSet<ReplicaId> {
        let behind = behind(&self.raft);
        self.membership().members.into_keys().filter(|n| !behind.contains(n)).collect()
    }

    /// Adds a learner, or gives a member another address. Returns when the change is committed, not when the
    /// learner has caught up.
    pub async fn add_learner(&self, replica: ReplicaId, address: &str) -> Result<(), String> {
        self.wake_as_member().await?;
        let node = BasicNode::new(address);
        match self.membership().members.get(&replica) {
            None => {
                let added = self.raft.add_learner(replica.0, node, false).await;
                return added.map(drop).map_err(|e| e.to_string());
            }
            Some(at) if at == address => return Ok(()), // a repeated request
            Some(_) => {}
        }
        // It is a member under another address: the same replica with the same files on another host.
        tracing::info!(group = %self.name, %replica, address, "a member has a new address");
        let moved = ChangeMembers::SetNodes([(replica.0, node)].into());
        self.raft.change_membership(moved, true).await.map(drop).map_err(|e| e.to_string())
    }

    /// Changes the voters through joint consensus; the removed ones leave the group, and learners stay. A leader
    /// that would be removed transfers the leadership instead, and its successor makes the change on the next
    /// request. So the group always has a leader, whereas a leader that removes itself causes an election.
    pub async fn set_voters(&self, voters: &BTreeSet<ReplicaId>) -> Result<(), String> {
        self.wake_as_member().await?;
        if !voters.contains(&self.me)
            && let Some(to) = self.furthest(voters)
        {
            return self.transfer(to).await;
        }
        let voters: BTreeSet<u64> = voters.iter().map(|r| r.0).collect();
        self.raft.change_membership(voters, false).await.map(drop).map_err(|e| e.to_string())
    }

    /// Finishes interrupted changes of voters. Such a change goes through a joint membership, which another entry
    /// must follow. A leader that loses its lease between the two leaves the group there: nothing is lost, but no
    /// other change is possible. So the current leader finishes it.
    ///
    /// It also updates the addresses of members that have moved, and drops a partly received snapshot whose sender
    /// is silent. Without either it waits for a change of the membership or the leader.
    pub(super) async fn look_after(self, addresses: Addresses) {
        let mut leadership = self.leadership.clone();
        let mut metrics = self.raft.server_metrics();
        let mut seen: Option<(_, Instant)> = None;
        loop {
            let receives = self.drop_stale_snapshot().await;
            let (at, voters) = {
                let m = metrics.borrow_watched();
                let now = &m.membership_config;
                addresses.replace_all(now.nodes().map(|(id, n)| (*id, n.addr.clone())));
                let joint = now.get_joint_config();
                let half = joint.len() > 1 && now.log_id() == m.committed_membership_config.log_id();
                let leads = m.current_leader == Some(m.id);
                (*now.log_id(), joint.last().filter(|_| half && leads).cloned())
            };
            seen = voters.is_some().then(|| seen.filter(|(of, _)| *of == at).unwrap_or((at, Instant::now())));
            // Seen for a while: no leader is about to finish it.
            if let Some(voters) = voters
                && seen.is_some_and(|(_, since)| since.elapsed() >= CHECK_INTERVAL)
            {
                tracing::info!(group = %self.name, ?voters, "finishing an interrupted change of voters");
                if let Err(e) = self.raft.change_membership(voters, false).await {
                    tracing::debug!(group = %self.name, error = %e, "the change of voters is not finished yet");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL), if receives || seen.is_some() => {}
                () = self.begun.notified() => {}
                changed = metrics.changed() => if changed.is_err() { return },
                ended = leadership.wait_for(|l| l.role == Role::Stopped) => return drop(ended),
            }
        }
    }

    /// Wakes the group for a change of its members. A removed leader leads for a moment longer, and openraft's
    /// state does not support changes by it.
    async fn wake_as_member(&self) -> Result<(), String> {
        self.ensure_awake().await.map_err(|e| e.to_string())?;
        match self.membership().members.contains_key(&self.me) {
            true => Ok(()),
            false => Err("this replica has left the group; the next leader changes its membership".into()),
        }
    }

    /// The voter of `voters` that already votes and has the longest log. `None`: none votes yet, so none could be
    /// elected (when a single replica is replaced, say); then the leader must remove itself.
    fn furthest(&self, voters: &BTreeSet<ReplicaId>) -> Option<ReplicaId> {
        let now = self.membership().voters;
        let metrics = self.raft.metrics();
        let m = metrics.borrow_watched();
        let has = |r: &&ReplicaId| {
            let log = m.replication.as_ref().and_then(|all| all.get(&r.0).cloned().flatten());
            log.map(|l| l.index)
        };
        voters.intersection(&now).max_by_key(has).copied()
    }

    /// Makes `voters` the only members: as [`Self::set_voters`], and learners leave the group too.
    pub async fn set_members(&self, voters: &BTreeSet<ReplicaId>) -> Result<(), String> {
        if self.membership().voters != *voters {
            self.set_voters(voters).await?;
        }
        if !voters.contains(&self.me) {
            return Ok(()); // it has voted itself out; the rest is for its successor
        }
        let learners = self.membership().members.into_keys().filter(|n| !voters.contains(n)).collect();
        self.remove_learners(&learners).await
    }

    /// Removes these learners from the group.
    pub async fn remove_learners(&self, learners: &BTreeSet<ReplicaId>) -> Result<(), String> {
        self.wake_as_member().await?;
        if learners.is_empty() {
            return Ok(());
        }
        let leave = ChangeMembers::RemoveNodes(learners.iter().map(|n| n.0).collect());
        self.raft.change_membership(leave, false).await.map(drop).map_err(|e| e.to_string())
    }

    /// Sets whether this replica starts elections; a leader keeps leading until it transfers. Returns whether that
    /// is a change.
    pub fn may_lead(&self, may: bool) -> bool {
        let new = self.stands.swap(may, Relaxed) != may;
        if new {
            self.raft.runtime_config().elect(may);
        }
        new
    }

    /// Transfers the leadership to another voter. Rate-limited, because a leader takes no proposals meanwhile.
    pub async fn transfer(&self, to: ReplicaId) -> Result<(), String> {
        self.ensure_awake().await.map_err(|e| e.to_string())?;
        {
            let mut last = self.handed_over.lock().await;
            if last.is_some_and(|t| t.elapsed() < self.election * TRANSFER_ELECTIONS) {
                return Ok(());
            }
            *last = Some(Instant::now());
        }
        tracing::info!(group = %self.name, %to, "transferring the leadership");
        self.raft.trigger().transfer_leader(to.0).await.map_err(|e| e.to_string())
    }
}
