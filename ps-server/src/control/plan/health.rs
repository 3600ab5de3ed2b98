//! The health of a shard, and the reason for it.

use super::view::View;
use crate::{control::state::Place, raft::ReplicaId};
use paraft_common::JobShard;
use std::collections::BTreeSet;

/// The health of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Its replicas are being started.
    #[default]
    Placing,
    /// All is well.
    Serving,
    /// It serves, or will, with fewer replicas than configured.
    Repairing,
    /// Too few of its replicas answer to commit anything. Nothing is lost; it continues when they answer.
    NoMajority,
    /// As `NoMajority`; besides, the storage of answering replicas fails, or that of its leader's server
    /// blocks sessions. It continues when the storage serves again.
    Stopped,
    /// A majority of its replicas has lost its log: their state is gone.
    Lost,
}

impl Health {
    /// Its name in the status.
    pub fn name(self) -> &'static str {
        match self {
            Health::Placing => "placing",
            Health::Serving => "serving",
            Health::Repairing => "repairing",
            Health::NoMajority => "no-majority",
            Health::Stopped => "storage-stopped",
            Health::Lost => "lost",
        }
    }
}

/// A shard whose leader refuses its sessions serves no worker, even with all replicas.
pub(super) fn unless_refused(
    view: &View,
    shard: JobShard,
    place: &Place,
    health: (Health, String),
) -> (Health, String) {
    let leader = view.leader(shard, place.founding).filter(|(_, lead)| lead.stopped.is_some());
    match (health.0, leader) {
        (Health::Serving | Health::Repairing, Some((at, lead))) => {
            (Health::Stopped, format!("its leader {at} cannot serve its sessions: {}", lead.trouble))
        }
        _ => health,
    }
}

/// Why a replica does not take part in its group.
pub(super) fn missing(view: &View, shard: JobShard, n: ReplicaId) -> String {
    match (view.stopped(shard, n), view.no_room(n.server(), shard)) {
        (Some(r), _) => format!("the replica on {} waits: {}", n.server(), r.trouble),
        (None, Some(why)) => format!("{} has no room for a replica: {why}", n.server()),
        (None, None) if view.forgotten(n.server()) => format!("{} was forgotten", n.server()),
        (None, None) if view.live(n.server()).is_some() => {
            format!("{} is up, and holds no replica of it", n.server())
        }
        (None, None) => format!("{} is silent", n.server()),
    }
}

/// Too few replicas answer, and nothing is known to be lost.
pub(super) fn no_majority(view: &View, shard: JobShard, voters: &BTreeSet<ReplicaId>) -> (Health, String) {
    let away = || voters.iter().copied().filter(|n| view.working(shard, *n).is_none());
    let why: Vec<String> = away().map(|n| missing(view, shard, n)).collect();
    let health = match away().any(|n| view.stopped(shard, n).is_some()) {
        true => Health::Stopped,
        false => Health::NoMajority,
    };
    (health, format!("{} of {} replicas answer: {}", voters.len() - why.len(), voters.len(), why.join("; ")))
}
