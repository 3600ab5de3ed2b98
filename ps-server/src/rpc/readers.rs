//! Bounds on the memory of readers: of all readers of a server, and of those with one certificate.
//!
//! A reader gets copies: it holds nothing of a shard's state, so no update waits or copies for it. All copies
//! that wait for their readers have at most `MAX_COPY_BYTES`, half of it for one certificate. A reader without room
//! waits; one that reads nothing loses its connection ([`crate::connections::TAKE_TIMEOUT`]), and with it its
//! copies.

use paraft_proto::{RefusalKind, limits::MAX_BUCKET_BYTES};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum bytes of copies that wait for their readers, over all shards of a server. What admission leaves
/// free of each host's memory has room for it.
const MAX_COPY_BYTES: usize = 32 * MAX_BUCKET_BYTES;
/// Maximum number of readers' streams; each takes about 20 KiB besides its copies.
const MAX_STREAMS: usize = 256;
/// One certificate may have `1 / SHARE_DIVISOR` of both, so that one bad reader leaves room for others.
const SHARE_DIVISOR: usize = 2;

/// All readers of a server.
pub struct Readers {
    bytes: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    of: Mutex<HashMap<String, Weak<Share>>>,
}

/// The share of one certificate.
struct Share {
    bytes: Arc<Semaphore>,
    streams: Arc<Semaphore>,
}

/// A reader's stream.
pub struct Reader {
    all: Arc<Semaphore>,
    share: Arc<Share>,
    _streams: [OwnedSemaphorePermit; 2],
}

/// Why a reader's stream ends early.
pub(super) enum Ended {
    /// The server refuses to continue.
    Refused(RefusalKind),
    /// The reader has gone.
    Gone,
}

impl From<RefusalKind> for Ended {
    fn from(kind: RefusalKind) -> Self {
        Self::Refused(kind)
    }
}

/// Room for a copy; dropping it frees the room.
pub struct Room {
    _bytes: [OwnedSemaphorePermit; 2],
}

impl Default for Readers {
    fn default() -> Self {
        let [bytes, streams] = [MAX_COPY_BYTES, MAX_STREAMS].map(|most| Arc::new(Semaphore::new(most)));
        Self { bytes, streams, of: Mutex::default() }
    }
}

impl Readers {
    /// A stream for a reader with this certificate.
    ///
    /// # Errors
    /// The maximum is reached.
    pub fn reader(&self, certificate: &str) -> Result<Reader, RefusalKind> {
        let share = self.share(certificate);
        let full = |most: usize, whose: &str| {
            let why = format!(
                "{most} streams read weights from this server{whose}, and more may not: take what they bring, or end some"
            );
            RefusalKind::Overloaded(why)
        };
        let own = share.streams.clone().try_acquire_owned();
        let own = own.map_err(|_| full(MAX_STREAMS / SHARE_DIVISOR, " with this certificate"))?;
        let any = self.streams.clone().try_acquire_owned().map_err(|_| full(MAX_STREAMS, ""))?;
        Ok(Reader { all: self.bytes.clone(), share, _streams: [own, any] })
    }

    fn share(&self, certificate: &str) -> Arc<Share> {
        let mut of = self.of.lock();
        if let Some(share) = of.get(certificate).and_then(Weak::upgrade) {
            return share;
        }
        of.retain(|_, share| share.strong_count() > 0);
        let [bytes, streams] =
            [MAX_COPY_BYTES, MAX_STREAMS].map(|most| Arc::new(Semaphore::new(most / SHARE_DIVISOR)));
        let share = Arc::new(Share { bytes, streams });
        of.insert(certificate.into(), Arc::downgrade(&share));
        share
    }

    /// Bytes of copies that wait for their readers.
    pub fn held(&self) -> usize {
        MAX_COPY_BYTES - self.bytes.available_permits()
    }
}

impl Reader {
    /// Waits for room for a copy of this many bytes.
    pub async fn room(&self, bytes: usize) -> Room {
        let bytes = bytes.clamp(1, MAX_COPY_BYTES / SHARE_DIVISOR) as u32;
        // Neither semaphore is ever closed. The own share first: a reader that waits for it holds nothing of
        // the others'.
        let own = self.share.bytes.clone().acquire_many_owned(bytes).await;
        let all = self.all.clone().acquire_many_owned(bytes).await;
        Room { _bytes: [own, all].map(|permit| permit.expect("no semaphore of readers is closed")) }
    }
}

#[cfg(test)]
#[path = "readers_tests.rs"]
mod tests;
