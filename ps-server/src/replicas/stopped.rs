//! Replicas whose storage does not serve them at present. Their folders and names stay, and they are started again with
//! growing pauses, until that works or their files turn out to be damaged.

use super::{Replica, Replicas, aside::put_aside};
use crate::{
    raft::{Folder, ReplicaId},
    server::IDENTITY,
};
use paraft_common::ShardId;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A replica that waits for its storage.
#[derive(Clone, Debug)]
pub struct Stopped {
    /// Which it is; `None` where not even its name could be read.
    pub node: Option<ReplicaId>,
    /// Of which founding, likewise.
    pub origin: Option<u64>,
    /// What failed, with the name of the operating system's error.
    pub why: String,
    /// Since when.
    pub since: Instant,
    pub(super) pause: Duration,
    pub(super) again: Instant,
}

/// A first pause, doubled with each try...
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// ...up to this: opening reads the whole log.
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// How often it is looked at whether one has stopped, or is to be tried again.
const LOOK: Duration = Duration::from_millis(50);

impl Stopped {
    pub(super) fn new(replica: Option<(ReplicaId, u64)>, why: String) -> Self {
        let (node, origin) = (replica.map(|r| r.0), replica.map(|r| r.1));
        let now = Instant::now();
        Self { node, origin, why, since: now, pause: FIRST_PAUSE, again: now + FIRST_PAUSE }
    }

    fn tried(&mut self, why: String) {
        if self.why != why {
            tracing::warn!(why, "a replica still waits for its storage");
        }
        self.why = why;
        self.pause = (self.pause * 2).min(LAST_PAUSE);
        self.again = Instant::now() + self.pause;
    }
}

impl Replicas {
    /// The replicas that wait for their storage.
    pub fn stopped(&self) -> Vec<(ShardId, Stopped)> {
        self.waiting.read().iter().map(|(s, w)| (*s, w.clone())).collect()
    }

    /// Sees to replicas whose storage fails, until [`Self::shutdown`].
    pub async fn supervise(self: Arc<Self>) {
        while !self.ending.load(Relaxed) {
            for (shard, replica) in self.all() {
                if replica.folder.is_some()
                    && !replica.group.was_failed()
                    && replica.group.trouble().is_some()
                {
                    self.stop(shard, &replica).await;
                }
            }
            let due: Vec<ShardId> = {
                let waiting = self.waiting.read();
                waiting.iter().filter(|(_, w)| w.again <= Instant::now()).map(|(s, _)| *s).collect()
            };
            for shard in due {
                self.try_again(shard).await;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn stop(&self, shard: ShardId, replica: &Replica) {
        let _one = self.changing.lock().await;
        let node = replica.group.me();
        if self.get(shard).is_none_or(|r| r.group.me() != node) {
            return;
        }
        let why = replica.group.trouble().unwrap_or_default();
        tracing::error!(%shard, replica = %node, why, "this replica's storage has stopped; it is tried again");
        self.waiting.write().insert(shard, Stopped::new(Some((node, replica.origin)), why));
        self.hosted.write().remove(&shard);
        replica.group.shutdown().await;
    }

    async fn try_again(&self, shard: ShardId) {
        let _one = self.changing.lock().await;
        if self.ending.load(Relaxed) || self.get(shard).is_some() {
            return;
        }
        let folder = Folder::new(self.options.disk.clone(), self.folder(shard));
        let known = self.waiting.read().get(&shard).and_then(|w| w.node).is_some();
        match self.reopen_one(shard, &folder).await {
            // As where the disk is not mounted.
            Ok(false) if known && !self.options.data.join(IDENTITY).exists() => {
                return self.note(shard, format!("{}: it is not there", self.options.data.display()));
            }
            // Its folder is gone, and the disk is there: with it went what it held.
            Ok(false) if known => tracing::error!(%shard, "this replica's folder is gone"),
            Ok(_) => tracing::info!(%shard, "this replica's storage serves again"),
            Err(e) if e.is_damage() => {
                tracing::error!(%shard, error = %e, "this replica's files are damaged");
                if let Err(e) = put_aside(&folder) {
                    return self.note(shard, e.to_string());
                }
                self.look_aside();
            }
            Err(e) => return self.note(shard, e.to_string()),
        }
        self.waiting.write().remove(&shard);
    }

    fn note(&self, shard: ShardId, why: String) {
        if let Some(w) = self.waiting.write().get_mut(&shard) {
            w.tried(why);
        }
    }
}
