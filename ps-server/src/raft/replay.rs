//! The state of a replica that does not run, rebuilt from its folder: the snapshot, then the log entry by entry through
//! the code that applied it.

use super::{
    disk::{Folder, Left},
    machine::{Change, Replicated},
    parity::Digest,
};
use openraft::{EntryPayload, entry::RaftEntry};

/// What was replayed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// The log index of the snapshot that the replay began with; 0: it began with nothing.
    pub snapshot: u64,
    /// The last entry that was applied.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// Entries applied after the snapshot.
    pub entries: u64,
    /// The last entry in the log.
    pub end: u64,
    /// The state's digest at the log's checks, where the replicas compared theirs, and at `index`; with the entry's
    /// term: logs that have the same entry there are the same up to it.
    pub digests: Vec<(u64, Digest)>,
}

/// Rebuilds `state`, which must be new, from what is in `folder`, up to and including the entry `upto`. Changes nothing
/// on disk. The error names the file and what is wrong.
pub fn replay(folder: &Folder, state: &dyn Replicated, upto: u64) -> Result<Replayed, String> {
    let at = folder.path().display();
    let Left { snapshot, entries } = folder.look()?;
    let mut done = Replayed::default();
    if let Some((meta, image)) = snapshot {
        let last = meta.last_log_id.as_ref();
        done.snapshot = last.map_or(0, |l| l.index);
        if done.snapshot > upto {
            return Err(format!(
                "{at}: its snapshot is of log index {}, and what was before it is gone: index {upto} cannot be rebuilt",
                done.snapshot
            ));
        }
        state.install(&image).map_err(|e| format!("{at}: {e}"))?;
        (done.index, done.term) = (done.snapshot, last.map_or(0, |l| l.committed_leader_id().term));
    }
    done.end = entries.last().map_or(done.index, |e| e.log_id().index);
    for entry in entries {
        let id = entry.log_id();
        if id.index <= done.snapshot && done.snapshot > 0 {
            continue;
        }
        if id.index > upto {
            break;
        }
        if done.entries + done.snapshot > 0 && id.index != done.index + 1 {
            return Err(format!("{at}: entry {} is missing, before entry {}", done.index + 1, id.index));
        }
        match entry.payload {
            EntryPayload::Normal(Change::Check) => {
                let digest = Digest { index: id.index, digest: state.image().into_digest() };
                done.digests.push((id.committed_leader_id().term, digest));
            }
            EntryPayload::Normal(change) => _ = state.apply(&change),
            EntryPayload::Blank | EntryPayload::Membership(_) => {}
        }
        (done.index, done.term) = (id.index, id.committed_leader_id().term);
        done.entries += 1;
    }
    if done.digests.last().is_none_or(|(_, d)| d.index < done.index) {
        done.digests.push((done.term, Digest { index: done.index, digest: state.image().into_digest() }));
    }
    Ok(done)
}
