//! The replicas of shards on this server: started, recovered from disk, retired.
//!
//! Nothing that might be the last copy is deleted. What cannot be read now waits in place (`waiting`).
//! Damaged folders are quarantined under a number of their own (`quarantine`). Only a replica that its group
//! continues without is deleted.

mod folder;
mod needs;
pub mod quarantine;
mod recovery;
#[cfg(test)]
mod tests;
mod waiting;

pub(crate) use folder::{read_metadata, shard_of_folder};
pub use quarantine::Aside;
pub use waiting::Stopped;

use crate::{
    header,
    raft::{Folder, FolderError, GroupOptions, Logs, Peers, ReplicaId, Role},
    replicated::{Group, GroupId, Hosted},
    room::{Allocated, Reserved, Room},
    shard::{
        ObservedShard, Shard,
        leader::{self, Counters, Event},
        payload_queue::PayloadQueue,
        staleness::Staleness,
    },
};
use dashmap::DashMap;
use folder::{METADATA, Metadata, folder_name};
use needs::Needs;
use paraft_common::{Durability, JobShard, ServerId};
use paraft_trace::Stages;
use parking_lot::{Mutex, RwLock};
use quarantine::quarantine_folder;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Notify, mpsc, watch};

/// One replica and its parts. Cheap to clone.
#[derive(Clone)]
pub struct Replica {
    /// The replicated state.
    pub shard: Arc<Shard>,
    /// Replication.
    pub group: Group,
    /// Takes the messages of streams.
    pub leader: mpsc::Sender<Event>,
    /// The leader's counters.
    pub counters: Arc<Counters>,
    /// What its streams may have brought that the leader has not taken.
    pub queued: Arc<PayloadQueue>,
    /// Names the founding of the shard's state.
    pub founding: u64,
    /// Changes whenever the replica applies an entry; closes with the replica.
    pub applied: watch::Receiver<()>,
    /// Where its log is; `None`: in memory only.
    pub(crate) folder: Option<Folder>,
}

impl Replica {
    /// Bytes of memory that its state and its log take.
    pub fn held(&self) -> u64 {
        self.shard.configured().map_or(0, |c| c.held()) + self.group.log_size().in_memory
    }
}

/// How replicas are started.
pub struct ReplicasOptions {
    /// This server.
    pub server: ServerId,
    /// Where their folders are.
    pub data: PathBuf,
    /// The shared log there, also of the control group's replica; and the disk.
    pub logs: Logs,
    /// A follower without a heartbeat for three to four times this long starts an election.
    pub election: Duration,
    /// How often replicas are compared.
    pub check_every: Option<Duration>,
}

/// All replicas of this server.
pub struct Replicas {
    options: ReplicasOptions,
    peers: Arc<Peers>,
    hosted: DashMap<JobShard, Replica>,
    waiting: RwLock<BTreeMap<JobShard, Stopped>>,
    /// When waiting replicas restarted, and their last pause.
    back: Mutex<BTreeMap<JobShard, (Instant, Duration)>>,
    needs: Needs,
    aside: Arc<RwLock<Vec<Aside>>>,
    /// Scans of quarantined folders in progress: until they end, it is unknown what can be read.
    looking: Arc<AtomicU64>,
    ending: AtomicBool,
    /// A replica has stopped, or waits.
    changes: Arc<Notify>,
    /// One replica starts or retires at a time.
    changing: tokio::sync::Mutex<()>,
    failed: AtomicU64,
    stages: Arc<Stages>,
    room: Arc<Room>,
}

impl Replicas {
    /// No replicas yet.
    pub fn new(options: ReplicasOptions, peers: Arc<Peers>) -> Self {
        Self {
            options,
            peers,
            hosted: DashMap::new(),
            waiting: RwLock::default(),
            back: Mutex::default(),
            needs: Needs::default(),
            aside: Arc::default(),
            looking: Arc::default(),
            ending: AtomicBool::new(false),
            changes: Arc::default(),
            changing: tokio::sync::Mutex::default(),
            failed: AtomicU64::new(0),
            stages: Arc::default(),
            room: Room::of_host(),
        }
    }

    /// With this much room; for tests.
    #[cfg(test)]
    fn within(self, room: Arc<Room>) -> Self {
        Self { room, ..self }
    }

