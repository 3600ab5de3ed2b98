//! Segments of a log that are whole but for what the fuzzer chose: what `ps-server/store/src/log/format.rs` writes.

use std::ops::Range;

const MAGIC: [u8; 8] = *b"PARAFTLG";
const ITEM: [u8; 3] = [0xF5, b'P', 0xF7];
/// A segment says how long it was made, in blocks of 4 KiB. The disk of a target is memory, which shall not be filled.
const MAX_BLOCKS: u32 = 16;

const VERSION: u32 = 1;
/// Bytes before a segment's table.
const PREFIX: usize = 44;
/// Of an item before its header.
const HEAD: usize = 60;

fn put(bytes: &mut [u8], at: Range<usize>, value: &[u8]) {
    bytes[at].copy_from_slice(value);
}

fn word(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |b| u32::from_le_bytes(*b))
}

/// Leaves a segment as it is, but bounds the length that it says it was made with.
pub fn bound(bytes: &mut [u8]) {
    if let Some(blocks) = bytes.get(12..16).map(word) {
        put(bytes, 12..16, &blocks.min(MAX_BLOCKS).to_le_bytes());
    }
}

/// Mends everything that is checked before its contents count: magic, version, checksums, and lengths that go beyond the
/// end.
pub fn mend(bytes: &mut [u8]) {
    let (prefix, head) = (PREFIX, HEAD);
    if bytes.len() < prefix {
        return;
    }
    put(bytes, 0..8, &MAGIC);
    put(bytes, 8..12, &VERSION.to_le_bytes());
    bound(bytes);
    let table = (word(&bytes[32..]) as usize).min(bytes.len() - prefix);
    let start = prefix + table;
    put(bytes, 32..36, &(table as u32).to_le_bytes());
    let crc = crc32fast::hash(&bytes[prefix..start]);
    put(bytes, 36..40, &crc.to_le_bytes());
    let crc = crc32fast::hash(&bytes[..prefix - 4]);
    put(bytes, prefix - 4..prefix, &crc.to_le_bytes());
    let salt: [u8; 8] = *bytes[16..].first_chunk().expect("a whole prefix");
    let mut rest = &mut bytes[start..];
    while rest.len() >= head && rest[..3] == ITEM {
        let room = rest.len() - head;
        let header = (word(&rest[4..]) as usize).min(room);
        let payload = (word(&rest[8..]) as usize).min(room - header);
        put(rest, 4..8, &(header as u32).to_le_bytes());
        put(rest, 8..12, &(payload as u32).to_le_bytes());
        let body = head..head + header + payload;
        let crc = crc32fast::hash(&rest[body.clone()]);
        put(rest, 12..16, &crc.to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&salt);
        crc.update(&rest[..head - 4]);
        let crc = crc.finalize();
        put(rest, head - 4..head, &crc.to_le_bytes());
        rest = &mut rest[body.end..];
    }
}

/// A segment with these records (header and payload), the first of which is `first`; they are of group 0.
/// `salt` tells uses of a file apart.
pub fn segment(first: u64, salt: u64, records: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut out = [MAGIC.as_slice(), &VERSION.to_le_bytes(), &[0; 4]].concat();
    out.extend(salt.to_le_bytes());
    out.extend(first.to_le_bytes());
    if first > 0 {
        // What group 0 had come to: key, flags, turn, first, next, purged, bytes of the tag.
        let table =
            [&[0; 12][..], &first.to_le_bytes(), &[0; 8], &first.to_le_bytes(), &[0xFF; 8], &[0; 4]].concat();
        out.extend((table.len() as u32).to_le_bytes());
        out.extend([0; 8]);
        out.extend(table);
    } else {
        out.resize(PREFIX, 0);
    }
    for (index, record) in (first..).zip(records) {
        out.extend(item(1, index, first, 0, *record));
    }
    mend(&mut out);
    out
}

/// An item, of the group `key`, with checksums that have to be mended.
pub fn item(kind: u8, index: u64, synced: u64, key: u64, (header, payload): (&[u8], &[u8])) -> Vec<u8> {
    let mut out = ITEM.to_vec();
    out.push(kind);
    out.extend((header.len() as u32).to_le_bytes());
    out.extend((payload.len() as u32).to_le_bytes());
    out.extend([0; 4]);
    out.extend(index.to_le_bytes());
    out.extend(synced.to_le_bytes()); // durable up to the segment's beginning
    [key, index, index].iter().for_each(|long| out.extend(long.to_le_bytes()));
    out.extend([0; 4]);
    out.extend(header);
    out.extend(payload);
    out
}

/// A mark at the end of a segment: the log was closed here, before record `next`.
pub fn mark(next: u64) -> Vec<u8> {
    item(2, next, next, 0, (&[], &[]))
}
