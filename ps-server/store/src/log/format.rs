//! The byte format of a segment: encoding and decoding, no files.
//!
//! ```text
//! segment: magic "PARAFTLG" 8 | format version 4 | size 4 | salt 8 | first number 8 |
//!          bytes of the table 4 | CRC-32 of the table 4 | CRC-32 of these 4 | table
//! item:    magic 3 | kind 1 | header length 4 | payload length 4 | CRC-32 of header and payload 4 |
//!          number 8 | synced 8 | group 8 | turn 8 | index 8 | CRC-32 of the salt and these 4 | header | payload
//! table:   for each group: key 8 | flags 4 | turn 8 | first 8 | next 8 | purged 8 | bytes of the tag 4 | tag
//! ```
//!
//! - *salt*: a random number of this use of the file. Segments are recycled: after the last item lies data of an
//!   earlier use, and the salt in the checksum keeps it from being taken for this use's.
//! - *size*: the minimum length of the file, in blocks of 4 KiB. It is reserved before the segment gets its name,
//!   and bytes that are cut off the end are replaced by zeros: so a shorter file was cut by another program.
//! - *number*: items are numbered consecutively over all groups; a mark has the number of the next item.
//! - *synced*: every item with a lower number was durable when this item was written. It distinguishes a torn tail
//!   from damage.
//! - *turn*: the items of one group are numbered as well. If some items are unreadable, a group whose turns
//!   continue after them had none among them.
//! - *table*: the state of every group when the segment was started, so that earlier segments can be removed, and
//!   that damage in them can be recognised as harmless.
//! - The lengths are covered by the head's own checksum, so they are verified before anything is allocated or
//!   skipped.
//! - A later version keeps the first 44 bytes and their checksum, so that it can be distinguished from damage.

use super::record::{MAX_GROUPS, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_TAG_BYTES};
use bytes::{Buf, BufMut, Bytes};
use paraft_common::Payload;

const MAGIC: [u8; 8] = *b"PARAFTLG";
/// The start of every item, before its kind. Not UTF-8, and no plausible float of a weight.
pub(super) const ITEM_MAGIC: [u8; 3] = [0xF5, b'P', 0xF7];

/// The version of this format. Every change of the format raises it.
pub(super) const VERSION: u32 = 1;

/// Bound on numbers and turns, so that counting on from them cannot overflow.
const MAX_NUMBER: u64 = 1 << 62;

/// Sizes of segments are multiples of this.
pub(super) const BLOCK_BYTES: u64 = 4 << 10;

/// Bytes of a table entry without its tag.
const ENTRY_BYTES: usize = 48;
const MAX_TABLE_BYTES: usize = MAX_GROUPS * (ENTRY_BYTES + MAX_TAG_BYTES);

/// Bytes of an item before its header.
pub(super) const HEAD_BYTES: usize = 60;
/// Bytes before a segment's table.
pub(super) const PREFIX_BYTES: usize = 44;

/// The start of a segment file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    pub salt: u64,
    pub first: u64,
    /// Minimum length of the file, a multiple of [`BLOCK_BYTES`]; 0 if the file system reserves nothing.
    pub reserved: u64,
    pub table_bytes: u32,
    pub table_crc: u32,
}

/// Why the first bytes are not those of a segment.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadPrefix {
    Damaged(&'static str),
    Version(u32),
}