    /// The connections to other servers, which name this server's fleet.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The memory for replicas, and what of it is promised.
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// The time that this process spends in the stages of gradients.
    pub fn stages(&self) -> &Arc<Stages> {
        &self.stages
    }

    /// The local replica of a shard, if any.
    pub fn get(&self, shard: JobShard) -> Option<Replica> {
        self.hosted.get(&shard).map(|r| r.clone())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.hosted.len()
    }

    /// Whether all of them sleep.
    pub fn all_asleep(&self) -> bool {
        self.hosted.iter().all(|r| r.group.is_asleep())
    }

    /// All of them, by shard.
    pub fn all(&self) -> Vec<(JobShard, Replica)> {
        let mut all: Vec<_> = self.hosted.iter().map(|r| (*r.key(), r.clone())).collect();
        all.sort_by_key(|(shard, _)| *shard);
        all
    }

    /// Starts a new replica, with a new name and an empty log, unless one of this founding is here and works.
    pub async fn host(
        &self,
        shard: JobShard,
        shards: u32,
        durability: Durability,
        founding: u64,
    ) -> Result<(), String> {
        let _one = self.changing.lock().await;
        if let Some(old) = self.get(shard) {
            if old.founding == founding && old.group.trouble().is_none() {
                return Ok(());
            }
            if old.founding == founding && old.shard.lacks_room().is_some() {
                return Ok(()); // it is about to wait for room
            }
            if old.folder.is_some() && !old.group.was_failed() && old.founding == founding {
                return Err("its storage has stopped: it is tried again".into());
            }
            self.hosted.remove(&shard);
            old.group.shutdown().await;
        }
        if let Some(waits) =
            self.waiting.read().get(&shard).filter(|w| w.founding.is_none_or(|o| o == founding))
        {
            // The reason was logged when it stopped, and is in the status: the directive repeats.
            return match waits.empty {
                true => Ok(()),
                false => Err(format!("a replica of it waits here for its storage: {}", waits.why)),
            };
        }
        let node = ReplicaId::new_incarnation(self.options.server);
        let place = self.folder(shard);
        if !place.names()?.is_empty() {
            tracing::warn!(
                %shard,
                founding = %format!("{founding:016x}"),
                "the replica on disk is of another founding than the shard that runs; a new one is created"
            );
            quarantine_folder(&place).await?;
            self.read_quarantine();
        }
        let aside = match self.room_for_known(shard, founding, None) {
            Ok(aside) => aside,
            Err(why) => {
                self.waits_for_room(shard, node, founding, why.clone());
                return Err(format!("a new replica of it waits for room: {why}"));
            }
        };
        self.waiting.write().remove(&shard);
        let folder = durability.on_disk().then_some(place);
        if let Some(folder) = &folder {
            let metadata = Metadata { node: node.0, founding, shards };
            folder.write(METADATA, &header::encode(&metadata).map_err(|e| e.to_string())?)?;
        }
        if let Err(e) = self.start(shard, shards, node, founding, folder.clone(), aside).await {
            // The replica has promised nothing. Without its folder the next try, under another name, has
            // nothing to quarantine.
            if let Some(folder) = folder
                && let Err(stays) = blocking(move || folder.remove().map_err(FolderError::passing)).await
            {
                tracing::debug!(%shard, error = %stays, "the folder of a replica that never began stays");
            }
            return Err(e.into());
        }
        tracing::info!(%shard, replica = %node, %durability, "hosting");
        Ok(())
    }

    async fn start(
        &self,
        id: JobShard,
        shards: u32,
        me: ReplicaId,
        founding: u64,
        folder: Option<Folder>,
        aside: Option<Reserved>,
    ) -> Result<(), FolderError> {
        let shard = Arc::new(Shard::within(self.room.clone(), id, shards));
        if let Some(aside) = aside {
            shard.expects(aside);
        }
        let (tell, applied) = watch::channel(());
        let staleness = Arc::new(Staleness::default());
        let (stages, state) = (self.stages.clone(), shard.clone());
        let observed = ObservedShard { shard: state, stages, staleness: staleness.clone(), applied: tell };
        let options = GroupOptions {
            group: GroupId::Shard(id).into(),
            me,
            folder: folder.clone(),
            election: self.options.election,
            check_every: self.options.check_every,
        };
        let started = Group::start(options, Arc::new(Hosted(Arc::new(observed))), self.peers.clone()).await;
        self.needs.learn(id, founding, shard.need());
        let group = started?;
        self.room.log_of(id, group.log_in_memory());
        let (mut leadership, changes) = (group.leadership(), self.changes.clone());
        tokio::spawn(async move {
            drop(leadership.wait_for(|l| l.role == Role::Stopped).await);
            changes.notify_one();
        });
        let counters = Arc::new(Counters { stages: self.stages.clone(), staleness, ..Counters::default() });
        let leader = leader::spawn(
            shard.clone(),
            Arc::new(group.clone()),
            counters.clone(),
            founding,
            leader::random_sessions(),
        );
        let queued = Arc::new(PayloadQueue::of_one_in(shards));
        let replica = Replica { shard, group, leader, counters, queued, founding, applied, folder };
        self.hosted.insert(id, replica);
        Ok(())
    }

