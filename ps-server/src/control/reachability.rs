//! Which servers this one reaches, at their agreed addresses: an unreached server gets no vote. Also which
//! servers are members of the control group, according to the servers reached: before its own log tells, this
//! server knows no others.

use super::{agent::Agent, calls::Hello, state::State};
use crate::{raft::ReplicaId, replicated::Group};
use paraft_common::ServerId;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A server is asked again after this long...
const ASK_INTERVAL: Duration = Duration::from_secs(2);
/// ...and counts as reached for this long after its last answer.
const REACHED_TTL: Duration = Duration::from_secs(6);
/// Maximum number of remembered addresses: a fleet's, and those of servers that ask to join.
const MAX_ADDRESSES: usize = 1024;

/// The last answer from one address.
#[derive(Clone, Debug)]
struct Answer {
    server: ServerId,
    node: ReplicaId,
    at: Instant,
}

/// The servers that were reached.
#[derive(Default)]
pub(super) struct Reach {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    answers: BTreeMap<String, Answer>,
    asked: BTreeMap<String, Instant>,
    /// Members of the control group, according to the servers reached.
    members: BTreeSet<ReplicaId>,
}

impl Reach {
    /// Notes an answer from `address`.
    pub fn heard(&self, address: &str, hello: &Hello) {
        let mut inner = self.inner.lock();
        if inner.answers.len() >= MAX_ADDRESSES {
            inner.answers.clear();
        }
        let answer = Answer { server: hello.server, node: hello.node, at: Instant::now() };
        inner.answers.insert(address.into(), answer);
        if inner.members.len() + hello.members.len() > MAX_ADDRESSES {
            inner.members.clear();
        }
        inner.members.extend(&hello.members);
        inner.members.insert(hello.node);
    }

    /// Whether this replica of this server answered at this address lately.
    pub fn confirms(&self, address: &str, server: ServerId, node: ReplicaId) -> bool {
        let inner = self.inner.lock();
        let answer = inner.answers.get(address);
        answer.is_some_and(|a| a.server == server && a.node == node && a.at.elapsed() <= REACHED_TTL)
    }

    /// Of these servers, those that were reached lately.
    pub fn reached<'a>(&self, servers: impl Iterator<Item = (ServerId, &'a str)>) -> BTreeSet<ServerId> {
        let inner = self.inner.lock();
        let lately = |(id, address): (ServerId, &str)| {
            let answer = inner.answers.get(address)?;
            (answer.server == id && answer.at.elapsed() <= REACHED_TTL).then_some(id)
        };
        servers.filter_map(lately).collect()
    }

    fn members(&self) -> BTreeSet<ReplicaId> {
        self.inner.lock().members.clone()
    }

    /// The addresses to ask now.
    fn due(&self, addresses: BTreeSet<String>) -> Vec<String> {
        let mut inner = self.inner.lock();
        let now = Instant::now();
        inner
            .asked
            .retain(|a, at| addresses.contains(a) && now.saturating_duration_since(*at) < ASK_INTERVAL);
        let due: Vec<String> = addresses.into_iter().filter(|a| !inner.asked.contains_key(a)).collect();
        inner.asked.extend(due.iter().map(|a| (a.clone(), now)));
        due
    }
}

impl Agent {
    /// Asks the known and the joining servers for their identity, and passes on to this server's groups which
    /// other servers they may listen to.
    pub(super) fn ask_servers(self: &Arc<Self>) {
        let own = self.address().to_string();
        let mut addresses: BTreeSet<String> =
            self.agreed.read(|s| s.servers.values().map(|m| m.address.clone()).collect());
        addresses.extend(self.listed().iter().cloned());
        addresses.extend(self.asking());
        addresses.remove(&own);
        for address in self.reach.due(addresses.into_iter().take(MAX_ADDRESSES).collect()) {
            let this = self.clone();
            tokio::spawn(async move {
                match this.calls.hello(&address).await {
                    Ok(hello) if this.is_of_this_fleet(hello.fleet) => this.heard(&address, &hello),
                    Ok(_) => tracing::debug!(peer = %address, "it belongs to another fleet"),
                    Err(e) => tracing::debug!(peer = %address, error = %e, "not reached"),
                }
            });
        }
        self.group().trust(self.reach.members());
        for (shard, replica) in self.replicas().all() {
            let voters = self.agreed.read(|s| s.shards.get(&shard).map(|p| p.voters.clone()));
            replica.group.trust(voters.unwrap_or_default());
            // Nothing else notifies it that its leader's server is gone.
            if replica.group.is_asleep() && !self.reaches_leader(&replica.group) {
                replica.group.wake();
            }
        }
    }

    /// Notes an answer from a server of this fleet, or of the one that is being founded.
    pub(super) fn heard(&self, address: &str, hello: &Hello) {
        self.reach.heard(address, hello);
        self.replicas().peers().is_at(hello.server, address);
    }

    fn reaches_leader(&self, group: &Group) -> bool {
        let Some(leader) = group.leadership().borrow().leader else { return false };
        let there = |s: &State| {
            let address = s.servers.get(&leader).map(|m| (leader, m.address.as_str()));
            self.reach.reached(address.into_iter()).contains(&leader)
        };
        leader == self.server() || self.agreed.read(there)
    }

    fn is_of_this_fleet(&self, fleet: u64) -> bool {
        let own = self.fleet.load(Relaxed);
        fleet == 0 || own == 0 || fleet == own
    }
}
