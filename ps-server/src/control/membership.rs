//! Which servers the fleet admits, and which it removes.

use super::{
    agent::{Agent, MAX_NEWCOMERS},
    orders::Order,
    plan::{LastReport, Report, new_founding},
};
use crate::raft::ReplicaId;
use paraft_common::{JobShard, ServerId};
use paraft_proto::RefusalKind;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};
use tokio::net::TcpStream;

/// The address of another server with this id, when a process reports under the id. A process that the
/// control group knows by this replica and address is believed at once. Any other is believed only when no
/// process has reported under the id for `silent`: a stray process, or one with another's id by mistake,
/// changes nothing while the right one runs. A server that has lost its disk, or has moved, waits as long.
pub(super) fn holder(
    server: ServerId,
    report: &Report,
    heard: Option<&LastReport>,
    members: &BTreeMap<ReplicaId, String>,
    leads_since: Instant,
    silent: Duration,
) -> Option<String> {
    if members.get(&report.node) == Some(&report.address) {
        return None;
    }
    match heard {
        Some(h) if (h.report.node, &h.report.address) == (report.node, &report.address) => None,
        Some(h) => (h.at.elapsed() <= silent).then(|| h.report.address.clone()),
        // A new leader has received no reports yet.
        None if leads_since.elapsed() > silent => None,
        None => members.iter().find(|(n, _)| n.server() == server).map(|(_, address)| address.clone()),
    }
}

