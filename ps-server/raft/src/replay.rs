//! Rebuilds the state of a stopped replica from its folder: the snapshot, then the log entry by entry, with the
//! code that applied it.

use super::{checks::Digest, disk::Folder, replicated::GroupState, types::Entry};
use openraft::{EntryPayload, entry::RaftEntry};

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplayResult {
    /// The log index of the replayed snapshot; 0: there was none.
    pub snapshot: u64,
    /// The last entry that was applied.
    pub index: u64,
    /// The term of that entry.
    pub term: u64,
    /// Entries applied after the snapshot.
    pub entries: u64,
    /// The last entry in the log.
    pub end: u64,
    /// The state's digest at the log's checks, where the replicas compared theirs, and at `index`, with the entry's
    /// term: logs with the same entry there are equal up to it.
    pub digests: Vec<(u64, Digest)>,
}

/// Rebuilds `state`, which must be new, from `folder`, up to and including entry `upto`. Changes nothing on disk.
/// The error names the file and the problem.
pub fn replay(folder: &Folder, state: &GroupState, upto: u64) -> Result<ReplayResult, String> {
    let at = folder.path().display();
    let mut done = ReplayResult::default();
    if let Some(last) = folder.snapshot_end()? {
        done.snapshot = last.index;
        if done.snapshot > upto {
            return Err(format!(
                "{at}: its snapshot is of log index {}, and what was before it is gone: index {upto} cannot be rebuilt",
                done.snapshot
            ));
        }
        folder.snapshot().restore(state)?;
        (done.index, done.term) = (done.snapshot, last.committed_leader_id().term);
    }
    done.end = done.index;
    let mut wrong = None;
    folder.inspect(&mut |entry| {
        done.end = entry.log_id().index;
        if wrong.is_none() {
            wrong = done.take(entry, state, upto).err();
        }
    })?;
    if let Some(why) = wrong {
        return Err(format!("{at}: {why}"));
    }
    if done.digests.last().is_none_or(|(_, d)| d.index < done.index) {
        done.digests.push((done.term, Digest { index: done.index, digest: state.image().into_digest() }));
    }
    Ok(done)
}

impl ReplayResult {
    /// Applies the next entry of the log, unless the snapshot contains it or it is beyond `upto`.
    fn take(&mut self, entry: Entry, state: &GroupState, upto: u64) -> Result<(), String> {
        let id = entry.log_id();
        if id.index <= self.snapshot && self.snapshot > 0 || id.index > upto {
            return Ok(());
        }
        if self.entries + self.snapshot > 0 && id.index != self.index + 1 {
            return Err(format!("entry {} is missing, before entry {}", self.index + 1, id.index));
        }
        match entry.payload {
            EntryPayload::Normal(change) if change.is_check() => {
                let digest = Digest { index: id.index, digest: state.image().into_digest() };
                self.digests.push((id.committed_leader_id().term, digest));
            }
            EntryPayload::Normal(change) => {
                state.apply(&change).map_err(|e| format!("entry {}: {e}", id.index))?;
            }
            EntryPayload::Blank | EntryPayload::Membership(_) => {}
        }
        (self.index, self.term) = (id.index, id.committed_leader_id().term);
        self.entries += 1;
        Ok(())
    }
}
