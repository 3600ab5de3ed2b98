//! The bytes of a segment: encoding and decoding, no files.
//!
//! ```text
//! segment: magic "PARAFTLG" 8 | format version 4 | flags and size 4 | salt 8 | first index 8 | CRC-32 of these 4
//! item:    magic 3 | kind 1 | header length 4 | payload length 4 | CRC-32 of header and payload 4 |
//!          index 8 | synced 8 | CRC-32 of the salt and these 4 | header | payload
//! ```
//!
//! - *salt*: a random number of this use of the file. Segments are recycled: behind the last item lies what an
//!   earlier use left, and the salt in the checksum keeps it from being taken for ours.
//! - *flags and size*: the lowest bit says that the log begins here; the others, how long the file is at least, in
//!   blocks of 4 KiB. The size is reserved before the segment has its name, and what is cut off its end is put back
//!   as zeros: a file that is shorter was cut by someone else.
//! - *synced*: every record with an index below this one was durable when the item was written. It is what
//!   tells a torn tail from damage.
//! - The lengths have a checksum of their own (with the rest of the head), so they are known good before
//!   anything is allocated or skipped.

use super::{MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES};
use bytes::Buf;
use paraft_common::Payload;

const MAGIC: [u8; 8] = *b"PARAFTLG";
pub(super) const VERSION: u32 = 2;
/// Bytes before a segment's first item.
pub(super) const PREFIX_BYTES: usize = 36;
/// Bytes of an item before its header.
pub(super) const HEAD_BYTES: usize = 36;
/// What every item begins with; its kind follows. Not UTF-8, and no float that weights would hold.
pub(super) const ITEM_MAGIC: [u8; 3] = [0xF5, b'P', 0xF7];

/// More do not fit beside the flag: 8 TiB.
const MAX_BLOCKS: u32 = u32::MAX >> 1;

/// The log begins with this segment, rather than going on from one that was purged or is missing.
const STARTS_LOG: u32 = 1;

/// Sizes of segments are multiples of this.
pub(super) const BLOCK_BYTES: u64 = 4 << 10;

/// What a segment file says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    pub salt: u64,
    pub first: u64,
    /// Nothing was before it in the log, so nothing can be missing before it.
    pub starts_log: bool,
    /// The file has at least so many bytes, a multiple of [`BLOCK_BYTES`]; 0 where the file system reserves nothing.
    pub reserved: u64,
}

/// Why these are not the first bytes of a segment.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadPrefix {
    Damaged(&'static str),
    Version(u32),
}

