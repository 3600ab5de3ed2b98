//! What readers of a server may hold of its memory: all together, and those with one certificate.
//!
//! A reader gets copies: it holds nothing of a shard's state, so that no update waits for it or copies for it. The copies that wait for
//! their readers have `BYTES` at most, half of it those of one certificate. A reader that finds no room waits for its turn; one that takes
//! nothing loses its connection ([`crate::connections::TAKE_TIMEOUT`]), and with it its copies.

use paraft_proto::{RefusalKind, limits::MAX_BUCKET_BYTES};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Copies that wait for their readers, of all shards of a server. What admission leaves free of each host's memory has room for it.
const BYTES: usize = 32 * MAX_BUCKET_BYTES;
/// Streams of readers; each takes some 20 KiB beside its copies.
const STREAMS: usize = 256;
/// What one certificate may have of both: so one reader that misbehaves is not alone.
const SHARE: usize = 2;

/// All readers of a server.
pub struct Readers {
    bytes: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    of: Mutex<HashMap<String, Weak<Share>>>,
}

/// What those with one certificate may hold.
struct Share {
    bytes: Arc<Semaphore>,
    streams: Arc<Semaphore>,
}

/// A stream of a reader.
pub struct Reader {
    all: Arc<Semaphore>,
    share: Arc<Share>,
    _streams: [OwnedSemaphorePermit; 2],
}

/// Room for a copy; it is given back with it.
pub struct Room {
    _bytes: [OwnedSemaphorePermit; 2],
}

impl Default for Readers {
    fn default() -> Self {
        let [bytes, streams] = [BYTES, STREAMS].map(|most| Arc::new(Semaphore::new(most)));
        Self { bytes, streams, of: Mutex::default() }
    }
}

impl Readers {
    /// A stream for a reader with this certificate.
    ///
    /// # Errors
    /// There are as many as there may be.
    pub fn reader(&self, certificate: &str) -> Result<Reader, RefusalKind> {
        let share = self.share(certificate);
        let full = |most: usize, whose: &str| {
            let why = format!(
                "{most} streams read weights from this server{whose}, and more may not: take what they bring, or end some"
            );
            RefusalKind::Overloaded(why)
        };
        let own = share.streams.clone().try_acquire_owned();
        let own = own.map_err(|_| full(STREAMS / SHARE, " with this certificate"))?;
        let any = self.streams.clone().try_acquire_owned().map_err(|_| full(STREAMS, ""))?;
        Ok(Reader { all: self.bytes.clone(), share, _streams: [own, any] })
    }

    fn share(&self, certificate: &str) -> Arc<Share> {
        let mut of = self.of.lock();
        if let Some(share) = of.get(certificate).and_then(Weak::upgrade) {
            return share;
        }
        of.retain(|_, share| share.strong_count() > 0);
        let [bytes, streams] = [BYTES, STREAMS].map(|most| Arc::new(Semaphore::new(most / SHARE)));
        let share = Arc::new(Share { bytes, streams });
        of.insert(certificate.into(), Arc::downgrade(&share));
        share
    }

    /// Bytes of copies that wait for their readers.
    pub fn held(&self) -> usize {
        BYTES - self.bytes.available_permits()
    }
}

impl Reader {
    /// Waits for room for a copy of so many bytes.
    pub async fn room(&self, bytes: usize) -> Room {
        let bytes = bytes.clamp(1, BYTES / SHARE) as u32;
        // Neither is ever closed. The own share first: who waits for it holds nothing of the others'.
        let own = self.share.bytes.clone().acquire_many_owned(bytes).await;
        let all = self.all.clone().acquire_many_owned(bytes).await;
        Room { _bytes: [own, all].map(|permit| permit.expect("no semaphore of readers is closed")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn one_certificate_has_half_of_the_streams_and_of_the_bytes() {
        let readers = Readers::default();
        let mut hostile: Vec<Reader> = Vec::new();
        let refused = loop {
            match readers.reader("hostile") {
                Ok(reader) => hostile.push(reader),
                Err(refused) => break refused.to_string(),
            }
        };
        assert!(hostile.len() == STREAMS / SHARE && refused.contains("with this certificate"), "{refused}");
        let rooms: Vec<Room> =
            hostile.iter().filter_map(|reader| reader.room(MAX_BUCKET_BYTES).now_or_never()).collect();
        assert_eq!((rooms.len() * MAX_BUCKET_BYTES, readers.held()), (BYTES / SHARE, BYTES / SHARE));
        let honest = readers.reader("honest").expect("the other half");
        let room = honest.room(MAX_BUCKET_BYTES).now_or_never().expect("there is room");
        drop((rooms, room));
        assert_eq!(readers.held(), 0, "room comes back with the copies");
        hostile.pop();
        readers.reader("hostile").expect("one has ended");
    }

    #[test]
    fn streams_of_all_certificates_together_have_a_bound() {
        let readers = Readers::default();
        let all: Vec<_> = (0..2 * STREAMS).map(|i| readers.reader(&i.to_string())).collect();
        assert_eq!(all.iter().filter(|r| r.is_ok()).count(), STREAMS);
    }
}
