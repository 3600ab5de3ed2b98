//! Frames: a message's header, then its bulk. Incoming bytes are untrusted: unreadable bytes are an error,
//! and no length beyond the bounds causes an allocation.

use crate::{
    error::FrameError,
    pool::{Buffer, Pool},
    shared::Shared,
};
use bytes::{BufMut, Bytes, BytesMut};
use paraft_common::Payload;
use paraft_proto::{
    WithBulk,
    bulk::{Bulk, Place},
    limits,
};
use std::{collections::VecDeque, io::ErrorKind, sync::Arc};

/// Bytes of the two numbers that begin each frame.
pub(crate) const HEAD: usize = 8;
/// Bytes for each payload: its length and place.
const ENTRY: usize = 12;
/// The payload is in the frame.
const INLINE: u64 = u64::MAX;
/// Instead of a header's length: a descriptor of the sender's memory comes with these bytes.
const MEMORY: u32 = u32::MAX;
/// Instead of a header's length: the sender has mapped the peer's memory. Before that every payload is in its
/// frame, so a peer without descriptors or address space left works without shared memory.
const MAPPED: u32 = u32::MAX - 2;
/// Instead of a header's length: this many places of payloads follow, which the sender has read.
const RETURNED: u32 = u32::MAX - 1;

/// Maximum bytes of a frame's header: a job's text, and some more. A message with one payload for each of its
/// parts has as many parts in its header, and its own bound.
const MAX_HEADER_BYTES: usize = limits::MAX_JOB_BYTES + (64 << 10);

/// Maximum payloads in a frame: Raft sends the payloads of several entries at once, a megabyte together.
pub const MAX_BULKS: usize = 4096;

/// Pieces up to this many bytes are copied after the header: a smaller piece costs more as a piece of its own
/// than its copy.
const SMALL: usize = 4 << 10;

/// Outgoing messages, as pieces in wire order.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Headers and small pieces that are not a finished piece yet.
    open: BytesMut,
    ready: VecDeque<Bytes>,
    bytes: usize,
}

impl Outbox {
    /// Appends a message. Bulk that the peer has mapped stays in place.
    pub fn put<M: Bulk>(&mut self, m: &WithBulk<M>, shared: Option<&Shared>) {
        let header = m.message.encoded_len();
        self.open.reserve(HEAD + ENTRY * m.bulk.len() + header);
        let before = self.open.len();
        self.open.put_u32_le(header as u32);
        self.open.put_u32_le(m.bulk.len() as u32);
        let places = m.bulk.iter().map(|p| match p.pieces() {
            [only] => shared.and_then(|s| s.place_of(only)).unwrap_or(INLINE),
            _ => INLINE,
        });
        let places: Vec<u64> = places.collect();
        for (p, place) in m.bulk.iter().zip(&places) {
            self.open.put_u32_le(p.len() as u32);
            self.open.put_u64_le(*place);
        }
        m.message.encode_raw(&mut self.open);
        self.bytes += self.open.len() - before;
        for (p, _) in m.bulk.iter().zip(&places).filter(|(_, place)| **place == INLINE) {
            self.payload(p);
        }
    }

    /// Appends the places of payloads that were read.
    pub fn put_returned(&mut self, places: &[u64]) {
        for some in places.chunks(MAX_BULKS) {
            self.open.put_u32_le(RETURNED);
            self.open.put_u32_le(some.len() as u32);
            some.iter().for_each(|at| self.open.put_u64_le(*at));
            self.bytes += HEAD + 8 * some.len();
        }
    }

    /// Appends the mark that the peer's memory is mapped.
    pub fn put_mapped(&mut self) {
        self.open.put_u32_le(MAPPED);
        self.open.put_u32_le(0);
        self.bytes += HEAD;
    }

    /// Appends a keepalive.
    pub fn put_alive(&mut self) {
        self.open.put_u64_le(0);
        self.bytes += HEAD;
    }

    fn payload(&mut self, payload: &Payload) {
        self.bytes += payload.len();
        for piece in payload.pieces() {
            if piece.len() <= SMALL {
                self.open.put_slice(piece);
            } else {
                self.seal();
                self.ready.push_back(piece.clone());
            }
        }
    }

    fn seal(&mut self) {
        if !self.open.is_empty() {
            self.ready.push_back(self.open.split().freeze());
        }
    }

