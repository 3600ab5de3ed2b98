//! Who belongs to a group: learners and voters come and go, the leadership is handed over.

use super::{
    group::Group,
    leadership::{Role, behind},
    network::Addresses,
    replica::ReplicaId,
    replicated::Logged,
};
use openraft::{BasicNode, ChangeMembers, async_runtime::WatchReceiver};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

/// Who votes and who learns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// Every member and its address.
    pub members: BTreeMap<ReplicaId, String>,
    /// Those that vote.
    pub voters: BTreeSet<ReplicaId>,
    /// A change is under way: two sets of voters must agree, or it is not yet committed.
    pub changing: bool,
    /// Where it is in the log.
    pub index: u64,
}

/// Between two looks at the membership. A joint one that stands for so long twice is finished by whoever leads.
const LOOK_PAUSE: Duration = Duration::from_millis(250);

/// Likewise, of a group that sleeps on: as it wakes it is looked at.
const ASLEEP_PAUSE: Duration = Duration::from_secs(20);

/// So many election timeouts are longer than a transfer takes, or an election where it fails.
const TRANSFER_ELECTIONS: u32 = 4;

impl<C: Logged> Group<C> {
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

    /// Where this replica leads: the members that lack a few entries at most.
    pub fn caught_up(&self) -> BTreeSet<ReplicaId> {
        let behind = behind(&self.raft);
        self.membership().members.into_keys().filter(|n| !behind.contains(n)).collect()
    }

    /// Makes a replica learn, without a vote, or gives a member another address; returns when the change is committed, not when it has caught up.
    pub async fn add_learner(&self, replica: ReplicaId, address: &str) -> Result<(), String> {
        self.ensure_awake().await.map_err(|e| e.to_string())?;
        self.is_a_member()?;
        let node = BasicNode::new(address);
        match self.membership().members.get(&replica) {
            None => {
                let added = self.raft.add_learner(replica.0, node, false).await;
                return added.map(drop).map_err(|e| e.to_string());
            }
            Some(at) if at == address => return Ok(()), // asked twice
            Some(_) => {}
        }
        // It is a member under another address: the same replica, from the same files, elsewhere.
        tracing::info!(group = %self.name, %replica, address, "is at another address now");
        let moved = ChangeMembers::SetNodes([(replica.0, node)].into());
        self.raft.change_membership(moved, true).await.map(drop).map_err(|e| e.to_string())
    }

    /// Changes who votes, through joint consensus; those that no longer do leave the group. Learners stay. A leader that
    /// is to leave hands the leadership over instead, and the next one makes the change when it is asked: the group then
    /// has a leader all the time, where one that removes itself leaves an election behind.
    pub async fn set_voters(&self, voters: &BTreeSet<ReplicaId>) -> Result<(), String> {
        self.ensure_awake().await.map_err(|e| e.to_string())?;
        self.is_a_member()?;
        if !voters.contains(&self.me)
            && let Some(to) = self.furthest(voters)
        {
            return self.transfer(to).await;
        }
        let voters: BTreeSet<u64> = voters.iter().map(|r| r.0).collect();
        self.raft.change_membership(voters, false).await.map(drop).map_err(|e| e.to_string())
    }

    /// A change of voters goes by way of a joint membership, which must be followed by another entry. A leader that loses
    /// its lease between the two leaves the group there: nothing is lost, and nobody else can be changed. So who leads
    /// finishes what it finds half done.
    ///
    /// Besides: a member that has moved is spoken to where it is now, and half a snapshot whose sender is silent is dropped.
    pub(super) async fn look_after(self, addresses: Addresses) {
        let mut leadership = self.leadership.clone();
        let mut seen = None;
        loop {
            tokio::select! {
                () = tokio::time::sleep(if self.is_asleep() { ASLEEP_PAUSE } else { LOOK_PAUSE }) => {}
                () = self.sleep.woken.notified() => {}
                ended = leadership.wait_for(|l| l.role == Role::Stopped) => return drop(ended),
            }
            self.drop_stale_snapshot().await;
            let (at, voters) = {
                let metrics = self.raft.server_metrics();
                let m = metrics.borrow_watched();
                let now = &m.membership_config;
                addresses.are(now.nodes().map(|(id, n)| (*id, n.addr.clone())));
                let joint = now.get_joint_config();
                let half = joint.len() > 1 && now.log_id() == m.committed_membership_config.log_id();
                (*now.log_id(), joint.last().filter(|_| half).cloned())
            };
            let Some(voters) = voters.filter(|_| leadership.borrow().leads) else {
                seen = None;
                continue;
            };
            // Twice the same: nobody is about to finish it.
            if seen.replace(at) == Some(at) {
                tracing::info!(group = %self.name, ?voters, "finishing a change of voters that was broken off");
                if let Err(e) = self.raft.change_membership(voters, false).await {
                    tracing::debug!(group = %self.name, error = %e, "not yet");
                }
            }
        }
    }

    /// A leader that has been removed leads on for a moment. The library's state is not made for changes by it.
    fn is_a_member(&self) -> Result<(), String> {
        match self.membership().members.contains_key(&self.me) {
            true => Ok(()),
            false => Err("this replica has left the group; the next leader changes its membership".into()),
        }
    }

    /// That one of `voters` which votes already and has most of the log. `None`: none votes yet, so that none could be
    /// elected (a single replica that is replaced, say); then the leader has to remove itself.
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

    /// Makes `voters` the only members: as [`Self::set_voters`], and those that only learn leave the group too.
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

    /// Makes these, who only learn, leave the group.
    pub async fn remove_learners(&self, learners: &BTreeSet<ReplicaId>) -> Result<(), String> {
        self.ensure_awake().await.map_err(|e| e.to_string())?;
        self.is_a_member()?;
        if learners.is_empty() {
            return Ok(());
        }
        let leave = ChangeMembers::RemoveNodes(learners.iter().map(|n| n.0).collect());
        self.raft.change_membership(leave, false).await.map(drop).map_err(|e| e.to_string())
    }

    /// Whether this replica stands for election, from now on; one that leads leads on until it hands over. Gives whether that
    /// is new.
    pub fn may_lead(&self, may: bool) -> bool {
        let new = self.stands.swap(may, Relaxed) != may;
        if new {
            self.raft.runtime_config().elect(may);
        }
        new
    }

    /// Hands the leadership to another voter; at most once a while, since a leader takes no proposals meanwhile.
    pub async fn transfer(&self, to: ReplicaId) -> Result<(), String> {
        self.ensure_awake().await.map_err(|e| e.to_string())?;
        {
            let mut last = self.handed_over.lock().await;
            if last.is_some_and(|t| t.elapsed() < self.election * TRANSFER_ELECTIONS) {
                return Ok(());
            }
            *last = Some(Instant::now());
        }
        tracing::info!(group = %self.name, %to, "handing the leadership over");
        self.raft.trigger().transfer_leader(to.0).await.map_err(|e| e.to_string())
    }
}
