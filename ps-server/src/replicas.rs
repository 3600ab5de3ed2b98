//! The replicas of shards on this server: started, found again on disk, retired.

use crate::{
    header,
    raft::{Folder, Group, GroupId, GroupOptions, Peers, ReplicaId},
    shard::{
        Observed, Shard,
        lateness::Lateness,
        owner::{self, Counters, Event},
        queued::Queued,
    },
};
use paraft_common::{Durability, ServerId, ShardId};
use paraft_store::Disk;
use paraft_trace::Stages;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::{mpsc, watch};

/// One replica and what belongs to it. Cheap to clone.
#[derive(Clone)]
pub struct Replica {
    /// The replicated state.
    pub shard: Arc<Shard>,
    /// Replication.
    pub group: Group,
    /// Takes the messages of streams.
    pub owner: mpsc::Sender<Event>,
    /// What the owner counts.
    pub counters: Arc<Counters>,
    /// What its streams may have brought that the owner has not taken.
    pub queued: Arc<Queued>,
    /// Names the founding of the shard's state.
    pub origin: u64,
    /// Changes with everything that is applied here; closes with the replica.
    pub applied: watch::Receiver<()>,
}

/// What a replica's folder says of it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Card {
    node: u64,
    pub(crate) origin: u64,
    pub(crate) shards: u32,
}

const CARD: &str = "replica";

/// How replicas are started.
pub struct ReplicasOptions {
    /// This server.
    pub server: ServerId,
    /// Where their folders are.
    pub data: PathBuf,
    /// On which disk.
    pub disk: Arc<dyn Disk>,
    /// A follower that hears nothing for three to four times this long stands for election.
    pub election: Duration,
    /// How often replicas are compared.
    pub parity: Option<Duration>,
}

/// All replicas of this server.
pub struct Replicas {
    options: ReplicasOptions,
    peers: Arc<Peers>,
    hosted: RwLock<BTreeMap<ShardId, Replica>>,
    /// One is started or retired at a time.
    changing: tokio::sync::Mutex<()>,
    failed: AtomicU64,
    stages: Arc<Stages>,
}

impl Replicas {
    /// None yet.
    pub fn new(options: ReplicasOptions, peers: Arc<Peers>) -> Self {
        Self {
            options,
            peers,
            hosted: RwLock::default(),
            changing: tokio::sync::Mutex::default(),
            failed: AtomicU64::new(0),
            stages: Arc::default(),
        }
    }

    /// What this process spends in the stages of gradients.
    pub fn stages(&self) -> &Arc<Stages> {
        &self.stages
    }

    /// The replica of a shard, if it is here.
    pub fn get(&self, shard: ShardId) -> Option<Replica> {
        self.hosted.read().get(&shard).cloned()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.hosted.read().len()
    }

    /// All of them, by shard.
    pub fn all(&self) -> Vec<(ShardId, Replica)> {
        self.hosted.read().iter().map(|(s, r)| (*s, r.clone())).collect()
    }

    /// Starts what earlier lives of this server have left on disk. A replica that cannot be read is put aside:
    /// the others have its state, and it will be replaced.
    pub async fn reopen(&self) {
        let Ok(folders) = std::fs::read_dir(&self.options.data) else { return };
        for path in folders.flatten().map(|f| f.path()) {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let Some(shard) = shard_of_folder(name) else { continue };
            if let Err(e) = self.reopen_one(shard, &path).await {
                tracing::error!(%shard, error = %e, "a replica on disk cannot be used; it will be replaced");
                put_aside(&path);
            }
        }
    }

    async fn reopen_one(&self, shard: ShardId, path: &Path) -> Result<(), String> {
        let folder = Folder::new(self.options.disk.clone(), path);
        let Some(card) = read_card(&folder)? else {
            return folder.remove().map_err(|e| e.to_string()); // it was never begun
        };
        let node = ReplicaId(card.node);
        if node.server() != self.options.server {
            return Err(format!("{} belongs to {}", path.display(), node.server()));
        }
        self.start(shard, card.shards, node, card.origin, Some(folder)).await?;
        tracing::info!(%shard, replica = %node, "found on disk");
        Ok(())
    }

