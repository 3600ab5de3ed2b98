//! Replicas whose storage fails at present, or for which this server has no room. Their folders and names
//! stay. They are started again with growing pauses, until that works or their files turn out to be damaged.
//! Of a replica with its log in memory only the wait remains: another is hosted in its place when there is
//! room.

use super::{Replica, Replicas, quarantine::quarantine_folder};
use crate::{files::DataFile, raft::ReplicaId};
use paraft_common::JobShard;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A replica that waits for its storage, or for room.
#[derive(Clone, Debug)]
pub struct Stopped {
    /// The replica; `None` if not even its name could be read.
    pub node: Option<ReplicaId>,
    /// Its founding; `None` if it could not be read.
    pub founding: Option<u64>,
    /// What failed, with the name of the operating system's error.
    pub why: String,
    /// Since when.
    pub since: Instant,
    /// Nothing of it is left here: when there is room, another may take its place.
    pub empty: bool,
    pub(super) pause: Duration,
    pub(super) again: Instant,
}

/// The first pause, doubled with each try...
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// ...up to this: opening reads the whole log.
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// A replica that stops again within this time after a restart continues with its last pause.
const STEADY_PERIOD: Duration = Duration::from_secs(30);
/// Interval at which the replicas' needs are written beside their logs, if they are new. A replica without room for a
/// snapshot, which nothing else tells, is found then.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The interval while all replicas sleep.
const ASLEEP_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum pause of the checks.
const MIN_PAUSE: Duration = Duration::from_millis(50);

impl Stopped {
    pub(super) fn new(replica: Option<(ReplicaId, u64)>, why: String) -> Self {
        let (node, founding) = (replica.map(|r| r.0), replica.map(|r| r.1));
        let now = Instant::now();
        Self { node, founding, why, since: now, empty: false, pause: FIRST_PAUSE, again: now + FIRST_PAUSE }
    }

    fn tried(&mut self, why: String) {
        if self.why != why {
            tracing::warn!(why, "a replica still waits");
        }
        self.why = why;
        self.pause = (self.pause * 2).min(LAST_PAUSE);
        self.again = Instant::now() + self.pause;
    }
}

impl Replicas {
    /// The replicas that wait for their storage, or for room.
    pub fn stopped(&self) -> Vec<(JobShard, Stopped)> {
        self.waiting.read().iter().map(|(s, w)| (*s, w.clone())).collect()
    }

    /// Why the replica of this shard waits, if it does.
    pub fn why_stopped(&self, shard: JobShard) -> Option<String> {
        self.waiting.read().get(&shard).map(|w| w.why.clone())
    }

    /// Restarts replicas whose storage failed, until [`Self::shutdown`].
    pub async fn supervise(self: Arc<Self>) {
        let mut needs = Instant::now();
        while !self.ending.load(Relaxed) {
            for (shard, replica) in self.ended() {
                self.stop(shard, &replica).await;
            }
            if needs.elapsed() >= CHECK_INTERVAL {
                self.keep_needs().await;
                needs = Instant::now();
            }
            let due: Vec<JobShard> = {
                let waiting = self.waiting.read();
                waiting.iter().filter(|(_, w)| w.again <= Instant::now()).map(|(s, _)| *s).collect()
            };
            for shard in due {
                self.try_again(shard).await;
            }
            let pause = self.pause();
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.changes.notified() => {}
            }
        }
    }

    /// Until the next check, or the next try of a replica that waits.
    fn pause(&self) -> Duration {
        let check = if self.all_asleep() { ASLEEP_CHECK_INTERVAL } else { CHECK_INTERVAL };
        let now = Instant::now();
        let tries = self.waiting.read().values().map(|w| w.again.saturating_duration_since(now)).min();
        tries.map_or(check, |tries| tries.clamp(MIN_PAUSE, check))
    }

    /// Replicas without room, or with failing storage.
    fn ended(&self) -> Vec<(JobShard, Replica)> {
        let ended = |r: &Replica| {
            let stopped = || r.folder.is_some() && r.group.trouble().is_some();
            (r.shard.lacks_room().is_some() || stopped()) && !r.group.was_failed()
        };
        self.hosted.iter().filter(|r| ended(r)).map(|r| (*r.key(), r.clone())).collect()
    }

    async fn stop(&self, shard: JobShard, replica: &Replica) {
        let _one = self.changing.lock().await;
        let node = replica.group.me();
        if self.get(shard).is_none_or(|r| r.group.me() != node) {
            return;
        }
        let lacks = replica.shard.lacks_room();
        self.needs.learn(shard, replica.founding, replica.shard.need());
        match (lacks, &replica.folder) {
            (Some(why), None) => {
                tracing::error!(%shard, replica = %node, why, "no room for this replica; another is hosted when there is");
                self.waits_for_room(shard, node, replica.founding, why);
            }
            (lacks, _) => {
                let why = lacks.or_else(|| replica.group.trouble()).unwrap_or_default();
                tracing::error!(%shard, replica = %node, why, "this replica has stopped; it will be restarted");
                let waits = self.waits(shard, Some((node, replica.founding)), why);
                self.waiting.write().insert(shard, waits);
            }
        }
        self.hosted.remove(&shard);
        replica.group.shutdown().await;
    }

    /// Makes a replica wait: with the first pause or, if it has just restarted, the next one.
    pub(super) fn waits(&self, shard: JobShard, replica: Option<(ReplicaId, u64)>, why: String) -> Stopped {
        let mut waits = Stopped::new(replica, why);
        if let Some((_, pause)) = self.back.lock().get(&shard).filter(|(at, _)| at.elapsed() < STEADY_PERIOD)
        {
            waits.pause = (*pause * 2).min(LAST_PAUSE);
            waits.again = waits.since + waits.pause;
        }
        waits
    }

    /// Ends a replica's wait.
    fn end_wait(&self, shard: JobShard) {
        if let Some(waited) = self.waiting.write().remove(&shard) {
            self.back.lock().insert(shard, (Instant::now(), waited.pause));
        }
    }

    async fn try_again(&self, shard: JobShard) {
        let _one = self.changing.lock().await;
        if self.ending.load(Relaxed) || self.get(shard).is_some() {
            return;
        }
        let folder = self.folder(shard);
        let Some(waits) = self.waiting.read().get(&shard).cloned() else { return };
        if waits.empty {
            match self.room_for_known(shard, waits.founding.unwrap_or_default(), None) {
                Ok(_) => {
                    tracing::info!(%shard, "there is room for a replica again");
                    self.end_wait(shard);
                }
                Err(why) => self.note(shard, why),
            }
            return;
        }
        let known = waits.node.is_some();
        match self.reopen_one(shard, &folder).await {
            // As if the disk is not mounted.
            Ok(false) if known && !self.options.data.join(DataFile::Identity.name()).exists() => {
                return self.note(shard, format!("{}: it is not there", self.options.data.display()));
            }
            // Its folder is gone, and the disk is mounted: its state is lost.
            Ok(false) if known => tracing::error!(%shard, "this replica's folder is gone"),
            Ok(_) => tracing::info!(%shard, "this replica runs again"),
            Err(e) if e.is_damage() => {
                tracing::error!(%shard, error = %e, "this replica's files are damaged");
                if let Err(e) = quarantine_folder(&folder).await {
                    return self.note(shard, e.to_string());
                }
                self.read_quarantine();
            }
            Err(e) => return self.note(shard, e.to_string()),
        }
        self.end_wait(shard);
    }

    fn note(&self, shard: JobShard, why: String) {
        if let Some(w) = self.waiting.write().get_mut(&shard) {
            w.tried(why);
        }
    }
}