    /// Bytes that wait to be sent.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All waiting pieces, in order; none is empty.
    pub fn pieces(&mut self) -> &VecDeque<Bytes> {
        self.seal();
        &self.ready
    }

    /// Drops the first `n` bytes, which are sent.
    pub fn sent(&mut self, mut n: usize) {
        self.bytes -= n;
        while n > 0 {
            let Some(first) = self.ready.front_mut() else { break };
            if first.len() > n {
                first.split_to(n).clear();
                return;
            }
            n -= first.len();
            self.ready.pop_front();
        }
    }
}

/// A frame that announces the sender's memory.
pub(crate) fn memory_announcement() -> [u8; HEAD] {
    let mut frame = [0; HEAD];
    frame[..4].copy_from_slice(&MEMORY.to_le_bytes());
    frame
}

/// Incoming frames.
#[derive(Debug)]
pub struct Inbox {
    /// Bytes that are read and not parsed yet.
    buffer: BytesMut,
    /// Read buffer for everything but bulk.
    ahead: Box<[u8]>,
    state: State,
    /// Maximum bytes of one message, without its frame.
    limit: usize,
    /// The memory of payloads that are not in the frame.
    shared: Option<Arc<Shared>>,
    /// The peer has offered memory that cannot be mapped.
    goes_without: bool,
    pool: Arc<Pool>,
}

/// The next part of a frame.
#[derive(Debug)]
enum State {
    Head,
    /// Lengths and places of the bulk, and the header.
    Header {
        header: usize,
        bulks: usize,
    },
    Bulk {
        header: Bytes,
        entries: Bytes,
        done: Vec<Payload>,
        now: Buffer,
        missing: usize,
    },
    /// This many places follow, which the peer has read.
    Returned(usize),
}

/// Maximum bytes that are read ahead of a frame: bulk among them is copied once more.
const MAX_READ_AHEAD_BYTES: usize = 16 << 10;

impl Inbox {
    /// Takes messages of up to `limit` bytes, whose bulk goes into buffers of this pool.
    pub fn new(limit: usize, shared: Option<Arc<Shared>>, pool: Arc<Pool>) -> Self {
        let ahead = vec![0; MAX_READ_AHEAD_BYTES].into();
        Self { buffer: BytesMut::new(), ahead, state: State::Head, limit, shared, goes_without: false, pool }
    }

    /// The buffer for the next bytes: bulk goes into its own buffer. Never empty.
    pub fn space(&mut self) -> &mut [u8] {
        match &mut self.state {
            State::Bulk { now, missing, .. } => {
                let bytes = now.as_mut();
                let from = bytes.len() - *missing;
                &mut bytes[from..]
            }
            State::Head | State::Header { .. } | State::Returned(_) => &mut self.ahead,
        }
    }

    /// Notes that this many bytes were read there.
    pub fn filled(&mut self, n: usize) {
        match &mut self.state {
            State::Bulk { missing, .. } => *missing -= n,
            State::Head | State::Header { .. } | State::Returned(_) => {
                self.buffer.extend_from_slice(&self.ahead[..n]);
            }
        }
    }

    /// Whether the connection may end here.
    pub fn is_between(&self) -> bool {
        matches!(self.state, State::Head) && self.buffer.is_empty()
    }

