//! The memory needs of the local replicas, as far as they are known before opening: a small file beside each
//! log on disk. Room is reserved by it before anything of the replica is read.
//!
//! It is only a hint: the need of a job is computed again when the log or the snapshot names the job. Without
//! the file, a replica without room has read its log in vain, once.

use super::{
    Replicas, Stopped,
    folder::{METADATA, Metadata, read_metadata},
};
use crate::{
    files::DataFile,
    header,
    raft::{Folder, ReplicaId},
    room::Reserved,
};
use paraft_common::{JobShard, need::Need};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// By shard: the founding, and the need.
#[derive(Default)]
pub(super) struct Needs {
    known: Mutex<BTreeMap<JobShard, (u64, Need)>>,
    /// What was written beside the logs, or could not be.
    kept: Mutex<BTreeMap<JobShard, (ReplicaId, Need)>>,
}

/// The file. Another release may compute otherwise: its files do not count.
const NEED: DataFile = DataFile::Need;
const BY: &str = env!("CARGO_PKG_VERSION");

impl Needs {
    /// Learns the need of this founding; `None` if it is unknown.
    pub fn learn(&self, shard: JobShard, founding: u64, need: Option<Need>) {
        if let Some(need) = need {
            self.known.lock().insert(shard, (founding, need));
        }
    }

    /// Forgets a shard whose job has no shards any more.
    pub fn forget(&self, shard: JobShard) {
        self.known.lock().remove(&shard);
        self.kept.lock().remove(&shard);
    }

    fn of(&self, shard: JobShard, founding: u64) -> Option<Need> {
        self.known.lock().get(&shard).filter(|(of, _)| *of == founding).map(|(_, need)| *need)
    }
}

impl Replicas {
    /// Reserves the known need of this replica; `None` if it is unknown. The error has the numbers.
    pub(super) fn room_for_known(
        &self,
        shard: JobShard,
        founding: u64,
        folder: Option<&Folder>,
    ) -> Result<Option<Reserved>, String> {
        let need = self.needs.of(shard, founding).or_else(|| folder.and_then(read_need));
        self.needs.learn(shard, founding, need);
        let aside = need.map(|need| self.room.reserve(shard, &need)).transpose();
        aside.map_err(|unable| unable.text().to_string())
    }

    /// Nothing of a replica is left here, and there is no room for another: it waits.
    pub(super) fn waits_for_room(&self, shard: JobShard, node: ReplicaId, founding: u64, why: String) {
        let waits = Stopped { empty: true, ..self.waits(shard, Some((node, founding)), why) };
        self.waiting.write().insert(shard, waits);
        self.changes.notify_one();
    }

    /// Writes the known needs of replicas beside their logs.
    pub(super) async fn keep_needs(&self) {
        for (shard, replica) in self.all() {
            let (node, need) = (replica.group.me(), replica.shard.need());
            self.needs.learn(shard, replica.founding, need);
            self.room.over(shard, replica.shard.is_over());
            let (Some(need), Some(folder)) = (need, replica.folder) else { continue };
            if self.needs.kept.lock().insert(shard, (node, need)) == Some((node, need)) {
                continue;
            }
            // So that the folder is not quarantined or removed meanwhile.
            let _one = self.changing.lock().await;
            let write = move || write_need(&folder, node, &need);
            if let Ok(Err(e)) = tokio::task::spawn_blocking(write).await {
                self.needs.kept.lock().remove(&shard); // tried again
                tracing::debug!(%shard, error = e, "its memory need cannot be written");
            }
        }
    }
}

fn read_need(folder: &Folder) -> Option<Need> {
    let bytes = folder.read(NEED).ok().flatten()?;
    let (by, need): (String, Need) = header::decode(&bytes).ok()?;
    (by == BY).then_some(need)
}

/// Writes only into the folder of this replica: this file must not create a folder that is unmounted, or was
/// quarantined.
fn write_need(folder: &Folder, node: ReplicaId, need: &Need) -> Result<(), String> {
    match read_metadata(folder)? {
        Some(Metadata { node: of, .. }) if of == node.0 => {}
        _ => {
            return Err(format!(
                "{}: the file `{}` is not this replica's",
                folder.path().display(),
                METADATA.name()
            ));
        }
    }
    if read_need(folder).as_ref() == Some(need) {
        return Ok(());
    }
    let bytes = header::encode(&(BY, need)).map_err(|e| e.to_string())?;
    Ok(folder.write(NEED, &bytes)?)
}
