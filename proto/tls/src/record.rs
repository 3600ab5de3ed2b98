//! The records of a connection (RFC 8446, section 5), each direction for itself. Outgoing data is sealed into
//! a buffer that goes to the socket in large pieces; incoming data is opened in place. rustls makes the keys.

use crate::error::TlsError;
use parking_lot::Mutex;
use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, Error, client::ClientConnectionData,
    kernel::KernelConnection, server::ServerConnectionData,
};
use std::{
    io::{self, ErrorKind, IoSlice},
    sync::Arc,
};

/// Type, version, length.
const HEADER: usize = 5;
const TAG: usize = 16;
/// Maximum content of a record.
const RECORD: usize = 1 << 14;
/// Maximum bytes after the header: the content, its type, the tag, and some padding.
const MAX_RECORD_BYTES: usize = RECORD + 256;
/// Maximum records under one key; RFC 8446, 5.5 allows some more for AES-GCM.
const MAX_RECORDS_PER_KEY: u64 = 1 << 24;
/// Maximum consecutive key changes, or records without content.
const MAX_IDLE_RECORDS: u32 = 32;

const ALERT: u8 = 21;
pub(crate) const HANDSHAKE: u8 = 22;
const CONTENT: u8 = 23;
const KEY_UPDATE: u8 = 24;

/// Bytes sealed at a time, which then wait for the socket. The peer opens them while the next ones are sealed.
const MAX_SEALED_BYTES: usize = 128 << 10;
/// If less than this was written, the buffer shrinks to this once it is sent.
const KEPT_BYTES: usize = 64 << 10;

/// Bytes that wait for the socket. Those before `sent` are sent; those after `end` are free room, kept for
/// the next bulk.
#[derive(Default)]
pub(crate) struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
    end: usize,
}

impl Outbox {
    /// Room for this many bytes.
    pub fn room(&mut self, bytes: usize) -> &mut [u8] {
        let needs = self.end + bytes;
        if self.bytes.len() < needs {
            self.bytes.resize(needs, 0);
        }
        &mut self.bytes[self.end..needs]
    }

