//! A shard's replicas, modelled by Raft's guarantees: committed entries stay, in the order of their
//! proposals. Of the uncommitted entries of a failed leader, its successor has a prefix, perhaps empty.
//!
//! An entry commits when the nearest majority of followers has answered: a round trip after the
//! leader's link has carried it to all of them. All replicas share one state, the real [`Shard`], and
//! [`Shard::apply`] changes it as entries commit. Other tests prove that replicas agree
//! (`ps-server/src/shard/simulation`).

use crate::{
    chance::Chance,
    clock::{Clock, Moment, nanos},
    cores::Cores,
    network::{HEADER_BYTES, Network},
};
use paraft_server::shard::{
    Command, Shard,
    command::{Outcome, Proposal},
    staleness::Staleness,
};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

struct Entry {
    proposal: Proposal,
    /// The leader's number for it.
    number: u64,
}

/// The uncommitted part of a shard's log.
pub(crate) struct Log {
    clock: Clock,
    network: Arc<Network>,
    state: Arc<Shard>,
    staleness: Arc<Staleness>,
    replicas: u32,
    /// Nanoseconds that a majority takes beyond the network.
    extra: u64,
    cores: Cores,
    /// Nanoseconds of the followers' processors for an entry that changes weights.
    follow: u64,
    inner: Mutex<Inner>,
}

struct Inner {
    open: VecDeque<Entry>,
    /// When the last of them commits.
    last: Moment,
    /// The current leader's term; events of an earlier leader carry another.
    term: u64,
    chance: Chance,
}

/// The network between replicas, and their costs.
#[derive(Clone)]
pub(crate) struct Between {
    pub clock: Clock,
    pub network: Arc<Network>,
    pub cores: Cores,
    pub replicas: u32,
    /// Seconds that a majority takes beyond the network.
    pub extra: f64,
    /// Seconds of the followers' processors for an entry that changes weights.
    pub follow: f64,
}

impl Log {
    pub fn new(between: &Between, state: Arc<Shard>, staleness: Arc<Staleness>, chance: Chance) -> Self {
        let Between { clock, network, cores, replicas, extra, follow } = between.clone();
        let inner = Mutex::new(Inner { open: VecDeque::new(), last: 0, term: 0, chance });
        let (extra, follow) = (nanos(extra), nanos(follow));
        Self { clock, network, state, staleness, replicas, extra, cores, follow, inner }
    }

    /// The round-trip time to the followers that form a majority with the leader.
    fn round_trip(&self, chance: &mut Chance) -> u64 {
        let followers = self.replicas.saturating_sub(1) as usize;
        let mut trips: Vec<u64> =
            (0..followers).map(|_| self.network.latency(chance) + self.network.latency(chance)).collect();
        trips.sort_unstable();
        // Of n followers, n / 2 (rounded up) and the leader are a majority of n + 1.
        followers.div_ceil(2).checked_sub(1).map_or(0, |i| trips[i]) + self.extra
    }

    /// The leader is gone: its proposals no longer commit.
    pub fn leaderless(&self) {
        self.inner.lock().term += 1;
    }

    /// Elects another leader, which has a prefix of the last leader's proposals. Returns its term.
    pub fn elect(&self) -> u64 {
        let mut log = self.inner.lock();
        log.term += 1;
        let open = log.open.len();
        let kept = log.chance.below(open + 1);
        for (i, entry) in std::mem::take(&mut log.open).into_iter().enumerate() {
            if i < kept {
                self.apply(&entry.proposal); // the leader that waited for its outcome is gone
            }
        }
        log.last = self.clock.now();
        log.term
    }

    /// Nanoseconds of an election, if a follower starts it after this time without a message.
    pub fn election(&self, election_ms: u64) -> u64 {
        let mut log = self.inner.lock();
        // A follower waits three to four times as long, and then requests votes from a majority.
        let timeout = (3.0 + log.chance.uniform()) * election_ms as f64 / 1e3;
        nanos(timeout) + self.round_trip(&mut log.chance)
    }

    fn apply(&self, proposal: &Proposal) -> Outcome {
        self.staleness.around(&self.state, proposal, || self.state.apply(proposal))
    }

    /// Proposes an entry for the leader on this server, under the leader's number. Returns when it
    /// commits if no other leader is elected by then; call [`Self::commit`] then.
    pub fn propose(&self, server: usize, number: u64, proposal: Proposal) -> Moment {
        let mut log = self.inner.lock();
        let bytes = proposal.payload.len() as u64 + HEADER_BYTES;
        let out = match u64::from(self.replicas.saturating_sub(1)) {
            0 => self.clock.now(),
            followers => self.network.replicates(server, bytes * followers),
        };
        let trip = self.round_trip(&mut log.chance);
        log.last = out.saturating_add(trip).max(log.last);
        let is_part = matches!(proposal.command, Command::DeltaPart { .. });
        let weighs = is_part || proposal.command.pushes().is_some();
        log.open.push_back(Entry { proposal, number });
        if weighs && self.follow > 0 {
            let (cores, follow) = (self.cores.clone(), self.follow);
            tokio::spawn(async move { cores.work(follow).await });
        }
        log.last
    }

    /// Commits and applies the first open entry, if the leader of this term proposed it and still
    /// leads; returns its number and outcome.
    pub fn commit(&self, term: u64) -> Option<(u64, Outcome)> {
        let mut log = self.inner.lock();
        let entry = if log.term == term { log.open.pop_front()? } else { return None };
        Some((entry.number, self.apply(&entry.proposal)))
    }

    /// Nanoseconds until the leader confirms that it leads.
    pub fn confirms(&self) -> u64 {
        self.round_trip(&mut self.inner.lock().chance)
    }
}
