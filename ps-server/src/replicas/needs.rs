//! What the replicas here need of the server's memory, as far as it is known before they are opened: a small file beside
//! each log on disk says it. Room is set aside by it before anything of the replica is read.
//!
//! It only helps: what a job needs is found again when the log or the snapshot says which job it is. Without the file a
//! replica that finds no room has read its log in vain, once.

use super::{METADATA, Metadata, Replicas, Stopped, read_metadata};
use crate::{
    files::DataFile,
    header,
    raft::{Folder, ReplicaId},
    room::Reserved,
};
use paraft_common::{JobShard, need::Need};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// By shard: of which founding, and what it needs.
#[derive(Default)]
pub(super) struct Needs {
    known: Mutex<BTreeMap<JobShard, (u64, Need)>>,
    /// What was written beside the logs, or could not be.
    kept: Mutex<BTreeMap<JobShard, (ReplicaId, Need)>>,
}

/// The file. Another release may reckon otherwise: what it wrote does not count.
const NEED: DataFile = DataFile::Need;
const BY: &str = env!("CARGO_PKG_VERSION");

impl Needs {
    /// Of this founding; nothing where nothing is known.
    pub fn learn(&self, shard: JobShard, founding: u64, need: Option<Need>) {
        if let Some(need) = need {
            self.known.lock().insert(shard, (founding, need));
        }
    }

    /// Its job has no shards any more.
    pub fn forget(&self, shard: JobShard) {
        self.known.lock().remove(&shard);
        self.kept.lock().remove(&shard);
    }

    fn of(&self, shard: JobShard, founding: u64) -> Option<Need> {
        self.known.lock().get(&shard).filter(|(of, _)| *of == founding).map(|(_, need)| *need)
    }
}

impl Replicas {
    /// Room for what is known of this replica; `None` where nothing is. The error has the numbers.
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

    /// Nothing of a replica is left here, and there is no room for another.
    pub(super) fn waits_for_room(&self, shard: JobShard, node: ReplicaId, founding: u64, why: String) {
        let waits = Stopped { empty: true, ..self.waits(shard, Some((node, founding)), why) };
        self.waiting.write().insert(shard, waits);
    }

    /// Writes beside the logs what their replicas have been found to need.
    pub(super) async fn keep_needs(&self) {
        for (shard, replica) in self.all() {
            let (node, need) = (replica.group.me(), replica.shard.need());
            self.needs.learn(shard, replica.founding, need);
            self.room.over(shard, replica.shard.is_over());
            let (Some(need), Some(folder)) = (need, replica.folder) else { continue };
            if self.needs.kept.lock().insert(shard, (node, need)) == Some((node, need)) {
                continue;
            }
            // Nobody puts the folder aside meanwhile, or removes it.
            let _one = self.changing.lock().await;
            let write = move || write_need(&folder, node, &need);
            if let Ok(Err(e)) = tokio::task::spawn_blocking(write).await {
                self.needs.kept.lock().remove(&shard); // tried again
                tracing::debug!(%shard, error = e, "what it needs is not written down");
            }
        }
    }
}

fn read_need(folder: &Folder) -> Option<Need> {
    let bytes = folder.read(NEED).ok().flatten()?;
    let (by, need): (String, Need) = header::decode(&bytes).ok()?;
    (by == BY).then_some(need)
}

/// Only into the folder of this replica: what is unmounted, or was put aside, is not begun again by this file.
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
