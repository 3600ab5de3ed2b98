//! Bulk between two processes of one host: it stays in memory that both map, and only where it lies travels.
//!
//! ```text
//!  worker                                            server
//!  Memory ── a push is encoded into a slot ──▶       Theirs: copied once, then checked, logged, applied
//!  Theirs ◀── the weights of a bucket, lent ──       Memory: where the replica's weights are
//!         ── given back ──▶                          an update that comes before copies them first
//! ```
//!
//! The descriptor comes over the Unix socket, behind the first message; who has mapped it says so, and from then on places do. What the other process may do to its own
//! memory at any moment is the reason for the copy: replicas, log and checks see bytes that nobody changes. A push's slot is
//! free again with its ack; when a process dies its mappings and descriptors go, and nothing of it is left.

mod halves;
mod memory;

pub use halves::{ReadHalf, WriteHalf, over_tcp, over_unix};
pub use memory::{Memory, Slot, Theirs};

use crate::{frame::FrameError, pool::Pool};
use bytes::Bytes;
use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// Bulk from so many bytes on is left where it lies: below it, its copy through the socket costs less than its place.
pub const SHARED_BYTES: usize = 16 << 10;

/// What is lent on one lane, at most: a reader that gives nothing back gets the rest through the socket.
const LENT_BYTES: usize = 64 << 20;

/// Whether what the other side refers to is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// It may change: a server copies what workers say.
    Copies,
    /// It stays until it is given back: a worker reads weights where they lie.
    Reads,
}

/// So much is worth a message of its own. Less goes with the next one, or when a sign of life is due: a server that has to change
/// what it has lent copies it, which takes no longer than to wake the threads that such a message would.
const COPY_BYTES: usize = 256 << 10;

/// What both halves of a lane know of the memory that its ends share.
#[derive(Debug)]
pub struct Shared {
    trust: Trust,
    ours: OnceLock<Arc<Memory>>,
    theirs: OnceLock<Arc<Theirs>>,
    /// The other side has mapped ours.
    mapped: AtomicBool,
    /// The other side is to be told that theirs is mapped.
    tells: AtomicBool,
    /// Descriptors that came, and whose message has not been read yet.
    pub(crate) fds: Mutex<VecDeque<OwnedFd>>,
    lent: Mutex<Lent>,
    given_back: Mutex<GivenBack>,
}

/// Places that are to be given back, and the bytes there.
#[derive(Debug, Default)]
struct GivenBack {
    places: Vec<u64>,
    bytes: usize,
}

/// By place: the bytes, and how often.
#[derive(Debug, Default)]
struct Lent {
    at: HashMap<u64, Vec<Bytes>>,
    bytes: usize,
}

pub(crate) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(|e| e.into_inner())
}

impl Shared {
    /// Of one lane.
    pub fn new(trust: Trust) -> Arc<Self> {
        Arc::new(Self {
            trust,
            ours: OnceLock::new(),
            theirs: OnceLock::new(),
            mapped: AtomicBool::new(false),
            tells: AtomicBool::new(false),
            fds: Mutex::default(),
            lent: Mutex::default(),
            given_back: Mutex::default(),
        })
    }

    /// From now on bulk that lies in this memory is left there. The first memory counts.
    pub fn offer(&self, memory: &Arc<Memory>) {
        let _ = self.ours.set(memory.clone());
    }

    pub(crate) fn ours(&self) -> Option<&Arc<Memory>> {
        self.ours.get()
    }

    /// Where the other side finds these bytes; `None`: they must travel. A server holds them until they are given back.
    pub(crate) fn place_of(&self, bytes: &Bytes) -> Option<u64> {
        let at = self.ours.get().filter(|_| bytes.len() >= SHARED_BYTES)?.place_of(bytes)?;
        let at = at.is_multiple_of(memory::UNIT).then_some(at as u64)?;
        if self.trust == Trust::Copies {
            let mut lent = lock(&self.lent);
            if lent.bytes + bytes.len() > LENT_BYTES {
                return None;
            }
            lent.bytes += bytes.len();
            lent.at.entry(at).or_default().push(bytes.clone());
        }
        Some(at)
    }

    /// The other side has read what lies there. What was not lent is nobody's.
    pub(crate) fn returned(&self, at: u64) {
        let mut lent = lock(&self.lent);
        let Some(of) = lent.at.get_mut(&at) else { return };
        let back = of.pop();
        if of.is_empty() {
            lent.at.remove(&at);
        }
        lent.bytes -= back.as_ref().map_or(0, Bytes::len);
    }

    /// The other side's memory has come.
    pub(crate) fn map(&self) -> io::Result<()> {
        let fd = lock(&self.fds).pop_front().ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "shared memory without a descriptor")
        })?;
        if self.theirs.set(Arc::new(Theirs::new(&fd)?)).is_ok() {
            self.tells.store(true, Relaxed);
        }
        Ok(())
    }

    /// The other side has mapped ours.
    pub(crate) fn note_mapped(&self) {
        self.mapped.store(true, Relaxed);
    }

    /// Whether bulk may be left in our memory.
    pub(crate) fn may_lie(&self) -> bool {
        self.mapped.load(Relaxed)
    }

    /// Whether the other side is to be told that theirs is mapped; once.
    pub(crate) fn take_mapped(&self) -> bool {
        self.tells.load(Relaxed) && self.tells.swap(false, Relaxed)
    }

    /// The bulk that the other side refers to.
    pub(crate) fn bulk(self: &Arc<Self>, at: u64, len: usize, pool: &Arc<Pool>) -> Result<Bytes, FrameError> {
        let theirs = self.theirs.get();
        let place = usize::try_from(at).ok().zip(theirs).filter(|(place, theirs)| theirs.has(*place, len));
        let (place, theirs) = place.ok_or(FrameError::NotShared)?;
        Ok(match self.trust {
            Trust::Copies => {
                let mut copy = pool.take(len);
                theirs.copy(place, &mut copy);
                copy.freeze()
            }
            Trust::Reads => {
                Bytes::from_owner(Borrowed { theirs: theirs.clone(), shared: self.clone(), at, len })
            }
        })
    }

    /// Whether enough is to be given back for a message of its own.
    pub(crate) fn has_much_to_return(&self) -> bool {
        lock(&self.given_back).bytes >= COPY_BYTES
    }

    /// What is to be given back.
    pub(crate) fn to_return(&self) -> Vec<u64> {
        std::mem::take(&mut *lock(&self.given_back)).places
    }
}

/// Bytes of the other side, given back with this.
struct Borrowed {
    theirs: Arc<Theirs>,
    shared: Arc<Shared>,
    at: u64,
    len: usize,
}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        self.theirs.bytes(self.at as usize, self.len)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let mut back = lock(&self.shared.given_back);
        back.places.push(self.at);
        back.bytes += self.len;
    }
}

#[cfg(test)]
mod tests;
