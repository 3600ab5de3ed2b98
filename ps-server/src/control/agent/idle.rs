//! When the control group sleeps: while the shards do, and there is nothing to plan.
//!
//! The servers' reports then take the place of heartbeats. A server that no longer reports wakes the leader; a report
//! that no leader takes wakes the reporter ([`Agent::report`]). If the leader's process ends, its connections close,
//! and its followers elect another as when they are awake.

use super::Agent;
use crate::replicated::Group;
use std::time::{Duration, Instant};

/// A group that is idle for this long is put to sleep.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

impl Agent {
    /// Puts the group that this server leads to sleep, or wakes it. `busy`: the last plan had an action; `quiet`:
    /// since when none had.
    pub(super) async fn sleep_if_quiet(&self, group: &Group, busy: bool, quiet: &mut Option<Instant>) {
        let now = Instant::now();
        if busy || self.is_needed() {
            *quiet = None;
            group.wake();
        } else if group.is_asleep() {
            // If another server wakes it, it stays awake for as long.
            *quiet = Some(now);
        } else if now.duration_since(*quiet.get_or_insert(now)) >= IDLE_TIMEOUT {
            // A member that does not agree is asked again later.
            *quiet = Some(now);
            group.sleep().await;
        }
    }

    /// Whether workers use a shard that is here too, or a server is missing.
    fn is_needed(&self) -> bool {
        !self.replicas().all_asleep() || !self.silent_servers().is_empty()
    }
}
