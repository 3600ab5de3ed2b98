//! A replica's timekeeper: the heartbeats of a leader, and when openraft's timer runs (`ticks` says why not always).

use super::{
    group::Group,
    leadership::Role,
    ticks::{QUIET_ELECTIONS, heartbeat_ms},
};
use std::time::{Duration, Instant};

impl Group {
    /// Keeps the time of this replica until it ends.
    pub(super) async fn keep_time(self) {
        let heartbeat = Duration::from_millis(heartbeat_ms(self.election));
        let mut leadership = self.leadership.clone();
        let mut beat = Instant::now();
        loop {
            let now = *leadership.borrow_and_update();
            let next = match now.role {
                Role::Stopped => return,
                _ if self.is_asleep() => None,
                Role::Leader => {
                    self.set_quiet(true);
                    if beat <= Instant::now() {
                        // An error: it has stopped, as its role will say in a moment.
                        let _ = self.raft.trigger().heartbeat().await;
                        beat = Instant::now() + heartbeat;
                    }
                    Some(beat)
                }
                Role::Follower | Role::Learner if now.leader.is_some() => {
                    let until = self.ticks.quiet_until(self.election * QUIET_ELECTIONS, Instant::now());
                    self.set_quiet(until.is_some());
                    until
                }
                // It stands, or knows no leader.
                _ => {
                    self.set_quiet(false);
                    None
                }
            };
            let due = tokio::time::Instant::from_std(next.unwrap_or_else(Instant::now));
            tokio::select! {
                () = tokio::time::sleep_until(due), if next.is_some() => {}
                () = self.ticks.changed.notified() => {}
                changed = leadership.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Sets whether the timer would find nothing to do.
    pub(super) fn set_quiet(&self, quiet: bool) {
        let mut now = self.ticks.quiet.lock();
        *now = quiet;
        self.raft.runtime_config().tick(!quiet && !self.is_asleep());
    }

    /// The replica fell asleep, or woke. Its timer runs once it is awake; the timekeeper may stop it again.
    pub(super) fn sleep_changed(&self) {
        let mut quiet = self.ticks.quiet.lock();
        let asleep = self.is_asleep();
        *quiet &= asleep;
        self.raft.runtime_config().tick(!*quiet && !asleep);
        drop(quiet);
        self.ticks.changed.notify_one();
    }
}
