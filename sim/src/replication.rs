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
use futures::{FutureExt, future::BoxFuture};
use paraft_common::ServerId;
use paraft_server::{
    raft::{Leadership, ProposeError, Role},
    shard::{
        Command, Outcome, Proposal, Shard,
        leader::{Replication, Waits},
        staleness::Staleness,
    },
};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};
use tokio::sync::{oneshot, watch};

struct Entry {
    proposal: Proposal,
    told: oneshot::Sender<Result<Outcome, ProposeError>>,
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
    pub fn new(between: &Between, state: Arc<Shard>, staleness: Arc<Staleness>, chance: Chance) -> Arc<Self> {
        let Between { clock, network, cores, replicas, extra, follow } = between.clone();
        let inner = Mutex::new(Inner { open: VecDeque::new(), last: 0, term: 0, chance });
        let (extra, follow) = (nanos(extra), nanos(follow));
        Arc::new(Self { clock, network, state, staleness, replicas, extra, cores, follow, inner })
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

    fn commit(&self, term: u64) {
        let mut log = self.inner.lock();
        if log.term != term {
            return;
        }
        if let Some(entry) = log.open.pop_front() {
            let _ = entry.told.send(Ok(self.apply(&entry.proposal))); // who asked may have forgotten it
        }
    }
}

/// What a leader needs of its group.
pub(crate) struct Leader {
    pub log: Arc<Log>,
    pub server: usize,
    pub term: u64,
    pub leadership: watch::Receiver<Leadership>,
}

impl Leader {
    /// A leadership, and the end that ends it when it is dropped.
    pub fn new(log: Arc<Log>, server: usize, term: u64) -> (Self, watch::Sender<Leadership>) {
        let lead =
            Leadership { term, leader: Some(ServerId(server as u64)), leads: true, role: Role::Leader };
        let (sender, leadership) = watch::channel(lead);
        (Self { log, server, term, leadership }, sender)
    }
}

impl Replication for Leader {
    fn propose(&self, proposal: Proposal) -> BoxFuture<'_, Result<Waits, ProposeError>> {
        let proposed = {
            let mut log = self.log.inner.lock();
            if log.term != self.term {
                Err(ProposeError::new("its server is down"))
            } else {
                let bytes = proposal.payload.len() as u64 + HEADER_BYTES;
                let followers = u64::from(self.log.replicas.saturating_sub(1));
                let out = match followers {
                    0 => self.log.clock.now(),
                    n => self.log.network.replicates(self.server, bytes * n),
                };
                let trip = self.log.round_trip(&mut log.chance);
                let at = out.saturating_add(trip).max(log.last);
                log.last = at;
                let (told, outcome) = oneshot::channel();
                let weighs = matches!(proposal.command, Command::Update { .. } | Command::DeltaPart { .. });
                log.open.push_back(Entry { proposal, told });
                if weighs && self.log.follow > 0 {
                    let (cores, follow) = (self.log.cores.clone(), self.log.follow);
                    tokio::spawn(async move { cores.work(follow).await });
                }
                Ok((at, outcome))
            }
        };
        let proposed = proposed.map(|(at, outcome)| {
            let (log, term) = (self.log.clone(), self.term);
            self.log.clock.at(at, move || log.commit(term));
            let lost = || Err(ProposeError::new("the server that leads has failed"));
            async move { outcome.await.unwrap_or_else(|_| lost()) }.boxed()
        });
        async move { proposed }.boxed()
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), ProposeError>> {
        let trip = self.log.round_trip(&mut self.log.inner.lock().chance);
        let (log, term) = (self.log.clone(), self.term);
        async move {
            log.clock.sleep(trip).await;
            match log.inner.lock().term == term {
                true => Ok(()),
                false => Err(ProposeError::new("it does not lead any more")),
            }
        }
        .boxed()
    }

    fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.clone()
    }

    fn leader_address(&self) -> Option<String> {
        None
    }
}
