//! Received bytes of a connection that are not read yet, sealed and opened. A tokio stream and a thread's
//! stream both have one; they own the socket.

use crate::{error::TlsError, handshake::Handshake, record::Opener};
use std::io::{self, ErrorKind};

/// Bytes per read while little arrives.
const SMALL_READ_BYTES: usize = 20 << 10;
/// Bytes per read while much arrives.
const LARGE_READ_BYTES: usize = 256 << 10;

/// Readers with this much room get the bytes without a copy.
const MIN_DIRECT_BYTES: usize = 64 << 10;

/// The received bytes of a connection. See the module.
#[derive(Default)]
pub(crate) struct Incoming {
    /// As received, from `start` to `end`.
    raw: Vec<u8>,
    start: usize,
    end: usize,
    /// The opened data from `at` on, for which the reader had no room.
    plain: Vec<u8>,
    at: usize,
    over: bool,
    /// The last read filled its room.
    much: bool,
}

impl Incoming {
    /// Whether nothing more will arrive.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Whether bytes have arrived that were not handled since.
    pub fn has_raw(&self) -> bool {
        self.end > self.start
    }

    /// The received bytes that are not consumed.
    pub fn raw(&self) -> &[u8] {
        &self.raw[self.start..self.end]
    }

    /// Passes the opened data to `take`, as much as it takes; returns how much.
    pub fn give(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> usize {
        let rest = &self.plain[self.at..];
        let n = if rest.is_empty() { 0 } else { take(rest) };
        self.at += n;
        if self.at == self.plain.len() {
            self.plain.clear();
            self.at = 0;
            if self.plain.capacity() > LARGE_READ_BYTES {
                self.plain = Vec::new();
            }
        }
        n
    }

    /// Opens complete records as long as `take` takes their contents; the rest of the last one is kept. The
    /// others stay sealed until there is room for them, so that their contents are copied once.
    /// Returns how much it took, and whether the peer asks this side to change its key.
    pub fn open(
        &mut self,
        opener: &mut Opener,
        take: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Result<(usize, bool), TlsError> {
        let (plain, mut taken) = (&mut self.plain, 0);
        let mut hear = |said: &[u8]| {
            let n = take(said);
            taken += n;
            plain.extend_from_slice(&said[n..]);
            plain.is_empty()
        };
        let came = opener.open(&mut self.raw[self.start..self.end], &mut hear)?;
        self.used(came.used);
        self.over = came.end;
        Ok((taken, came.asks))
    }

    /// Reads from the socket into the reader's own buffer and opens the records there, so that their contents are
    /// not copied: what is sealed is longer than its contents, which therefore fit. Only for readers with room for
    /// [`MIN_DIRECT_BYTES`], when no opened data and no complete record waits. Returns as [`Self::open`] does.
    pub fn read_to(
        &mut self,
        opener: &mut Opener,
        to: &mut [u8],
        read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<(usize, bool)> {
        let kept = self.raw().len();
        let came = kept + read_some(&mut to[kept..], read)?;
        to[..kept].copy_from_slice(self.raw());
        (self.start, self.end, self.much) = (0, 0, false);
        let (opened, contents) = opener.open_to_front(&mut to[..came])?;
        let rest = &to[opened.used..came];
        if self.raw.len() < rest.len() {
            self.raw.resize(rest.len(), 0);
        }
        self.raw[..rest.len()].copy_from_slice(rest);
        self.end = rest.len();
        self.over = opened.end;
        Ok((contents, opened.asks))
    }

    /// Whether [`Self::read_to`] may be called for a reader with so much room.
    pub fn reads_directly(&self, room: usize) -> bool {
        room >= MIN_DIRECT_BYTES && self.plain.is_empty() && self.raw().len() < SMALL_READ_BYTES
    }

    /// One step of the handshake; `true`: it is over. Its output must be sent even if it has failed.
    pub fn handshake_step(&mut self, handshake: &mut Handshake) -> Result<bool, TlsError> {
        if handshake.begins_plain(self.raw()) {
            return Err(TlsError::Plain);
        }
        let plain = &mut self.plain;
        let mut hear = |said: &[u8]| plain.extend_from_slice(said);
        let (used, over) = handshake.read(&mut self.raw[self.start..self.end], &mut hear)?;
        self.used(used);
        Ok(over)
    }

    fn used(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Takes the bytes that the socket has.
    pub fn fill(&mut self, mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<()> {
        self.raw.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = if self.much { LARGE_READ_BYTES } else { SMALL_READ_BYTES };
        if self.raw.len() != room && self.end <= room {
            self.raw.resize(room, 0);
            if room == SMALL_READ_BYTES {
                self.raw.shrink_to_fit();
            }
        }
        if self.end == self.raw.len() {
            self.raw.resize(self.end + SMALL_READ_BYTES, 0);
        }
        let n = read_some(&mut self.raw[self.end..], &mut read)?;
        self.end += n;
        self.much = self.end == self.raw.len() || (self.much && n > SMALL_READ_BYTES);
        Ok(())
    }
}

/// One read that is not interrupted; its end is an error, since a peer says so when it ends.
fn read_some(to: &mut [u8], mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match read(to) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
