//! A replica's vote on disk. Others wait for it: a candidate for its own, and then for those of the voters.

use super::{disk::Folder, types::Vote};
use paraft_store::PairFile;
use parking_lot::Mutex;
use std::{
    io,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
};
use tokio::sync::oneshot;

/// The file of a replica's vote.
pub(super) struct VoteFile(Arc<Inner>);

struct Inner {
    folder: Folder,
    /// Locked while the disk is waited for.
    written: Mutex<Written>,
    /// The last vote that is durable.
    durable: Mutex<Option<Vote>>,
    /// Number of votes so far.
    given: AtomicU64,
    /// The replica has ended: the next one under its name writes the file.
    closed: AtomicBool,
}

#[derive(Default)]
struct Written {
    /// The number of the last vote.
    number: u64,
    /// `None` before the first vote of this process, and after an error: then the file is replaced.
    file: Option<PairFile>,
}

impl VoteFile {
    /// The file in a replica's folder.
    pub fn new(folder: Folder) -> Self {
        Self(Arc::new(Inner {
            folder,
            written: Mutex::default(),
            durable: Mutex::default(),
            given: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }))
    }

    /// No more votes are written from now on; one may be being written.
    pub fn close(&self) {
        self.0.closed.store(true, SeqCst);
    }

    /// Waits until none is being written.
    pub fn settle(&self) {
        drop(self.0.written.lock());
    }

    /// Writes a vote, encoded as `bytes`; the result says when it is durable. `None`: the caller need not wait,
    /// because a durable vote promises the same. When a candidate becomes the leader, the votes for it change in
    /// nothing else.
    pub fn write(
        &self,
        vote: Vote,
        bytes: impl AsRef<[u8]> + Send + 'static,
    ) -> Option<oneshot::Receiver<io::Result<()>>> {
        let number = self.0.given.fetch_add(1, Relaxed) + 1;
        let promised = self.0.durable.lock().is_some_and(|durable| durable.leader_id() == vote.leader_id());
        let (this, (told, durable)) = (self.0.clone(), oneshot::channel());
        tokio::task::spawn_blocking(move || {
            let mut written = this.written.lock();
            let _ = told.send(this.put(&mut written, number, vote, bytes.as_ref(), promised));
            // After the result is sent: no caller waits for the second copy.
            if written.file.as_mut().is_some_and(|file| file.complete().is_err()) {
                written.file = None;
            }
        });
        (!promised).then_some(durable)
    }
}

impl Inner {
    fn put(
        &self,
        written: &mut Written,
        number: u64,
        vote: Vote,
        bytes: &[u8],
        promised: bool,
    ) -> io::Result<()> {
        if self.closed.load(SeqCst) {
            let why = "this replica has ended: it does not vote";
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, why));
        }
        if number < written.number {
            return Ok(()); // only a vote that no caller waits for can be overtaken by a later one
        }
        written.number = number;
        let kept = written.file.take();
        let file = match kept.and_then(|mut file| file.write(bytes).is_ok().then_some(file)) {
            Some(file) => file,
            // No caller waits for it, and the replica's next process may have replaced the file.
            None if promised => return Ok(()),
            None => self.folder.create_vote(bytes)?,
        };
        written.file = Some(file);
        *self.durable.lock() = Some(vote);
        Ok(())
    }
}

#[cfg(test)]
#[path = "vote_file_tests.rs"]
mod tests;