    /// Starts a new replica, with a new name and an empty log, unless one of this founding is here and works.
    pub async fn host(
        &self,
        shard: ShardId,
        shards: u32,
        durability: Durability,
        origin: u64,
    ) -> Result<(), String> {
        let _one = self.changing.lock().await;
        if let Some(old) = self.get(shard) {
            if old.origin == origin && old.group.trouble().is_none() {
                return Ok(());
            }
            self.drop_replica(shard, &old).await;
        }
        let node = ReplicaId::new_life(self.options.server);
        let path = self.folder(shard);
        let folder = durability.on_disk().then(|| Folder::new(self.options.disk.clone(), &path));
        if path.exists() {
            put_aside(&path);
        }
        if let Some(folder) = &folder {
            let card = Card { node: node.0, origin, shards };
            folder.write(CARD, &header::encode(&card).map_err(|e| e.to_string())?)?;
        }
        self.start(shard, shards, node, origin, folder).await?;
        tracing::info!(%shard, replica = %node, %durability, "hosting");
        Ok(())
    }

    async fn start(
        &self,
        id: ShardId,
        shards: u32,
        me: ReplicaId,
        origin: u64,
        folder: Option<Folder>,
    ) -> Result<(), String> {
        let shard = Arc::new(Shard::new(id, shards));
        let (tell, applied) = watch::channel(());
        let lateness = Arc::new(Lateness::default());
        let (stages, state) = (self.stages.clone(), shard.clone());
        let observed = Observed { shard: state, stages, lateness: lateness.clone(), applied: tell };
        let options = GroupOptions {
            group: GroupId::Shard(id),
            me,
            folder,
            election: self.options.election,
            parity: self.options.parity,
        };
        let group = Group::start(options, Arc::new(observed), self.peers.clone()).await?;
        let counters = Arc::new(Counters { stages: self.stages.clone(), lateness, ..Counters::default() });
        let owner = owner::spawn(shard.clone(), Arc::new(group.clone()), counters.clone(), origin);
        let queued = Arc::new(Queued::of_one_in(shards));
        self.hosted.write().insert(id, Replica { shard, group, owner, counters, queued, origin, applied });
        Ok(())
    }

    /// Stops a replica that must not go on; it stays in the status, with the reason, until it is replaced.
    pub async fn fail(&self, shard: ShardId, node: ReplicaId, why: String) {
        let _one = self.changing.lock().await;
        if let Some(r) = self.get(shard).filter(|r| r.group.me() == node && r.group.trouble().is_none()) {
            self.failed.fetch_add(1, Relaxed);
            r.group.fail(why).await;
        }
    }

    /// Replicas that were stopped because they had diverged, since the process began.
    pub fn diverged(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// Stops a replica for good: the membership at log index `index` has it no more. Refused where it knows a later one
    /// that has it: whoever planned this, a leader of the past, has been overtaken.
    pub async fn retire(&self, shard: ShardId, node: ReplicaId, index: u64) -> Result<(), String> {
        let _one = self.changing.lock().await;
        let Some(old) = self.get(shard).filter(|r| r.group.me() == node) else { return Ok(()) };
        let known = old.group.membership();
        if known.index > index && known.members.contains_key(&node) {
            return Err(format!("{node} is a member since log index {}: it stays", known.index));
        }
        tracing::info!(%shard, replica = %node, "retired");
        self.drop_replica(shard, &old).await;
        Ok(())
    }

    async fn drop_replica(&self, shard: ShardId, old: &Replica) {
        self.hosted.write().remove(&shard);
        let failed = old.group.trouble().is_some();
        old.group.shutdown().await;
        let path = self.folder(shard);
        if failed && path.exists() {
            return put_aside(&path);
        }
        if let Err(e) = Folder::new(self.options.disk.clone(), &path).remove() {
            tracing::warn!(path = %path.display(), error = %e, "a retired replica's folder stays");
        }
    }

    /// Stops all of them; what is on disk stays.
    pub async fn shutdown(&self) {
        for (_, replica) in self.all() {
            replica.group.shutdown().await;
        }
    }

    fn folder(&self, shard: ShardId) -> PathBuf {
        self.options.data.join(format!("shard-{}", shard.0))
    }
}

/// The shard that a folder of this name holds a replica of.
pub(crate) fn shard_of_folder(name: &str) -> Option<ShardId> {
    name.strip_prefix("shard-").and_then(|n| n.parse().ok()).map(ShardId)
}

/// Which replica the folder belongs to; `None`: it was never begun.
pub(crate) fn read_card(folder: &Folder) -> Result<Option<Card>, String> {
    let Some(card) = folder.read(CARD)? else { return Ok(None) };
    header::decode(&card).map(Some).map_err(|e| format!("{}: {e}", folder.path().join(CARD).display()))
}

/// Keeps what could not be used, for a person to look at; the latest such folder replaces the one before.
fn put_aside(path: &Path) {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".unusable");
    let _ = std::fs::remove_dir_all(&aside);
    if let Err(e) = std::fs::rename(path, &aside) {
        tracing::warn!(path = %path.display(), error = %e, "cannot be put aside");
    }
}
