//! What has come over a connection and is not read yet, sealed and opened. A stream of tokio and one of threads both have one; the
//! socket is theirs.

use crate::{
    handshake::{Handshake, TlsError},
    record::Opener,
};
use std::io::{self, ErrorKind};

/// Read at a time, where little comes.
const LITTLE: usize = 20 << 10;
/// Read at a time, where much comes.
const MUCH: usize = 256 << 10;

/// See the module.
#[derive(Default)]
pub(crate) struct Incoming {
    /// As it came, from `start` to `end`.
    raw: Vec<u8>,
    start: usize,
    end: usize,
    /// What it said, from `at` on, that had no room where it is read.
    plain: Vec<u8>,
    at: usize,
    over: bool,
    /// The last read filled its room.
    much: bool,
}

impl Incoming {
    /// Nothing more is said.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Whether something has come that was not looked at since.
    pub fn has_raw(&self) -> bool {
        self.end > self.start
    }

    /// What has come and is not used up.
    pub fn raw(&self) -> &[u8] {
        &self.raw[self.start..self.end]
    }

    /// Gives what was said, as much as `take` takes; how much that was.
    pub fn give(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> usize {
        let rest = &self.plain[self.at..];
        let n = if rest.is_empty() { 0 } else { take(rest) };
        self.at += n;
        if self.at == self.plain.len() {
            self.plain.clear();
            self.at = 0;
            if self.plain.capacity() > MUCH {
                self.plain = Vec::new();
            }
        }
        n
    }

    /// Opens the records that are whole: `take` gets what they say as far as it takes it, the rest is kept. How much it took, and
    /// whether the other side asks for another key from here.
    pub fn open(
        &mut self,
        opener: &mut Opener,
        take: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Result<(usize, bool), TlsError> {
        let (plain, mut taken) = (&mut self.plain, 0);
        let mut hear = |said: &[u8]| {
            let n = if plain.is_empty() { take(said) } else { 0 };
            taken += n;
            plain.extend_from_slice(&said[n..]);
        };
        let came = opener.open(&mut self.raw[self.start..self.end], &mut hear)?;
        self.used(came.used);
        self.over = came.end;
        Ok((taken, came.asks))
    }

    /// A step of the handshake; true: it is over. What it has to say goes out also where it has failed.
    pub fn greet(&mut self, handshake: &mut Handshake) -> Result<bool, TlsError> {
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

    /// Takes what the socket has.
    pub fn fill(&mut self, mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<()> {
        self.raw.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = if self.much { MUCH } else { LITTLE };
        if self.raw.len() != room && self.end <= room {
            self.raw.resize(room, 0);
            if room == LITTLE {
                self.raw.shrink_to_fit();
            }
        }
        if self.end == self.raw.len() {
            self.raw.resize(self.end + LITTLE, 0);
        }
        loop {
            match read(&mut self.raw[self.end..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    self.end += n;
                    self.much = self.end == self.raw.len() || (self.much && n > LITTLE);
                    return Ok(());
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}
