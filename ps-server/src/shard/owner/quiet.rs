//! When a shard's group may sleep: nobody is connected, nobody is missed, and nothing is on its way.

use super::{ConnId, Finished, Owner};
use futures::FutureExt;
use paraft_proto::RefusalKind;
use std::time::Duration;
use tokio::time::Instant;

/// A group that had nothing to do for so long is put to sleep.
const QUIET: Duration = Duration::from_secs(5);

impl Owner {
    /// After everything that it does: is there nothing left?
    pub(super) fn look_for_quiet(&mut self) {
        let busy = !self.streams.is_empty() || !self.done.is_empty();
        let members = || self.shard.read(|m| m.members.unfinished().next().is_some());
        let Some(lead) = &mut self.lead else { return };
        let quiet = !busy && lead.ready && lead.absent.is_empty() && lead.leaving.is_empty() && !members();
        match quiet {
            true => _ = lead.quiet.get_or_insert_with(Instant::now),
            false => lead.quiet = None,
        }
    }

    pub(super) fn quiet_deadline(&self) -> Option<Instant> {
        Some(self.lead.as_ref()?.quiet? + QUIET)
    }

    /// Also of a group that sleeps it is looked again: others wake it too, and this task does not hear of it.
    pub(super) fn sleep_if_quiet(&mut self) {
        let now = Instant::now();
        let Some(lead) = self.lead.as_mut().filter(|l| l.quiet.is_some_and(|since| since + QUIET <= now))
        else {
            return;
        };
        lead.quiet = Some(now);
        if !self.group.is_asleep() {
            self.done.push(self.group.sleep().map(|_| Finished::SleepOrWake).boxed());
        }
    }

    /// Somebody comes while the group sleeps. A leader may have been deposed meanwhile: it begins again, and who came comes
    /// once more. Otherwise the leader is told, wherever it is.
    pub(super) fn woken_by(&mut self, conn: ConnId) -> bool {
        // Also one that another replica has woken meanwhile.
        let slept = self.group.has_slept();
        if self.group.is_asleep() {
            self.done.push(self.group.ensure_awake().map(|_| Finished::SleepOrWake).boxed());
        }
        if !slept {
            return false;
        }
        let Some(lead) = self.lead.as_mut().filter(|l| l.ready) else { return false };
        lead.broken = true;
        self.refuse(conn, RefusalKind::Unavailable("this shard's leader was asleep".into()).into());
        true
    }
}