impl Prefix {
    /// Encodes the prefix.
    pub fn encode(&self) -> [u8; PREFIX_BYTES] {
        let mut out = [0; PREFIX_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let blocks = u32::try_from(self.reserved / BLOCK_BYTES).unwrap_or(0);
        out[12..16].copy_from_slice(&blocks.to_le_bytes());
        out[16..24].copy_from_slice(&self.salt.to_le_bytes());
        out[24..32].copy_from_slice(&self.first.to_le_bytes());
        out[32..36].copy_from_slice(&self.table_bytes.to_le_bytes());
        out[36..40].copy_from_slice(&self.table_crc.to_le_bytes());
        let crc = crc32fast::hash(&out[..40]);
        out[40..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes the first [`PREFIX_BYTES`] of a file, or all of a shorter one.
    pub fn decode(bytes: &[u8]) -> Result<Prefix, BadPrefix> {
        let Some(own) = bytes.get(..PREFIX_BYTES) else {
            return Err(BadPrefix::Damaged("it is shorter than an empty segment"));
        };
        let (body, mut crc) = own.split_at(PREFIX_BYTES - 4);
        let Some(mut rest) = body.strip_prefix(&MAGIC) else {
            return Err(BadPrefix::Damaged("it does not begin as a segment of a log does"));
        };
        let (version, blocks) = (rest.get_u32_le(), rest.get_u32_le());
        if crc.get_u32_le() != crc32fast::hash(body) {
            return Err(BadPrefix::Damaged("its first bytes fail their checksum"));
        }
        if version != VERSION {
            return Err(BadPrefix::Version(version));
        }
        let (salt, first) = (rest.get_u64_le(), rest.get_u64_le());
        let (table_bytes, table_crc) = (rest.get_u32_le(), rest.get_u32_le());
        if table_bytes as usize > MAX_TABLE_BYTES || first >= MAX_NUMBER {
            return Err(BadPrefix::Damaged("its first bytes say what cannot be"));
        }
        let reserved = u64::from(blocks) * BLOCK_BYTES;
        Ok(Prefix { salt, first, reserved, table_bytes, table_crc })
    }

    /// The position of the first item.
    pub fn start(&self) -> u64 {
        PREFIX_BYTES as u64 + u64::from(self.table_bytes)
    }
}

/// A group's state when a segment was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub key: u64,
    /// Some of it may be lost.
    pub damaged: bool,
    /// The turn of its next item.
    pub turn: u64,
    /// Index of its first record; if it has none, of the next.
    pub first: u64,
    /// Index of its next record; `None`: any.
    pub next: Option<u64>,
    pub purged: Option<(u64, Bytes)>,
}

/// The key of an entry for unlisted groups: some may have started in an unreadable place.
pub(super) const UNLISTED_KEY: u64 = u64::MAX;

const DAMAGED: u32 = 1;

pub(super) fn encode_table(entries: &[Entry]) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 * entries.len());
    for e in entries {
        out.put_u64_le(e.key);
        out.put_u32_le(if e.damaged { DAMAGED } else { 0 });
        out.put_u64_le(e.turn);
        out.put_u64_le(e.first);
        out.put_u64_le(e.next.unwrap_or(u64::MAX));
        let (upto, tag) = e.purged.as_ref().map_or((u64::MAX, &[][..]), |(upto, tag)| (*upto, &tag[..]));
        out.put_u64_le(upto);
        out.put_u32_le(tag.len() as u32); // at most MAX_TAG_BYTES
        out.put_slice(tag);
    }
    out
}

/// Decodes what [`encode_table`] returns; else `None`.
pub(super) fn decode_table(bytes: &[u8]) -> Option<Vec<Entry>> {
    let (mut rest, mut entries, mut last) = (bytes, Vec::new(), None);
    while !rest.is_empty() {
        if rest.len() < ENTRY_BYTES {
            return None;
        }
        let (key, flags, turn) = (rest.get_u64_le(), rest.get_u32_le(), rest.get_u64_le());
        let (first, next) = (rest.get_u64_le(), Some(rest.get_u64_le()).filter(|next| *next != u64::MAX));
        let (upto, length) = (rest.get_u64_le(), rest.get_u32_le() as usize);
        let tag = Bytes::copy_from_slice(rest.split_off(..length)?);
        let purged = (upto != u64::MAX).then_some((upto, tag));
        let ordered = last.is_none_or(|last| last < key) && next.is_none_or(|next| first <= next);
        if !ordered
            || turn >= MAX_NUMBER
            || length > MAX_TAG_BYTES
            || flags > DAMAGED
            || purged.is_none() && length > 0
        {
            return None;
        }
        last = Some(key);
        entries.push(Entry { key, damaged: flags == DAMAGED, turn, first, next, purged });
    }
    Some(entries)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Record,
    /// The log was closed here with everything durable.
    Mark,
    /// A copy of a record, so that its old segment can be removed.
    Moved,
    /// The group's records from `index` on are truncated.
    Truncate,
    /// The records up to and including `index` are purged; the header is the tag.
    Purge,
    /// The group is removed.
    Remove,
}