    /// The next message, if complete; after an error nothing more can be read.
    pub fn message<M: Bulk>(&mut self) -> Result<Option<WithBulk<M>>, FrameError> {
        loop {
            match &mut self.state {
                State::Head => {
                    let Some((head, _)) = self.buffer.split_first_chunk::<HEAD>() else { return Ok(None) };
                    let [a, b, c, d, e, f, g, h] = *head;
                    let header = u32::from_le_bytes([a, b, c, d]);
                    let bulks = u32::from_le_bytes([e, f, g, h]) as usize;
                    within("a number of payloads", bulks, MAX_BULKS)?;
                    self.state = match header {
                        MEMORY => {
                            let shared = self.shared.as_ref().ok_or(FrameError::NotShared)?;
                            match shared.map() {
                                Err(e) if e.kind() == ErrorKind::InvalidInput => {
                                    return Err(FrameError::Memory(e.to_string()));
                                }
                                // Once only: the peer may announce memory as often as it likes.
                                Err(error) if !std::mem::replace(&mut self.goes_without, true) => {
                                    tracing::warn!(%error, "memory is not shared: payloads travel");
                                }
                                Err(_) | Ok(()) => {}
                            }
                            State::Head
                        }
                        MAPPED => {
                            self.shared.as_ref().ok_or(FrameError::NotShared)?.note_mapped();
                            State::Head
                        }
                        RETURNED => State::Returned(bulks),
                        0 if bulks == 0 => State::Head,
                        header => {
                            let most = match M::PLACE {
                                Place::Own(_) => self.limit,
                                Place::Kinds(_) | Place::Nowhere => MAX_HEADER_BYTES.min(self.limit),
                            };
                            within("a header", header as usize, most)?;
                            State::Header { header: header as usize, bulks }
                        }
                    };
                    let _ = self.buffer.split_to(HEAD);
                }
                State::Returned(places) => {
                    let len = *places * 8;
                    if self.buffer.len() < len {
                        return Ok(None);
                    }
                    let shared = self.shared.as_ref().ok_or(FrameError::NotShared)?;
                    for at in self.buffer.split_to(len).as_chunks().0 {
                        shared.returned(u64::from_le_bytes(*at));
                    }
                    self.state = State::Head;
                }
                State::Header { header, bulks } => {
                    let (header, entries) = (*header, *bulks * ENTRY);
                    if self.buffer.len() < entries + header {
                        return Ok(None);
                    }
                    // Copied: views of the buffer would keep it alive and prevent its reuse.
                    let entries = Bytes::copy_from_slice(&self.buffer.split_to(entries));
                    let header = Bytes::copy_from_slice(&self.buffer.split_to(header));
                    let bulk: usize = entries.as_chunks().0.iter().map(|e| entry(e).0).sum();
                    let whole = bulk + header.len();
                    within("a message", whole, self.limit)?;
                    let (done, now) = (Vec::with_capacity(entries.len() / ENTRY), self.pool.take(0));
                    self.state = State::Bulk { header, entries, done, now, missing: 0 };
                    self.next_bulk()?;
                }
                State::Bulk { missing, .. } if *missing > 0 => return Ok(None),
                State::Bulk { done, now, entries, .. } => {
                    if done.len() < entries.len() / ENTRY {
                        done.push(std::mem::replace(now, self.pool.take(0)).freeze().into());
                        self.next_bulk()?;
                        continue;
                    }
                    let State::Bulk { header, done, .. } = std::mem::replace(&mut self.state, State::Head)
                    else {
                        return Ok(None);
                    };
                    let mut message = M::decode(header).map_err(|e| FrameError::Malformed(e.to_string()))?;
                    let (expected, got) = (message.detach().len(), done.len());
                    // Only the frame tells the length of a repeated field.
                    if matches!(M::PLACE, Place::Own(_)) || expected == got {
                        return Ok(Some(WithBulk { message, bulk: done }));
                    }
                    return Err(FrameError::Bulks { expected, got });
                }
            }
        }
    }

    /// Starts the next payload in the frame, with its bytes that are read already; the payloads before it are
    /// taken from shared memory.
    fn next_bulk(&mut self) -> Result<(), FrameError> {
        let State::Bulk { entries, done, now, missing, .. } = &mut self.state else { return Ok(()) };
        while let Some((len, place)) = entries.as_chunks().0.get(done.len()).map(entry) {
            if place == INLINE {
                *now = self.pool.take(len);
                let here = self.buffer.split_to(len.min(self.buffer.len()));
                now.as_mut()[..here.len()].copy_from_slice(&here);
                *missing = len - here.len();
                return Ok(());
            }
            let shared = self.shared.as_ref().ok_or(FrameError::NotShared)?;
            done.push(shared.bulk(place, len, &self.pool)?.into());
        }
        Ok(())
    }
}

/// Length and place.
fn entry([a, b, c, d, place @ ..]: &[u8; ENTRY]) -> (usize, u64) {
    (u32::from_le_bytes([*a, *b, *c, *d]) as usize, u64::from_le_bytes(*place))
}

fn within(what: &'static str, got: usize, most: usize) -> Result<(), FrameError> {
    if got <= most { Ok(()) } else { Err(FrameError::TooLong { what, got, most }) }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
