//! Joins: how a worker opens its session on all shards, and opens it again after a loss.

use super::{Event, Next, PushedSquares, Session, Wait};
use paraft_common::{ShardId, Step};
use paraft_proto::{Advance, to_shard::Kind};
use std::{collections::BTreeMap, time::Duration};

impl Session {
    /// Joins the job on every shard; ends with [`Event::Joined`].
    pub fn join(&mut self) {
        self.wait = Wait::Join;
        self.joining = Some(BTreeMap::new());
        for link in self.links.values_mut() {
            link.dial(&self.fixed, &mut self.out);
        }
    }

    /// A shard has lost the session: opens a new one on all shards.
    pub(super) fn rejoin(&mut self, now: Duration) {
        if matches!(self.wait, Wait::Leave(_)) {
            return; // the worker leaves anyway: without an answer its lease expires
        }
        if self.joining.is_none() {
            self.rejoins += 1;
            self.skipped = (BTreeMap::new(), self.skipped());
        }
        self.joining = Some(BTreeMap::new());
        self.held.clear();
        self.pushing = (0, false);
        self.pushed = PushedSquares::default();
        self.refused.clear();
        self.computed_at.clear();
        for link in self.links.values_mut() {
            link.reset(now, &self.fixed, &mut self.out);
        }
    }

    /// Every shard has given a session. Shards that are behind advance to the latest of their clocks.
    pub(super) fn joined(&mut self, now: Duration) -> Option<Event> {
        let clocks = self.joining.take()?;
        let start = self.advance(clocks);
        match std::mem::replace(&mut self.wait, Wait::Nothing) {
            Wait::Nothing => None,
            Wait::Join => Some(Event::Joined(start)),
            Wait::Pull => {
                self.restart_pull(now, start);
                None
            }
            Wait::Settle(_) | Wait::Norm(_) => Some(Event::Settled(Some(start))),
            Wait::Chunk(_) => Some(Event::Chunk(Next::Rejoined(start))),
            leave @ Wait::Leave(_) => {
                self.wait = leave;
                None
            }
        }
    }

    /// Advances the shards that are behind to the latest of their clocks, and returns that step.
    pub(super) fn advance(&mut self, clocks: BTreeMap<ShardId, u64>) -> Step {
        let step = clocks.values().copied().max().unwrap_or(0);
        for (shard, clock) in clocks {
            if let Some(link) = self.links.get_mut(&shard).filter(|_| clock < step) {
                link.retain(Kind::Advance(Advance { step }), &mut self.out);
            }
        }
        Step(step)
    }
}