    /// Stops a replica that must not run; it stays in the status, with the reason, until it is replaced.
    pub async fn fail(&self, shard: JobShard, node: ReplicaId, why: String) {
        let _one = self.changing.lock().await;
        if let Some(r) = self.get(shard).filter(|r| r.group.me() == node && r.group.trouble().is_none()) {
            self.failed.fetch_add(1, Relaxed);
            r.group.fail(why).await;
        }
    }

    /// Replicas that were stopped because they diverged, since the process began.
    pub fn diverged(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// Stops a replica for good: the membership at log index `index` does not include it. Refused if the
    /// replica knows a later membership that includes it: the plan of a former leader is outdated.
    pub async fn retire(&self, shard: JobShard, node: ReplicaId, index: u64) -> Result<(), String> {
        let _one = self.changing.lock().await;
        let empty = |w: &Stopped| w.empty && w.node.unwrap_or_default() == node;
        self.waiting.write().retain(|s, w| *s != shard || !empty(w));
        let Some(old) = self.get(shard).filter(|r| r.group.me() == node) else { return Ok(()) };
        let known = old.group.membership();
        if known.index > index && known.members.contains_key(&node) {
            return Err(format!("{node} is a member since log index {}: it stays", known.index));
        }
        tracing::info!(%shard, replica = %node, "retired");
        self.drop_replica(shard, &old).await;
        Ok(())
    }

    /// Deletes everything here of a shard whose job has none any more, with its files. Quarantined folders
    /// stay.
    pub async fn remove(&self, shard: JobShard) -> Result<(), String> {
        let _one = self.changing.lock().await;
        if let Some((_, old)) = self.hosted.remove(&shard) {
            old.group.shutdown().await;
        }
        let folder = self.folder(shard);
        blocking(move || match folder.path().exists() {
            true => folder.remove().map_err(FolderError::passing),
            false => Ok(()),
        })
        .await?;
        self.waiting.write().remove(&shard);
        self.needs.forget(shard);
        self.room.forget(shard);
        tracing::info!(%shard, "removed with its job");
        Ok(())
    }

    /// Deletes a replica whose group continues without it, and has its state.
    async fn drop_replica(&self, shard: JobShard, old: &Replica) {
        self.hosted.remove(&shard);
        let failed = old.group.trouble().is_some();
        old.group.shutdown().await;
        let Some(folder) = &old.folder else { return };
        if failed {
            match quarantine_folder(folder).await {
                Ok(()) => self.read_quarantine(),
                Err(e) => tracing::warn!(error = %e, "cannot be quarantined"),
            }
            return;
        }
        let gone = folder.clone();
        if let Err(e) = blocking(move || gone.remove().map_err(FolderError::passing)).await {
            tracing::warn!(path = %folder.path().display(), error = %e, "a retired replica's folder stays");
        }
    }

    /// Stops all replicas; their files stay.
    pub async fn shutdown(&self) {
        self.ending.store(true, Relaxed);
        self.changes.notify_one();
        let _one = self.changing.lock().await;
        for (_, replica) in self.all() {
            replica.group.shutdown().await;
        }
    }

    fn folder(&self, shard: JobShard) -> Folder {
        self.folder_at(&self.options.data.join(folder_name(shard)))
    }

    fn folder_at(&self, path: &Path) -> Folder {
        Folder::within(&self.options.logs, path)
    }
}

/// Runs work that waits for the disk, off the runtime's threads.
async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, FolderError> + Send + 'static,
) -> Result<T, FolderError> {
    tokio::task::spawn_blocking(f).await.map_err(FolderError::passing)?
}
