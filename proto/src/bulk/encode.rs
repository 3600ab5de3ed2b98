//! Encodes a message into pieces.

use super::{Bulk, Place, WithBulk};
use bytes::{BufMut, Bytes, BytesMut};
use paraft_common::Payload;
use prost::encoding::{WireType, decode_varint, encode_key, encode_varint, encoded_len_varint, key_len};
use std::collections::VecDeque;

/// gRPC's prefix of a message: one byte that says whether it is compressed, and its length.
pub const PREFIX: usize = 5;

/// Pieces up to this many bytes are copied after the header: a smaller piece costs more as a piece of its own
/// than its copy.
const SMALL: usize = 4 << 10;

/// Outgoing messages, as pieces in wire order.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Headers and small pieces that are not a finished piece yet.
    open: BytesMut,
    ready: VecDeque<Bytes>,
}

impl Outbox {
    /// Appends a message.
    pub fn put<M: Bulk>(&mut self, m: &WithBulk<M>) {
        let WithBulk { message, bulk } = m;
        match M::PLACE {
            Place::Nowhere => {
                self.prefix(message.encoded_len());
                self.header(message);
            }
            Place::Own(field) => {
                let fields: usize = bulk.iter().map(|p| field_len(field, p.len())).sum();
                self.prefix(message.encoded_len() + fields);
                self.header(message);
                bulk.iter().for_each(|p| self.field(field, p));
            }
            Place::Kinds(kinds) => {
                // The kind in protobuf without the payload: its key, its length, its fields. The payload
                // follows the last of them; protobuf allows any order.
                let mut encoded = &message.encode_to_vec()[..];
                let payload = bulk.iter().find(|p| !p.is_empty());
                let kind = first_field(encoded);
                let place = kind.and_then(|k| kinds.iter().find(|(number, _)| *number == k.0));
                let (Some(payload), Some((number, at)), Some((_, fields))) = (payload, place, kind) else {
                    self.prefix(encoded.len());
                    return self.open.put(&mut encoded);
                };
                let inner = fields.len() + field_len(*at, payload.len());
                self.prefix(field_len(*number, inner));
                encode_key(*number, WireType::LengthDelimited, &mut self.open);
                encode_varint(inner as u64, &mut self.open);
                self.open.put(fields);
                self.field(*at, payload);
            }
        }
    }

    /// Bytes of headers that still fit the same piece.
    pub fn open_bytes(&self) -> usize {
        self.open.len()
    }

    /// Whether a piece is complete.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The next piece; the last one is finished for it.
    pub fn pop(&mut self) -> Option<Bytes> {
        self.ready.pop_front().or_else(|| (!self.open.is_empty()).then(|| self.open.split().freeze()))
    }

    fn prefix(&mut self, len: usize) {
        self.open.reserve(PREFIX + 64);
        self.open.put_u8(0);
        self.open.put_u32(len as u32);
    }

    /// A message always fits a growing buffer.
    fn header<M: Bulk>(&mut self, message: &M) {
        self.open.reserve(message.encoded_len());
        message.encode_raw(&mut self.open);
    }

    fn field(&mut self, number: u32, payload: &Payload) {
        encode_key(number, WireType::LengthDelimited, &mut self.open);
        encode_varint(payload.len() as u64, &mut self.open);
        for piece in payload.pieces() {
            if piece.len() <= SMALL {
                self.open.put_slice(piece);
            } else {
                // Never an empty piece: h2 closes a connection after a hundred empty frames.
                if !self.open.is_empty() {
                    self.ready.push_back(self.open.split().freeze());
                }
                self.ready.push_back(piece.clone());
            }
        }
    }
}

fn field_len(number: u32, len: usize) -> usize {
    key_len(number) + encoded_len_varint(len as u64) + len
}

/// Number and content of the one field of a `oneof` message that we have encoded ourselves.
fn first_field(mut encoded: &[u8]) -> Option<(u32, &[u8])> {
    let key = decode_varint(&mut encoded).ok()?;
    decode_varint(&mut encoded).ok()?;
    Some(((key >> 3) as u32, encoded))
}
