//! When the replicas of a group are compared: the leader writes checks into the log.

use super::{group::Group, leadership::Role};
use paraft_changes::Change;
use std::time::Duration;

impl Group {
    /// Has the replicas checked at this interval while this one leads and has new entries.
    pub(super) async fn check_consistency(self, every: Duration) {
        let mut leadership = self.leadership.clone();
        loop {
            let pause = async {
                // A sleeping group is not checked, and not woken for it.
                self.until_awake().await;
                tokio::time::sleep(self.checks.pause(every)).await;
            };
            tokio::select! {
                () = pause => {}
                ended = leadership.wait_for(|l| l.role == Role::Stopped) => return drop(ended),
            }
            // A single replica has nothing to compare with.
            if leadership.borrow().leads
                && !self.is_asleep()
                && self.others() > 0
                && self.applied_index() > self.checks.last()
            {
                // The group must not fall asleep meanwhile.
                if self.ensure_awake().await.is_ok() {
                    let _ = self.raft.client_write_ff(Change::Check, None).await; // the next one will succeed
                }
            }
        }
    }
}
