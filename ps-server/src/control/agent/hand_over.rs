//! Transfers of what this server leads: because it stops, or cannot serve.

use super::Agent;
use crate::{replicas::Replica, replicated::Group};
use paraft_common::JobShard;
use std::time::{Duration, Instant};

/// How long a stopping server tries to transfer its leaderships.
pub const HAND_OVER: Duration = Duration::from_secs(2);

impl Agent {
    /// Transfers everything that this server leads, so that no worker has to wait for an election. Returns
    /// when it leads nothing, or after [`HAND_OVER`].
    pub async fn hand_over(&self) {
        let deadline = Instant::now() + HAND_OVER;
        loop {
            let groups = self.replicas.all().into_iter().map(|(_, r)| r.group).chain([self.group()]);
            let mut led = false;
            for group in groups.filter(|g| g.leadership().borrow().leads) {
                led |= transfer(&group).await;
            }
            if !led || Instant::now() >= deadline {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Why this server would refuse the sessions of a shard that it hosts. Before the job has begun, only the
    /// agreed state tells which job it is, and this server's replica of the control group may lag. `None`: it
    /// serves them.
    pub fn cannot_serve(&self, shard: JobShard, replica: &Replica) -> Option<String> {
        let knows = || replica.shard.configured().is_some() || self.shape_of(shard.job()).is_some();
        let stopped = self.control.stopped();
        // A control replica that runs and knows its fleet will know the job in a moment.
        if stopped.is_none() && self.agreed.read(|s| s.fleet) != 0 || knows() {
            return None;
        }
        let why = stopped.map(|(why, _)| format!(": its replica of the control group waits: {why}"));
        Some(format!("it does not know its fleet's jobs{}", why.unwrap_or_default()))
    }

    /// Transfers the shards whose sessions this server would refuse, and does not stand for election there
    /// until it can serve. If the job has begun, the shard's log tells whether it can: so it is known once
    /// the whole log is applied.
    pub(super) async fn transfer_unservable_shards(&self) {
        for (shard, replica) in self.replicas.all() {
            let group = &replica.group;
            let Some(why) = self.cannot_serve(shard, &replica) else {
                group.may_lead(true);
                continue;
            };
            if !group.leadership().borrow().leads || group.unapplied() > 0 {
                continue;
            }
            if group.may_lead(false) {
                tracing::warn!(%shard, "this server leads a shard that it cannot serve, and hands it over: {why}");
            }
            transfer(group).await;
        }
    }
}

/// Transfers the leadership of a group to a voter that has caught up. `false`: no replica could take over.
async fn transfer(group: &Group) -> bool {
    let (voters, caught_up) = (group.membership().voters, group.caught_up());
    let Some(successor) = voters.into_iter().find(|n| *n != group.me() && caught_up.contains(n)) else {
        return false;
    };
    if let Err(e) = group.transfer(successor).await {
        tracing::debug!(%successor, error = %e, "cannot hand over");
    }
    true
}