const KINDS: [Kind; 6] = [Kind::Record, Kind::Mark, Kind::Moved, Kind::Truncate, Kind::Purge, Kind::Remove];

impl Kind {
    fn to_byte(self) -> u8 {
        KINDS.iter().position(|k| *k == self).map_or(0, |place| place as u8 + 1)
    }

    fn from_byte(byte: u8) -> Option<Kind> {
        KINDS.get(usize::from(byte).checked_sub(1)?).copied()
    }

    /// Bounds of its header and payload.
    fn most(self) -> (usize, usize) {
        match self {
            Kind::Record | Kind::Moved => (MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES),
            Kind::Purge => (MAX_TAG_BYTES, 0),
            Kind::Mark | Kind::Truncate | Kind::Remove => (0, 0),
        }
    }
}

/// The head of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    pub header_bytes: u32,
    pub payload_bytes: u32,
    pub body_crc: u32,
    pub number: u64,
    pub synced: u64,
    pub group: u64,
    pub turn: u64,
    pub index: u64,
}

fn head_crc(salt: u64, head: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&salt.to_le_bytes());
    crc.update(head);
    crc.finalize()
}

pub(super) fn body_crc(header: &[u8], payload: &Payload) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(header);
    payload.pieces().iter().for_each(|p| crc.update(p));
    crc.finalize()
}

impl Head {
    /// A mark: everything before item `number`, the next one, is durable.
    pub fn mark(number: u64) -> Head {
        Head {
            kind: Kind::Mark,
            header_bytes: 0,
            payload_bytes: 0,
            body_crc: body_crc(&[], &Payload::EMPTY),
            number,
            synced: number,
            group: 0,
            turn: 0,
            index: 0,
        }
    }

    pub fn body_bytes(&self) -> u64 {
        u64::from(self.header_bytes) + u64::from(self.payload_bytes)
    }

    /// Encodes the head.
    pub fn encode(&self, salt: u64) -> [u8; HEAD_BYTES] {
        let mut out = [0; HEAD_BYTES];
        let mut rest = &mut out[..];
        rest.put_slice(&ITEM_MAGIC);
        rest.put_u8(self.kind.to_byte());
        for word in [self.header_bytes, self.payload_bytes, self.body_crc] {
            rest.put_u32_le(word);
        }
        for long in [self.number, self.synced, self.group, self.turn, self.index] {
            rest.put_u64_le(long);
        }
        let crc = head_crc(salt, &out[..HEAD_BYTES - 4]);
        out[HEAD_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes the first [`HEAD_BYTES`] of `bytes`.
    pub fn decode(salt: u64, bytes: &[u8]) -> Option<Head> {
        let (body, mut crc) = bytes.get(..HEAD_BYTES)?.split_at(HEAD_BYTES - 4);
        let mut rest = body.strip_prefix(&ITEM_MAGIC)?;
        if crc.get_u32_le() != head_crc(salt, body) {
            return None;
        }
        let kind = Kind::from_byte(rest.get_u8())?;
        let (header_bytes, payload_bytes, body_crc) =
            (rest.get_u32_le(), rest.get_u32_le(), rest.get_u32_le());
        let (number, synced) = (rest.get_u64_le(), rest.get_u64_le());
        let (group, turn, index) = (rest.get_u64_le(), rest.get_u64_le(), rest.get_u64_le());
        let (most_header, most_payload) = kind.most();
        let fits = header_bytes as usize <= most_header && payload_bytes as usize <= most_payload;
        let possible = number < MAX_NUMBER && turn < MAX_NUMBER && index < u64::MAX;
        (fits && possible).then_some(Head {
            kind,
            header_bytes,
            payload_bytes,
            body_crc,
            number,
            synced,
            group,
            turn,
            index,
        })
    }
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod tests;
