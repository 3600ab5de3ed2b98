//! Decodes received pieces into a message. All input is untrusted: unreadable bytes are an error, and no
//! length that the bytes do not hold causes an allocation.

use super::{Bulk, Place, WithBulk, encode::PREFIX};
use bytes::{BufMut, Bytes};
use paraft_common::Payload;
use prost::encoding::{MAX_TAG, MIN_TAG, WireType, encode_key, encode_varint};
use std::collections::VecDeque;

/// Messages up to this many bytes are copied: a view would keep a whole receive buffer alive while the
/// message is in the log.
const SMALL: usize = 16 << 10;

/// Why bytes are not a valid message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BulkError {
    /// The message claims to be compressed.
    #[error("compressed messages are not supported")]
    Compressed,
    /// The message is longer than this reader accepts.
    #[error("a message of {len} bytes; at most {limit} are taken")]
    TooLong {
        /// Its length, as its prefix says.
        len: usize,
        /// The limit.
        limit: usize,
    },
    /// The stream ended within a message.
    #[error("the stream ended within a message")]
    CutShort,
    /// It is not protobuf, or not of this type.
    #[error("a message cannot be read: {0}")]
    Malformed(String),
}

/// Pieces of a stream, in order, and the complete messages in them.
#[derive(Debug)]
pub struct Inbox {
    pieces: Pieces,
    limit: usize,
}

impl Inbox {
    /// Takes messages of up to `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { pieces: Pieces::default(), limit }
    }

    /// Appends a received piece.
    pub fn put(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.pieces.len += piece.len();
            self.pieces.list.push_back(piece);
        }
    }

    /// Whether no bytes wait.
    pub fn is_empty(&self) -> bool {
        self.pieces.len == 0
    }

    /// The next message, if complete. After an error nothing more can be read.
    pub fn message<M: Bulk>(&mut self) -> Result<Option<WithBulk<M>>, BulkError> {
        if self.pieces.len < PREFIX {
            return Ok(None);
        }
        let mut prefix = [0; PREFIX];
        self.pieces.peek(&mut prefix);
        let [compressed, len @ ..] = prefix;
        let (len, limit) = (u32::from_be_bytes(len) as usize, self.limit);
        if compressed != 0 {
            return Err(BulkError::Compressed);
        }
        if len > limit {
            return Err(BulkError::TooLong { len, limit });
        }
        if self.pieces.len - PREFIX < len {
            return Ok(None);
        }
        self.pieces.take(PREFIX)?;
        let message = self.pieces.take(len)?;
        read(message).map(Some)
    }
}

/// Reads one whole message.
pub fn read<M: Bulk>(message: Pieces) -> Result<WithBulk<M>, BulkError> {
    if message.len <= SMALL || M::PLACE == Place::Nowhere {
        let mut whole = Vec::with_capacity(message.len);
        message.list.iter().for_each(|p| whole.extend_from_slice(p));
        return Ok(M::decode(Bytes::from(whole)).map_err(malformed)?.into());
    }
    let mut header = Vec::new();
    let bulk = match M::PLACE {
        Place::Nowhere => Vec::new(),
        Place::Own(field) => part(message, field, &mut header)?,
        Place::Kinds(kinds) => kind(message, kinds, &mut header)?,
    };
    let mut message = M::decode(&header[..]).map_err(malformed)?;
    let expected = message.detach().len();
    match M::PLACE {
        // The last one counts, as everywhere in protobuf; a missing one is empty.
        Place::Kinds(_) if expected == 1 => {
            Ok(WithBulk { message, bulk: vec![bulk.into_iter().next_back().unwrap_or_default()] })
        }
        // The payload belonged to a kind that a later one replaced.
        Place::Kinds(_) => Ok(message.into()),
        _ => Ok(WithBulk { message, bulk }),
    }
}

fn malformed(e: impl std::fmt::Display) -> BulkError {
    BulkError::Malformed(e.to_string())
}