impl Prefix {
    pub fn encode(&self) -> [u8; PREFIX_BYTES] {
        let mut out = [0; PREFIX_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let blocks = u32::try_from(self.reserved / BLOCK_BYTES).unwrap_or(0).min(MAX_BLOCKS);
        let flags = if self.starts_log { STARTS_LOG } else { 0 };
        out[12..16].copy_from_slice(&(blocks << 1 | flags).to_le_bytes());
        out[16..24].copy_from_slice(&self.salt.to_le_bytes());
        out[24..32].copy_from_slice(&self.first.to_le_bytes());
        let crc = crc32fast::hash(&out[..32]);
        out[32..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8; PREFIX_BYTES]) -> Result<Prefix, BadPrefix> {
        let mut rest = &bytes[8..];
        let (version, flags) = (rest.get_u32_le(), rest.get_u32_le());
        let (salt, first, crc) = (rest.get_u64_le(), rest.get_u64_le(), rest.get_u32_le());
        if !bytes.starts_with(&MAGIC) {
            return Err(BadPrefix::Damaged("it does not begin as a segment of a log does"));
        }
        if crc != crc32fast::hash(&bytes[..32]) {
            return Err(BadPrefix::Damaged("its first bytes fail their checksum"));
        }
        if version != VERSION {
            return Err(BadPrefix::Version(version));
        }
        let reserved = u64::from(flags >> 1) * BLOCK_BYTES;
        Ok(Prefix { salt, first, starts_log: flags & STARTS_LOG != 0, reserved })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Record,
    /// The log was closed here with everything durable; `index` is that of the record that would be next.
    Mark,
}

/// What stands before a record's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    pub header_bytes: u32,
    pub payload_bytes: u32,
    pub body_crc: u32,
    pub index: u64,
    pub synced: u64,
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
    pub fn body_bytes(&self) -> u64 {
        u64::from(self.header_bytes) + u64::from(self.payload_bytes)
    }

    pub fn encode(&self, salt: u64) -> [u8; HEAD_BYTES] {
        let mut out = [0; HEAD_BYTES];
        out[..3].copy_from_slice(&ITEM_MAGIC);
        out[3] = match self.kind {
            Kind::Record => 1,
            Kind::Mark => 2,
        };
        out[4..8].copy_from_slice(&self.header_bytes.to_le_bytes());
        out[8..12].copy_from_slice(&self.payload_bytes.to_le_bytes());
        out[12..16].copy_from_slice(&self.body_crc.to_le_bytes());
        out[16..24].copy_from_slice(&self.index.to_le_bytes());
        out[24..32].copy_from_slice(&self.synced.to_le_bytes());
        let crc = head_crc(salt, &out[..32]);
        out[32..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// The head that these bytes are, if they are one that was written with this salt.
    pub fn decode(salt: u64, bytes: &[u8; HEAD_BYTES]) -> Option<Head> {
        let mut rest = &bytes[3..];
        let kind = match rest.get_u8() {
            1 => Kind::Record,
            2 => Kind::Mark,
            _ => return None,
        };
        let (header_bytes, payload_bytes, body_crc) =
            (rest.get_u32_le(), rest.get_u32_le(), rest.get_u32_le());
        let (index, synced, crc) = (rest.get_u64_le(), rest.get_u64_le(), rest.get_u32_le());
        let bounded =
            header_bytes as usize <= MAX_HEADER_BYTES && payload_bytes as usize <= MAX_PAYLOAD_BYTES;
        let bodiless = header_bytes == 0 && payload_bytes == 0;
        let fits = bounded && synced <= index && index < u64::MAX && (kind == Kind::Record || bodiless);
        (bytes.starts_with(&ITEM_MAGIC) && fits && crc == head_crc(salt, &bytes[..32])).then_some(Head {
            kind,
            header_bytes,
            payload_bytes,
            body_crc,
            index,
            synced,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEAD: Head = Head {
        kind: Kind::Record,
        header_bytes: 3,
        payload_bytes: 4,
        body_crc: 0x0102_0304,
        index: 9,
        synced: 8,
    };

    /// Old files must stay readable: whoever changes these bytes raises the version.
    #[test]
    fn the_bytes_of_version_2_are_these() {
        let prefix =
            Prefix { salt: 0x1122_3344_5566_7788, first: 7, starts_log: true, reserved: 3 * BLOCK_BYTES };
        let expected = b"PARAFTLG\x02\0\0\0\x07\0\0\0\x88\x77\x66\x55\x44\x33\x22\x11\x07\0\0\0\0\0\0\0";
        assert_eq!(prefix.encode()[..32], expected[..]);
        assert_eq!(prefix.encode()[32..], crc32fast::hash(expected).to_le_bytes());
        let expected =
            b"\xF5P\xF7\x01\x03\0\0\0\x04\0\0\0\x04\x03\x02\x01\x09\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0";
        assert_eq!(HEAD.encode(5)[..32], expected[..]);
        let mut salted = 5u64.to_le_bytes().to_vec();
        salted.extend(expected);
        assert_eq!(HEAD.encode(5)[32..], crc32fast::hash(&salted).to_le_bytes());
    }

    #[test]
    fn a_head_of_another_use_of_the_file_is_none() {
        assert_eq!(Head::decode(5, &HEAD.encode(5)), Some(HEAD));
        assert_eq!(Head::decode(6, &HEAD.encode(5)), None);
    }

    #[test]
    fn lengths_beyond_the_bounds_are_refused_even_with_a_good_checksum() {
        for (header_bytes, payload_bytes) in
            [(u32::MAX, 0), (0, u32::MAX), ((16 << 20) + 1, 0), (0, (16 << 20) + 1)]
        {
            let head = Head { header_bytes, payload_bytes, ..HEAD };
            assert_eq!(Head::decode(1, &head.encode(1)), None, "{head:?}");
        }
        assert_eq!(Head::decode(1, &Head { index: u64::MAX, ..HEAD }.encode(1)), None);
        assert_eq!(Head::decode(1, &Head { kind: Kind::Mark, ..HEAD }.encode(1)), None, "a mark with a body");
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_what_encodes_to_them(
            mut bytes in prop::array::uniform32(any::<u8>()), tail in any::<[u8; 4]>(), salt: u64, mend: bool
        ) {
            if mend {
                // Past the checksum, so that the checks behind it are reached.
                bytes[..3].copy_from_slice(&ITEM_MAGIC);
                bytes[3] = 1 + bytes[3] % 2;
            }
            let mut all = [0; HEAD_BYTES];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&if mend { head_crc(salt, &bytes).to_le_bytes() } else { tail });
            if let Some(head) = Head::decode(salt, &all) {
                prop_assert_eq!(head.encode(salt), all);
            }
            all[..8].copy_from_slice(&MAGIC);
            if mend {
                let crc = crc32fast::hash(&all[..32]);
                all[32..].copy_from_slice(&crc.to_le_bytes());
            }
            if let Ok(prefix) = Prefix::decode(&all) {
                prop_assert_eq!(prefix.encode(), all);
            }
        }
    }
}