    /// Notes that this much of the room is used.
    pub fn filled(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// Passes the waiting bytes to `write`; `WouldBlock`: some are left.
    pub fn send(&mut self, mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while !self.waiting().is_empty() {
            match write(self.waiting()) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => self.sent(n),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The waiting bytes.
    pub fn waiting(&self) -> &[u8] {
        &self.bytes[self.sent..self.end]
    }

    /// Notes that this many of them are sent.
    pub fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
        if self.sent == self.end {
            if self.end < KEPT_BYTES && self.bytes.len() > KEPT_BYTES {
                self.bytes = Vec::new();
            }
            (self.sent, self.end) = (0, 0);
        }
    }
}

/// The connection that makes the next keys.
pub(crate) enum Side {
    Dialled(KernelConnection<ClientConnectionData>),
    Accepted(KernelConnection<ServerConnectionData>),
}

/// Shared by both directions.
#[derive(Clone)]
pub(crate) struct Keys(Arc<Mutex<Side>>);

impl Keys {
    pub fn new(side: Side) -> Self {
        Self(Arc::new(Mutex::new(side)))
    }

    fn next(&self, sends: bool) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match (&mut *self.0.lock(), sends) {
            (Side::Dialled(c), true) => c.update_tx_secret(),
            (Side::Dialled(c), false) => c.update_rx_secret(),
            (Side::Accepted(c), true) => c.update_tx_secret(),
            (Side::Accepted(c), false) => c.update_rx_secret(),
        }
    }
}

/// A key, and the number of the next record under it.
struct Key {
    key: LessSafeKey,
    iv: [u8; 12],
    next: u64,
    used: u64,
}

impl Key {
    fn new((next, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, TlsError> {
        let (algorithm, key, iv): (&'static Algorithm, _, _) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(TlsError::Broken("a cipher that was not offered".into())),
        };
        let bad = || TlsError::Broken("a key of another length than its cipher's".into());
        let unbound = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| bad())?;
        let iv = iv.as_ref().try_into().map_err(|_| bad())?;
        Ok(Self { key: LessSafeKey::new(unbound), iv, next, used: 0 })
    }

    /// Unique for each record under a key.
    fn nonce(&mut self) -> Result<Nonce, TlsError> {
        let mut nonce = self.iv;
        nonce[4..].iter_mut().zip(self.next.to_be_bytes()).for_each(|(n, s)| *n ^= s);
        self.next = self.next.checked_add(1).ok_or_else(|| TlsError::Broken("too many records".into()))?;
        self.used += 1;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// The outgoing direction.
pub(crate) struct Sealer {
    key: Key,
    keys: Keys,
    out: Outbox,
    closed: bool,
}

impl Sealer {
    /// Starts after the rest of the handshake.
    pub fn new(secrets: (u64, ConnectionTrafficSecrets), keys: Keys, out: Outbox) -> Result<Self, TlsError> {
        Ok(Self { key: Key::new(secrets)?, keys, out, closed: false })
    }

    /// Bytes for the peer.
    pub fn out(&mut self) -> &mut Outbox {
        &mut self.out
    }

    /// Whether there are any.
    pub fn has_to_send(&self) -> bool {
        !self.out.waiting().is_empty()
    }

    /// Seals the first bytes of these pieces into records, at most `most`; returns their number.
    pub fn seal(&mut self, pieces: &[IoSlice<'_>], most: usize) -> Result<usize, TlsError> {
        let all: usize = pieces.iter().map(|p| p.len()).sum();
        let all = all.min(most);
        let mut pieces = pieces.iter().map(|p| &p[..]);
        let mut piece: &[u8] = &[];
        let mut taken = 0;
        // In one step, so that the buffer grows once.
        self.out.room(all + all.div_ceil(RECORD) * (HEADER + 1 + TAG));
        while taken < all {
            if self.key.used >= MAX_RECORDS_PER_KEY {
                self.update(false)?;
            }
            let n = (all - taken).min(RECORD);
            self.record(CONTENT, n, |mut room| {
                while !room.is_empty() {
                    if piece.is_empty() {
                        match pieces.next() {
                            Some(next) => piece = next,
                            None => break,
                        }
                        continue;
                    }
                    let n = piece.len().min(room.len());
                    let (now, later) = room.split_at_mut(n);
                    now.copy_from_slice(&piece[..n]);
                    (piece, room) = (&piece[n..], later);
                }
            })?;
            taken += n;
        }
        Ok(taken)
    }

    /// Seals a record of `bytes` bytes, which `write` fills in.
    fn record(&mut self, kind: u8, bytes: usize, write: impl FnOnce(&mut [u8])) -> Result<(), TlsError> {
        let length = bytes + 1 + TAG;
        let header = [CONTENT, 3, 3, (length >> 8) as u8, length as u8];
        let nonce = self.key.nonce()?;
        let room = self.out.room(HEADER + length);
        room[..HEADER].copy_from_slice(&header);
        let (text, tag) = room[HEADER..].split_at_mut(bytes + 1);
        write(&mut text[..bytes]);
        text[bytes] = kind;
        let sealed = self.key.key.seal_in_place_separate_tag(nonce, Aad::from(header), text);
        tag.copy_from_slice(
            sealed.map_err(|_| TlsError::Broken("a record cannot be sealed".into()))?.as_ref(),
        );
        self.out.filled(HEADER + length);
        Ok(())
    }

    /// Seals as much as there is room for after the waiting bytes, and passes it to `write`. Returns the
    /// number of bytes taken; unwritten ones go out with the next call.
    ///
    /// # Errors
    /// `WouldBlock`: earlier bytes have not gone out yet.
    pub fn write(
        &mut self,
        pieces: &[IoSlice<'_>],
        mut write: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.out.send(&mut write)?;
        let taken = self.seal(pieces, MAX_SEALED_BYTES)?;
        match self.out.send(&mut write) {
            Err(e) if e.kind() != ErrorKind::WouldBlock => Err(e),
            _ => Ok(taken),
        }
    }

    /// Changes to the next key. `asks`: the peer shall do so, too.
    pub fn update(&mut self, asks: bool) -> Result<(), TlsError> {
        let message = [KEY_UPDATE, 0, 0, 1, u8::from(asks)];
        self.record(HANDSHAKE, message.len(), |room| room.copy_from_slice(&message))?;
        self.key = Key::new(self.keys.next(true)?)?;
        Ok(())
    }

    /// Sends the end of this direction.
    pub fn close(&mut self) {
        self.alert(1, AlertDescription::CloseNotify);
    }

    fn alert(&mut self, level: u8, what: AlertDescription) {
        if !std::mem::replace(&mut self.closed, true) {
            // Without it the peer sees the connection end.
            let _ = self.record(ALERT, 2, |room| room.copy_from_slice(&[level, u8::from(what)]));
        }
    }
}

/// A record, opened.
struct Record {
    /// Its length, sealed.
    bytes: usize,
    kind: u8,
    /// The length of its text.
    text: usize,
}

/// The result of opening received bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OpenedRecords {
    /// Number of bytes consumed.
    pub used: usize,
    /// The peer sends nothing more.
    pub end: bool,
    /// The peer asks this side to change its key.
    pub asks: bool,
}

/// The incoming direction.
pub(crate) struct Opener {
    key: Key,
    keys: Keys,
    /// Consecutive records without content.
    idle: u32,
}

impl Opener {
    pub fn new(secrets: (u64, ConnectionTrafficSecrets), keys: Keys) -> Result<Self, TlsError> {
        Ok(Self { key: Key::new(secrets)?, keys, idle: 0 })
    }

    /// Opens complete records as long as `hear`, which receives their contents in order, asks for more.
    pub fn open(
        &mut self,
        came: &mut [u8],
        hear: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<OpenedRecords, TlsError> {
        let mut done = OpenedRecords::default();
        while let Some(record) = self.record(came, done.used, done.used + HEADER)? {
            let text = &came[done.used + HEADER..][..record.text];
            done.used += record.bytes;
            if record.kind != CONTENT {
                self.obey(record.kind, text, &mut done)?;
            } else if !hear(text) {
                break;
            }
            if done.end {
                break;
            }
        }
        Ok(done)
    }

    /// Opens the complete records, and moves their contents to the front of `came`, one after the other. Returns
    /// the contents' length, too.
    pub fn open_to_front(&mut self, came: &mut [u8]) -> Result<(OpenedRecords, usize), TlsError> {
        let (mut done, mut contents) = (OpenedRecords::default(), 0);
        while !done.end
            && let Some(record) = self.record(came, done.used, contents)?
        {
            done.used += record.bytes;
            match record.kind {
                CONTENT => contents += record.text,
                kind => self.obey(kind, &came[contents..][..record.text], &mut done)?,
            }
        }
        Ok((done, contents))
    }

    /// Opens the record that begins at `from`; its text moves to `to`. `None`: it is not complete.
    fn record(&mut self, came: &mut [u8], from: usize, to: usize) -> Result<Option<Record>, TlsError> {
        let bad = |why: &str| Err(TlsError::Broken(why.into()));
        let Some(header) = came[from..].first_chunk::<HEADER>().copied() else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if header[..3] != [CONTENT, 3, 3] || !(TAG + 1..=MAX_RECORD_BYTES).contains(&length) {
            return bad("something else than a record came");
        }
        let sealed = from + HEADER;
        let Some(within) = came.get_mut(to..sealed + length) else { return Ok(None) };
        let nonce = self.key.nonce()?;
        let Ok(text) = self.key.key.open_within(nonce, Aad::from(header), within, sealed - to..) else {
            return bad("a record came that was changed on its way");
        };
        // Zeroes after the type are padding.
        let Some(at) = text.iter().rposition(|b| *b != 0) else { return bad("a record without a type") };
        let kind = text[at];
        self.idle = if kind == CONTENT && at > 0 { 0 } else { self.idle + 1 };
        if self.idle > MAX_IDLE_RECORDS {
            return bad("records that say nothing");
        }
        if kind == CONTENT && at > RECORD {
            return bad("a record that is too long");
        }
        Ok(Some(Record { bytes: HEADER + length, kind, text: at }))
    }

    /// Does what a record that is no content asks for.
    fn obey(&mut self, kind: u8, text: &[u8], done: &mut OpenedRecords) -> Result<(), TlsError> {
        match (kind, text) {
            (HANDSHAKE, [KEY_UPDATE, 0, 0, 1, asks @ (0 | 1)]) => {
                self.key = Key::new(self.keys.next(false)?)?;
                done.asks |= *asks == 1;
            }
            (ALERT, [_, what]) => match AlertDescription::from(*what) {
                AlertDescription::CloseNotify => done.end = true,
                what => return Err(TlsError::of_alert(what)),
            },
            _ => return Err(TlsError::Broken("a message that has no place here".into())),
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