/// A message with a kind that may have bulk: the kind without its bulk goes to `header`.
fn kind(mut message: Pieces, kinds: &[(u32, u32)], header: &mut Vec<u8>) -> Result<Vec<Payload>, BulkError> {
    let mut bulk = None;
    while message.len > 0 {
        let (number, wire) = message.key()?;
        let place = kinds.iter().find(|(k, _)| *k == number);
        match (place, wire) {
            (Some((_, field)), WireType::LengthDelimited) => {
                // protobuf would merge two of them.
                if bulk.is_some() {
                    return Err(malformed("two kinds in one message"));
                }
                let len = message.length()?;
                let mut inner = Vec::new();
                bulk = Some(part(message.take(len)?, *field, &mut inner)?);
                encode_key(number, wire, header);
                encode_varint(inner.len() as u64, header);
                header.extend_from_slice(&inner);
            }
            _ => message.copy_field(number, wire, header)?,
        }
    }
    Ok(bulk.unwrap_or_default())
}

/// The payloads of one `bytes` field; all other fields go to `header`.
fn part(mut message: Pieces, field: u32, header: &mut Vec<u8>) -> Result<Vec<Payload>, BulkError> {
    let mut bulk = Vec::new();
    while message.len > 0 {
        let (number, wire) = message.key()?;
        if number == field && wire == WireType::LengthDelimited {
            let len = message.length()?;
            bulk.push(message.take(len)?.into());
        } else {
            message.copy_field(number, wire, header)?;
        }
    }
    Ok(bulk)
}

/// Bytes in several pieces.
#[derive(Debug, Default)]
pub struct Pieces {
    list: VecDeque<Bytes>,
    len: usize,
}

impl From<Pieces> for Payload {
    fn from(pieces: Pieces) -> Self {
        // A kept message must not keep a receive buffer of many times its size.
        if pieces.len <= SMALL {
            let mut whole = Vec::with_capacity(pieces.len);
            pieces.list.iter().for_each(|p| whole.extend_from_slice(p));
            return whole.into();
        }
        pieces.list.into_iter().collect()
    }
}

impl FromIterator<Bytes> for Pieces {
    fn from_iter<I: IntoIterator<Item = Bytes>>(pieces: I) -> Self {
        let list: VecDeque<Bytes> = pieces.into_iter().filter(|p| !p.is_empty()).collect();
        Self { len: list.iter().map(Bytes::len).sum(), list }
    }
}

impl Pieces {
    /// Copies the first bytes, as many as there are.
    fn peek(&self, into: &mut [u8]) {
        for (to, from) in into.iter_mut().zip(self.list.iter().flatten()) {
            *to = *from;
        }
    }

    /// Splits the first `n` bytes off.
    fn take(&mut self, n: usize) -> Result<Self, BulkError> {
        if n > self.len {
            return Err(malformed("a length that goes beyond the message"));
        }
        let mut taken = Self { list: VecDeque::new(), len: n };
        let mut rest = n;
        while rest > 0 {
            let Some(first) = self.list.front_mut() else { break };
            if first.len() <= rest {
                rest -= first.len();
                taken.list.extend(self.list.pop_front());
            } else {
                taken.list.push_back(first.split_to(rest));
                rest = 0;
            }
        }
        self.len -= n;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, BulkError> {
        let Some(first) = self.list.front_mut() else { return Err(malformed("it ends within a field")) };
        let byte = first[0];
        *first = first.slice(1..);
        if first.is_empty() {
            self.list.pop_front();
        }
        self.len -= 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, BulkError> {
        let mut value = 0u64;
        for i in 0..10 {
            let byte = self.byte()?;
            if i == 9 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << (7 * i);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(malformed("a number that is too long"))
    }

    fn length(&mut self) -> Result<usize, BulkError> {
        usize::try_from(self.varint()?).map_err(malformed)
    }

    fn key(&mut self) -> Result<(u32, WireType), BulkError> {
        let key = self.varint()?;
        let number = u32::try_from(key >> 3).map_err(malformed)?;
        if !(MIN_TAG..=MAX_TAG).contains(&number) {
            return Err(malformed("a field number that protobuf has not"));
        }
        Ok((number, WireType::try_from(key & 7).map_err(malformed)?))
    }

    fn copy_field(&mut self, number: u32, wire: WireType, to: &mut Vec<u8>) -> Result<(), BulkError> {
        encode_key(number, wire, to);
        let len = match wire {
            WireType::Varint => {
                encode_varint(self.varint()?, to);
                return Ok(());
            }
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => {
                let len = self.length()?;
                encode_varint(len as u64, to);
                len
            }
            WireType::StartGroup | WireType::EndGroup => return Err(malformed("groups are not used here")),
        };
        self.take(len)?.list.iter().for_each(|p| to.put_slice(p));
        Ok(())
    }
}
