//! Frames: a message's header and its bulk, one behind the other. What arrives may come from anyone: what cannot be read is an
//! error, and nothing is allocated for a length beyond the bounds.

use bytes::{BufMut, Bytes, BytesMut};
use paraft_common::Payload;
use paraft_proto::{
    WithBulk,
    bulk::{Bulk, Place},
    limits,
};
use std::collections::VecDeque;

/// The two numbers that each frame begins with.
pub(crate) const HEAD: usize = 8;

/// Of a frame's header: a job's text, and some.
pub const MAX_HEADER_BYTES: usize = limits::MAX_JOB_BYTES + (64 << 10);

/// Bulk in a frame: Raft sends the payloads of several entries at once, of a megabyte together.
pub const MAX_BULKS: usize = 4096;

/// Pieces up to this many bytes are copied behind the header: below it, a piece of its own costs more than its copy.
const SMALL: usize = 4 << 10;

/// Bytes that are no frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A length beyond the bounds.
    #[error("a frame says that it has {what} of {got}; at most {most} are taken")]
    TooLong {
        /// Of what.
        what: &'static str,
        /// The length.
        got: usize,
        /// The bound.
        most: usize,
    },
    /// The connection ended within a frame.
    #[error("the connection ended within a message")]
    CutShort,
    /// The header is no such message.
    #[error("a message cannot be read: {0}")]
    Malformed(String),
    /// Bulk where the message has none, or the reverse.
    #[error("a message came with {got} payloads; it has {expected}")]
    Bulks {
        /// That the message has.
        expected: usize,
        /// That came.
        got: usize,
    },
}

/// Messages on their way out, as pieces in the order of the wire.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Headers and small pieces that are not sealed yet.
    open: BytesMut,
    ready: VecDeque<Bytes>,
    bytes: usize,
}

impl Outbox {
    /// Appends a message.
    pub fn put<M: Bulk>(&mut self, m: &WithBulk<M>) {
        let header = m.message.encoded_len();
        self.open.reserve(HEAD + 4 * m.bulk.len() + header);
        let before = self.open.len();
        self.open.put_u32_le(header as u32);
        self.open.put_u32_le(m.bulk.len() as u32);
        m.bulk.iter().for_each(|p| self.open.put_u32_le(p.len() as u32));
        m.message.encode_raw(&mut self.open);
        self.bytes += self.open.len() - before;
        m.bulk.iter().for_each(|p| self.payload(p));
    }

    /// Appends a sign of life.
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

    /// Everything that waits, in order; none of the pieces is empty.
    pub fn pieces(&mut self) -> &VecDeque<Bytes> {
        self.seal();
        &self.ready
    }

    /// The first `n` bytes are sent.
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

/// Frames on their way in.
#[derive(Debug)]
pub struct Inbox {
    /// Read, and not looked at yet.
    buffer: BytesMut,
    state: State,
    /// Of one message, without what frames it.
    limit: usize,
}

/// The next part of a frame.
#[derive(Debug)]
enum State {
    Head,
    /// Lengths of the bulk, and the header.
    Header { header: usize, bulks: usize },
    Bulk { header: Bytes, lengths: Bytes, done: Vec<Payload>, now: BytesMut, missing: usize },
}

/// So much is read ahead of a frame, at most: of bulk it is what is copied once more.
const READ_AHEAD: usize = 16 << 10;

impl Inbox {
    /// Takes messages of up to `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { buffer: BytesMut::new(), state: State::Head, limit }
    }

    /// Where the next bytes are to be read, behind what it has: bulk into its own buffer. Never full.
    pub fn space(&mut self) -> &mut BytesMut {
        match &mut self.state {
            State::Bulk { now, .. } => now,
            State::Head | State::Header { .. } => {
                self.buffer.reserve(READ_AHEAD);
                &mut self.buffer
            }
        }
    }

    /// How many bytes may be read there.
    pub fn wanted(&self) -> usize {
        match &self.state {
            State::Bulk { missing, .. } => *missing,
            State::Head | State::Header { .. } => READ_AHEAD,
        }
    }

    /// So many bytes were read there.
    pub fn filled(&mut self, n: usize) {
        if let State::Bulk { missing, .. } = &mut self.state {
            *missing -= n;
        }
    }

    /// Whether the connection may end here.
    pub fn is_between(&self) -> bool {
        matches!(self.state, State::Head) && self.buffer.is_empty()
    }

    /// The next message, if it is whole; after an error nothing more can be read.
    pub fn message<M: Bulk>(&mut self) -> Result<Option<WithBulk<M>>, FrameError> {
        loop {
            match &mut self.state {
                State::Head => {
                    let Some((head, _)) = self.buffer.split_first_chunk::<HEAD>() else { return Ok(None) };
                    let [a, b, c, d, e, f, g, h] = *head;
                    let header = u32::from_le_bytes([a, b, c, d]) as usize;
                    let bulks = u32::from_le_bytes([e, f, g, h]) as usize;
                    within("a header", header, MAX_HEADER_BYTES)?;
                    within("a number of payloads", bulks, MAX_BULKS)?;
                    let _ = self.buffer.split_to(HEAD);
                    if header > 0 || bulks > 0 {
                        self.state = State::Header { header, bulks };
                    }
                }
                State::Header { header, bulks } => {
                    let (header, lengths) = (*header, *bulks * 4);
                    if self.buffer.len() < lengths + header {
                        return Ok(None);
                    }
                    // Copied: views of the buffer would keep it alive, and it could not be used again.
                    let lengths = Bytes::copy_from_slice(&self.buffer.split_to(lengths));
                    let header = Bytes::copy_from_slice(&self.buffer.split_to(header));
                    let whole = all(&lengths).sum::<usize>() + header.len();
                    within("a message", whole, self.limit)?;
                    let (done, now) = (Vec::with_capacity(lengths.len() / 4), BytesMut::new());
                    self.state = State::Bulk { header, lengths, done, now, missing: 0 };
                    self.next_bulk();
                }
                State::Bulk { missing, .. } if *missing > 0 => return Ok(None),
                State::Bulk { done, now, lengths, .. } => {
                    if done.len() < lengths.len() / 4 {
                        done.push(std::mem::take(now).freeze().into());
                        self.next_bulk();
                        continue;
                    }
                    let State::Bulk { header, done, .. } = std::mem::replace(&mut self.state, State::Head) else {
                        return Ok(None);
                    };
                    let mut message = M::decode(header).map_err(|e| FrameError::Malformed(e.to_string()))?;
                    let (expected, got) = (message.detach().len(), done.len());
                    // How many there are of a repeated field only the frame says.
                    if matches!(M::PLACE, Place::Own(_)) || expected == got {
                        return Ok(Some(WithBulk { message, bulk: done }));
                    }
                    return Err(FrameError::Bulks { expected, got });
                }
            }
        }
    }

    /// Begins the next payload with what was read of it already.
    fn next_bulk(&mut self) {
        let State::Bulk { lengths, done, now, missing, .. } = &mut self.state else { return };
        let Some(len) = all(lengths).nth(done.len()) else { return };
        *now = BytesMut::with_capacity(len);
        let here = self.buffer.split_to(len.min(self.buffer.len()));
        now.extend_from_slice(&here);
        *missing = len - here.len();
    }
}

fn all(lengths: &[u8]) -> impl Iterator<Item = usize> {
    lengths.as_chunks().0.iter().map(|l| u32::from_le_bytes(*l) as usize)
}

fn within(what: &'static str, got: usize, most: usize) -> Result<(), FrameError> {
    if got <= most { Ok(()) } else { Err(FrameError::TooLong { what, got, most }) }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