/// Maximum number of servers that may ask to join...
const MAX_JOINS: usize = 32;
/// ...within this time.
const JOIN_WINDOW: Duration = Duration::from_secs(10);
/// How long a joining server may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of checks whether a server counts as silent.
const SILENCE_POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Agent {
    /// Why a reporting server cannot take part: too few other servers reach it.
    pub fn unreached(&self, server: ServerId) -> Option<String> {
        self.leading.lock().unreached.get(&server).cloned()
    }

    /// Whether a server at this address is admitted. The leader must reach it, and only a few admitted
    /// servers may be without a report: every join is agreed on, and stays.
    pub async fn may_join(&self, address: &str) -> Result<(), String> {
        if let Some(server) = self
            .agreed
            .read(|s| s.servers.iter().find(|(_, m)| m.address == address).map(|(server, _)| *server))
        {
            // A silent server asks again, since it has not received the answer, or returns without its disk.
            return match self.silent_servers().contains(&server) {
                true => Ok(()),
                false => Err(format!(
                    "{server} is there already, at `{address}`: give each server an address of its own (--advertise)"
                )),
            };
        }
        {
            let mut joins = self.joins.lock();
            joins.retain(|_, at| at.elapsed() <= JOIN_WINDOW);
            if joins.len() >= MAX_JOINS && !joins.contains_key(address) {
                return Err(format!(
                    "{MAX_JOINS} servers have asked to join within {JOIN_WINDOW:?}: ask again later"
                ));
            }
            // A repeated request is not another server.
            joins.entry(address.to_string()).or_insert_with(Instant::now);
        }
        let unheard = {
            let leading = self.leading.lock();
            self.agreed.read(|s| s.servers.keys().filter(|id| !leading.heard.contains_key(id)).count())
        };
        if unheard >= MAX_NEWCOMERS {
            return Err(format!(
                "{unheard} servers of this fleet have not reported: `paraft status` names them, `paraft forget` lets those \
                 go that do not come"
            ));
        }
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(e)) => {
                Err(format!("`{address}` cannot be reached from {}: {e} (--advertise)", self.address()))
            }
            Err(_) => Err(format!(
                "`{address}` cannot be reached from {}: no answer within {CONNECT_TIMEOUT:?} (--advertise)",
                self.address()
            )),
        }
    }

    /// A server will not return. Refused for a live one, and if a shard needs its data to regain a majority.
    /// A server that has just ended counts as silent only later, so this waits; a report from it meanwhile
    /// shows that it is alive.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub async fn forget(&self, token: u64, server: ServerId) -> Result<(), RefusalKind> {
        let asked = Instant::now();
        let (state, silent) = loop {
            let state = self.agreed.get();
            if state.orders.of(token).is_some() {
                return Ok(());
            }
            if !state.servers.contains_key(&server) {
                return Err(RefusalKind::NoSuchServer(server));
            }
            let silent = self.silent_servers();
            // A new leader has received no reports yet, and does not know which servers are silent.
            if !self.is_new() && (silent.contains(&server) || self.unreached(server).is_some()) {
                break (state, silent);
            }
            if self.leading.lock().heard.get(&server).is_some_and(|h| h.at > asked)
                && self.unreached(server).is_none()
            {
                return Err(RefusalKind::BadOrder(format!(
                    "{server} is there: `paraft drain {server}` empties it, then stop it"
                )));
            }
            tokio::time::sleep(SILENCE_POLL_INTERVAL).await;
            if !self.leads() {
                return Err(RefusalKind::NotControlLeader { leader: self.group().leader_address() });
            }
        };
        for (shard, place) in &state.shards {
            let others = |n: &&crate::raft::ReplicaId| n.server() != server && !silent.contains(&n.server());
            let left = place.voters.iter().filter(others).count();
            if place.voters.iter().any(|n| n.server() == server) && left * 2 <= place.voters.len() {
                let away =
                    place.voters.iter().filter(|n| n.server() != server && !others(n)).map(|n| n.server());
                let away = away.map(|s| s.to_string()).collect::<Vec<_>>().join(", ");
                let why = format!(
                    "{shard} has {left} of {} replicas without it, which is no majority: {}start servers, or give up what the shard \
                     held first (`paraft data abandon {} --fleet HOST:PORT --accept-loss`)",
                    place.voters.len(),
                    if away.is_empty() {
                        String::new()
                    } else {
                        format!("{away} is silent too. Wait for it, ")
                    },
                    shard.name()
                );
                // A silent server may only be slow, and come back.
                return Err(match away.is_empty() {
                    true => RefusalKind::BadOrder(why),
                    false => RefusalKind::Unavailable(why),
                });
            }
        }
        self.order(token, Order::Forget { server }).await.map(drop)
    }

    /// Gives up a shard's state, on a person's order; returns a description of it.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub async fn abandon(
        &self,
        token: u64,
        shard: JobShard,
        accept_loss: bool,
    ) -> Result<String, RefusalKind> {
        if self.agreed.read(|s| s.orders.of(token)).is_some() {
            return Ok(format!("what {shard} held, by an earlier try of this order"));
        }
        let Some(place) = self.agreed.read(|s| s.shards.get(&shard).cloned()) else {
            return Err(RefusalKind::BadOrder(format!("there is no {shard}")));
        };
        let health = self.leading.lock().health.get(&shard).cloned();
        let (health, why) = health.unwrap_or_default();
        let held = format!(
            "{shard} is {}{}{why}. Everything that was acknowledged there since the latest checkpoint of its job is given up; \
             workers stop, and go on with --resume. Files of its replicas are put aside, and nothing is deleted",
            health.name(),
            if why.is_empty() { "" } else { ": " },
        );
        if !accept_loss {
            return Err(RefusalKind::BadOrder(format!("{held}. If that is meant: --accept-loss")));
        }
        tracing::error!(%shard, founding = place.founding, "given up by an operator: the shard is founded again");
        let place = new_founding(shard, rand::random::<u64>() | (1 << 63));
        self.order(token, Order::Abandon { shard, place }).await?;
        Ok(held)
    }

    /// Whether this leader leads for less than the silence timeout, and has not received a report from every
    /// server yet.
    fn is_new(&self) -> bool {
        let leading = self.leading.lock();
        let unheard = || self.agreed.read(|s| s.servers.keys().any(|id| !leading.heard.contains_key(id)));
        leading.since.is_none_or(|since| since.elapsed() <= self.timeouts().silent) && unheard()
    }

    /// Servers without a report to this leader for a while.
    pub(super) fn silent_servers(&self) -> std::collections::BTreeSet<ServerId> {
        let leading = self.leading.lock();
        let silent =
            |id: &ServerId| leading.heard.get(id).is_none_or(|h| h.at.elapsed() > self.timeouts().silent);
        self.agreed.read(|s| s.servers.keys().copied().filter(silent).collect())
    }
}
