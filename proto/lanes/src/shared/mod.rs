//! Bulk between two processes of one host: it stays in memory that both map, and only its place is sent.
//!
//! ```text
//! worker                                            server
//! Memory     ── a push is encoded into a slot ──▶   PeerMemory: copied once, then checked, logged, applied
//! PeerMemory ◀── the weights of a bucket, lent ──   Memory: where the replica's weights are
//!        ── given back ──▶                          an update before that copies them first
//! ```
//!
//! The descriptor comes over the Unix socket, after the first message. A side that has mapped it says so, and
//! from then on places are sent. A server copies because a worker may change its own memory at any moment:
//! replicas, log and checks need bytes that do not change. A push's slot is free again with its ack. When a
//! process dies, its mappings and descriptors go, and nothing of it is left.

mod halves;
mod memory;

pub use halves::{ReadHalf, WriteHalf, over_tcp, over_unix};
pub use memory::{Memory, PeerMemory, Slot};

use crate::{error::FrameError, pool::Pool};
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

/// Bulk of at least this many bytes stays in place: below it, its copy through the socket costs less than its
/// place.
pub const SHARED_BYTES: usize = 16 << 10;

/// Maximum bytes lent on one lane: a reader that gives nothing back gets the rest through the socket.
const MAX_LENT_BYTES: usize = 64 << 20;

/// Whether payloads in the peer's memory are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// They may change: a server copies what workers send.
    Copies,
    /// They stay until they are given back: a worker reads weights in place.
    Reads,
}

/// This much to give back is worth a message of its own. Less goes with the next message or keepalive: a
/// server that has to change lent bytes copies them, which is no slower than waking the threads for such a
/// message.
const MIN_RETURN_BYTES: usize = 256 << 10;

/// What both halves of a lane know of the memory that its ends share.
#[derive(Debug)]
pub struct Shared {
    trust: Trust,
    ours: OnceLock<Arc<Memory>>,
    theirs: OnceLock<Arc<PeerMemory>>,
    /// The peer has mapped ours.
    mapped: AtomicBool,
    /// We must tell the peer that we have mapped theirs.
    tells: AtomicBool,
    /// Received descriptors whose message is not read yet.
    pub(crate) fds: Mutex<VecDeque<OwnedFd>>,
    lent: Mutex<Loans>,
    given_back: Mutex<PendingReturns>,
}

/// Places to give back, and their bytes.
#[derive(Debug, Default)]
struct PendingReturns {
    places: Vec<u64>,
    bytes: usize,
}

/// By place: the bytes, and how often they are lent.
#[derive(Debug, Default)]
struct Loans {
    at: HashMap<u64, Vec<Bytes>>,
    bytes: usize,
}

pub(crate) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(|e| e.into_inner())
}

impl Shared {
    /// For one lane.
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

    /// From now on bulk in this memory stays there. The first memory counts.
    pub fn offer(&self, memory: &Arc<Memory>) {
        let _ = self.ours.set(memory.clone());
    }

    pub(crate) fn ours(&self) -> Option<&Arc<Memory>> {
        self.ours.get()
    }

    /// Where the peer finds these bytes; `None`: they must be sent. A server holds them until they are given
    /// back.
    pub(crate) fn place_of(&self, bytes: &Bytes) -> Option<u64> {
        let at = self.ours.get().filter(|_| bytes.len() >= SHARED_BYTES)?.place_of(bytes)?;
        let at = at.is_multiple_of(memory::UNIT).then_some(at as u64)?;
        if self.trust == Trust::Copies {
            let mut lent = lock(&self.lent);
            if lent.bytes + bytes.len() > MAX_LENT_BYTES {
                return None;
            }
            lent.bytes += bytes.len();
            lent.at.entry(at).or_default().push(bytes.clone());
        }
        Some(at)
    }

    /// The peer has read the bytes at a place. A place that was not lent is ignored.
    pub(crate) fn returned(&self, at: u64) {
        let mut lent = lock(&self.lent);
        let Some(of) = lent.at.get_mut(&at) else { return };
        let back = of.pop();
        if of.is_empty() {
            lent.at.remove(&at);
        }
        lent.bytes -= back.as_ref().map_or(0, Bytes::len);
    }

    /// Maps the peer's memory, whose descriptor has arrived.
    pub(crate) fn map(&self) -> io::Result<()> {
        let fd = lock(&self.fds).pop_front().ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "shared memory without a descriptor")
        })?;
        if self.theirs.set(Arc::new(PeerMemory::new(&fd)?)).is_ok() {
            self.tells.store(true, Relaxed);
        }
        Ok(())
    }

    /// The peer has mapped our memory.
    pub(crate) fn note_mapped(&self) {
        self.mapped.store(true, Relaxed);
    }

    /// Whether bulk may stay in our memory.
    pub(crate) fn may_stay_in_memory(&self) -> bool {
        self.mapped.load(Relaxed)
    }

    /// Whether to tell the peer that its memory is mapped; once.
    pub(crate) fn take_mapped(&self) -> bool {
        self.tells.load(Relaxed) && self.tells.swap(false, Relaxed)
    }

    /// The bulk at a place of the peer's memory.
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

    /// Whether there is enough to give back for a message of its own.
    pub(crate) fn has_enough_to_return(&self) -> bool {
        lock(&self.given_back).bytes >= MIN_RETURN_BYTES
    }

    /// The places to give back.
    pub(crate) fn places_to_return(&self) -> Vec<u64> {
        std::mem::take(&mut *lock(&self.given_back)).places
    }
}

/// Bytes of the peer's memory; dropping them gives them back.
struct Borrowed {
    theirs: Arc<PeerMemory>,
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
