//! Raw TLS: a plain socket whose every byte is sealed and opened in records like those of TLS 1.3 (RFC 8446, section 5),
//! with AES-128-GCM by the library that our own records use.
//!
//! It shows what the arithmetic and the sockets take, and protects nothing: there is no handshake, both ends take their
//! keys from a constant, a new connection numbers its records from 0 again, and no key is ever changed. Each direction has a
//! key and a count of its own; the header of a record is its additional data.
//!
//! What is sent is copied to one buffer, sealed there, and written when the buffer is full or at a flush, with one write.
//! What comes is read into another buffer, opened there, and copied to where the reader wants it.

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use std::{
    io::{self, ErrorKind, Read, Write},
    mem,
    ops::Range,
};

/// The first byte of every record, and the last of its text: its type, application data.
pub const CONTENT: u8 = 23;

/// Type, version, length.
const HEADER: usize = 5;
const TAG: usize = 16;
/// Bytes of a record beside its content; one is the type.
const OVERHEAD: usize = HEADER + 1 + TAG;
/// Maximum content of a record.
const RECORD: usize = 1 << 14;
/// Maximum content of small records that go out together with full ones: a request.
const SMALL: usize = 9;
/// Length of a buffer: 256 KiB of content in full records, after a small one.
const BUFFER: usize = 16 * (RECORD + OVERHEAD) + SMALL + OVERHEAD;

/// No secret: see the module.
const SECRET: [u8; 16] = *b"not a secret key";
/// The direction from the end that connected.
const FROM_NEAR: u8 = b'n';
/// The direction to it.
const FROM_FAR: u8 = b'f';

/// The key of a direction, and the number of the next record under it.
struct Key {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    next: u64,
}

impl Key {
    fn new(direction: u8) -> io::Result<Self> {
        let mut key = SECRET;
        key[0] = direction;
        let unbound = UnboundKey::new(&AES_128_GCM, &key).map_err(|_| bad("a key of a wrong length"))?;
        Ok(Self { key: LessSafeKey::new(unbound), iv: [direction; NONCE_LEN], next: 0 })
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        nonce[4..].iter_mut().zip(self.next.to_be_bytes()).for_each(|(n, s)| *n ^= s);
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

fn bad(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

/// One end of a connection.
pub struct Sealed<S> {
    stream: S,
    sends: Key,
    hears: Key,
    /// Sealed records, which wait for a write.
    out: Vec<u8>,
    waiting: usize,
    /// Received bytes: opened content that the caller has not read, then sealed records from `next` to `end`.
    came: Vec<u8>,
    opened: Range<usize>,
    next: usize,
    end: usize,
}

impl<S> Sealed<S> {
    /// The end that connected.
    pub fn near(stream: S) -> io::Result<Self> {
        Self::new(stream, FROM_NEAR, FROM_FAR)
    }

    /// The end that accepted.
    pub fn far(stream: S) -> io::Result<Self> {
        Self::new(stream, FROM_FAR, FROM_NEAR)
    }

    fn new(stream: S, sends: u8, hears: u8) -> io::Result<Self> {
        let (sends, hears) = (Key::new(sends)?, Key::new(hears)?);
        let (out, came) = (vec![0; BUFFER], vec![0; BUFFER]);
        Ok(Self { stream, sends, hears, out, waiting: 0, came, opened: 0..0, next: 0, end: 0 })
    }

    /// Appends a record to those that wait; the caller sees to it that there is room.
    fn seal(&mut self, content: &[u8]) -> io::Result<()> {
        let bytes = content.len();
        let length = bytes + 1 + TAG;
        let header = [CONTENT, 3, 3, (length >> 8) as u8, length as u8];
        let nonce = self.sends.nonce();
        let room = &mut self.out[self.waiting..][..HEADER + length];
        room[..HEADER].copy_from_slice(&header);
        let (text, tag) = room[HEADER..].split_at_mut(bytes + 1);
        text[..bytes].copy_from_slice(content);
        text[bytes] = CONTENT;
        let sealed = self.sends.key.seal_in_place_separate_tag(nonce, Aad::from(header), text);
        tag.copy_from_slice(sealed.map_err(|_| bad("a record cannot be sealed"))?.as_ref());
        self.waiting += HEADER + length;
        Ok(())
    }
}

impl<S: Read> Sealed<S> {
    /// Opens the next record.
    fn open(&mut self) -> io::Result<()> {
        self.fill(HEADER)?;
        let mut header = [0; HEADER];
        header.copy_from_slice(&self.came[self.next..][..HEADER]);
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if header[..3] != [CONTENT, 3, 3] || !(1 + TAG..=RECORD + 1 + TAG).contains(&length) {
            return Err(bad("something else than a record came"));
        }
        self.fill(HEADER + length)?;
        let from = self.next + HEADER;
        let nonce = self.hears.nonce();
        let record = &mut self.came[from..][..length];
        let opened = self.hears.key.open_in_place(nonce, Aad::from(header), record);
        let text: &[u8] = opened.map_err(|_| bad("a record came that was changed on its way"))?;
        let Some((&CONTENT, content)) = text.split_last() else {
            return Err(bad("a record of another type"));
        };
        self.opened = from..from + content.len();
        self.next = from + length;
        Ok(())
    }

    /// Reads until at least this many bytes of records are there. Nothing that was opened may be unread.
    fn fill(&mut self, bytes: usize) -> io::Result<()> {
        while self.end - self.next < bytes {
            // At most a part of one record.
            self.came.copy_within(self.next..self.end, 0);
            (self.next, self.end) = (0, self.end - self.next);
            match self.stream.read(&mut self.came[self.end..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.end += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl<S: Read> Read for Sealed<S> {
    /// The content of one record, or what is left of it.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.opened.is_empty() {
            self.open()?;
        }
        let n = self.opened.len().min(into.len());
        into[..n].copy_from_slice(&self.came[self.opened.start..][..n]);
        self.opened.start += n;
        Ok(n)
    }
}

impl<S: Write> Write for Sealed<S> {
    /// Seals all of it. What does not fill the buffer waits for a flush.
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        for part in content.chunks(RECORD) {
            if self.waiting + OVERHEAD + part.len() > self.out.len() {
                self.flush()?;
            }
            self.seal(part)?;
        }
        Ok(content.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let waiting = mem::take(&mut self.waiting);
        self.stream.write_all(&self.out[..waiting])?;
        self.stream.flush()
    }
}

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;
