//! A shard's replicas, by what Raft promises of them: what is committed stays, in the order in which it was proposed; what a
//! leader that fails had proposed and not committed, its successor has a beginning of, or nothing.
//!
//! An entry is committed when the nearest of a majority's followers have answered: latency there and back, after the
//! leader's link has carried it to all of them. There is one state for all replicas, the real [`Shard`], changed by
//! [`Shard::apply`] as entries are committed; that replicas agree is proven elsewhere (`ps-server/src/shard/simulation`).

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
    /// By which its leader knows it.
    number: u64,
}

/// A shard's log, as far as it is not committed.
pub(crate) struct Log {
    clock: Clock,
    network: Arc<Network>,
    state: Arc<Shard>,
    staleness: Arc<Staleness>,
    replicas: u32,
    /// What a majority takes beyond the network, in nanoseconds.
    extra: u64,
    cores: Cores,
    /// What the followers' processors do for an entry that changes weights, in nanoseconds.
    follow: u64,
    inner: Mutex<Inner>,
}

struct Inner {
    open: VecDeque<Entry>,
    /// When the last of them is committed.
    last: Moment,
    /// The leadership that proposes now; what an earlier one asked for finds another.
    term: u64,
    chance: Chance,
}

/// What is between replicas, and what they cost.
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

    /// Round trips to the followers that make a majority with the leader.
    fn round_trip(&self, chance: &mut Chance) -> u64 {
        let followers = self.replicas.saturating_sub(1) as usize;
        let mut trips: Vec<u64> =
            (0..followers).map(|_| self.network.latency(chance) + self.network.latency(chance)).collect();
        trips.sort_unstable();
        // Of n followers, n / 2 (rounded up) and the leader are a majority of n + 1.
        followers.div_ceil(2).checked_sub(1).map_or(0, |i| trips[i]) + self.extra
    }

    /// The leader is gone: what it proposed is not committed from now on.
    pub fn leaderless(&self) {
        self.inner.lock().term += 1;
    }

    /// Another leads, and has a beginning of what the last one proposed. Gives its term.
    pub fn elect(&self) -> u64 {
        let mut log = self.inner.lock();
        log.term += 1;
        let open = log.open.len();
        let kept = log.chance.below(open + 1);
        for (i, entry) in std::mem::take(&mut log.open).into_iter().enumerate() {
            if i < kept {
                self.apply(&entry.proposal); // nobody is left who waits for its outcome
            }
        }
        log.last = self.clock.now();
        log.term
    }

    /// How long an election takes where a follower stands after this long without a word, in nanoseconds.
    pub fn election(&self, election_ms: u64) -> u64 {
        let mut log = self.inner.lock();
        // A follower waits three to four times as long, and then asks a majority.
        let timeout = (3.0 + log.chance.uniform()) * election_ms as f64 / 1e3;
        nanos(timeout) + self.round_trip(&mut log.chance)
    }

    fn apply(&self, proposal: &Proposal) -> Outcome {
        self.staleness.around(&self.state, proposal, || self.state.apply(proposal))
    }

    /// The leader, on this server, proposes what it knows by this number. Gives when it is committed, unless another leads by
    /// then: [`Self::commit`] is due.
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

    /// The first entry that is open is committed, and applied, where this term's leader proposed it and still leads: its number
    /// and outcome.
    pub fn commit(&self, term: u64) -> Option<(u64, Outcome)> {
        let mut log = self.inner.lock();
        let entry = if log.term == term { log.open.pop_front()? } else { return None };
        Some((entry.number, self.apply(&entry.proposal)))
    }

    /// How long it takes the leader to hear that it leads, in nanoseconds.
    pub fn confirms(&self) -> u64 {
        self.round_trip(&mut self.inner.lock().chance)
    }
}
