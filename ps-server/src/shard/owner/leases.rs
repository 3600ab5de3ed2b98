//! Leases of members. Every message renews the lease of the member that sent it, and its client sends a heartbeat where
//! there is nothing else to say (from its own I/O thread: a long step is no silence). A member that is silent for a
//! lease is taken out, whether its connection broke or not: a process that hangs and a network that swallows
//! everything keep theirs open.
//!
//! Leader-only. Silence is counted in quarters of a lease, by looking, not by comparing clocks: a server that stood
//! still itself finds one quarter gone, not a fleet of dead workers. So a member has between one lease and one and a
//! quarter.

use super::{ConnId, Owner, REFIND};
use paraft_common::WorkerId;
use std::{sync::atomic::Ordering::Relaxed, time::Duration};
use tokio::time::Instant;

/// Quarters of a lease that may pass in silence.
const QUARTERS: u32 = 4;

impl Owner {
    /// Looks at the leases, if it is time, and closes the streams of members whose lease is over: [`Owner::absent_too_long`]
    /// takes them out.
    pub(super) fn check_leases(&mut self) {
        let now = Instant::now();
        let Some(conf) = self.shard.configured() else { return };
        let Some(lead) = self.lead.as_mut().filter(|l| l.look.is_some_and(|at| at <= now)) else { return };
        let quarter = conf.job.lease() / QUARTERS;
        lead.look = Some(now + quarter);
        let mut over: Vec<(WorkerId, ConnId)> = Vec::new();
        let mut left = self.shard.read(|m| {
            let open = |(w, _)| Some((w, *lead.by_worker.get(&w)?));
            let attached: Vec<(WorkerId, ConnId)> = m.members.unfinished().filter_map(open).collect();
            let look = |(worker, conn): (WorkerId, ConnId)| {
                let stream = self.streams.get_mut(&conn)?;
                stream.silent = if stream.life.take() { 0 } else { stream.silent + 1 };
                if stream.silent >= QUARTERS {
                    over.push((worker, conn));
                }
                Some((worker, quarter * QUARTERS.saturating_sub(stream.silent)))
            };
            attached.into_iter().filter_map(look).collect::<std::collections::BTreeMap<_, _>>()
        });
        left.extend(lead.absent.iter().map(|(w, until)| (*w, until.saturating_duration_since(now))));
        *self.counters.leases.lock() = left;
        let arrived = lead.arrived.values().map(|(_, bytes)| bytes).sum::<u64>();
        let early = lead.early.values().flat_map(|e| e.values()).map(|q| q.payload.len() as u64);
        self.counters.queued.store(arrived + early.sum::<u64>(), Relaxed);
        for (worker, conn) in over {
            let lease = conf.job.lease();
            tracing::warn!(
                shard = self.shard.id().0,
                worker = worker.0,
                ?lease,
                "a member was silent for its lease"
            );
            self.closed(conn);
            if let Some(lead) = &mut self.lead {
                lead.absent.insert(worker, now);
            }
        }
    }

    /// What a member may still be away for whose stream has just closed: the connection of a host that vanished closes
    /// long after the last sign of life.
    pub(super) fn rest_of_lease(&self, silent: u32) -> Duration {
        let Some(conf) = self.shard.configured() else { return REFIND };
        // One quarter may be a heartbeat that was a little late.
        let silence = conf.job.lease() / QUARTERS * silent.saturating_sub(1);
        super::grace(&conf.job).saturating_sub(silence)
    }
}
