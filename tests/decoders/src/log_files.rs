//! Segments of a log that are whole but for what the fuzzer chose: what `ps-server/store/src/log/format.rs` writes.

use std::ops::Range;

/// Bytes before a segment's first item, and of an item before its header.
pub const HEAD: usize = 36;
const MAGIC: [u8; 8] = *b"PARAFTLG";
const VERSION: u32 = 2;
const ITEM: [u8; 3] = [0xF5, b'P', 0xF7];
/// A segment says how long it was made, in blocks of 4 KiB. The disk of a target is memory, which shall not be filled.
const MAX_BLOCKS: u32 = 16;

fn put(bytes: &mut [u8], at: Range<usize>, value: &[u8]) {
    bytes[at].copy_from_slice(value);
}

fn word(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |b| u32::from_le_bytes(*b))
}

/// Leaves a segment as it is, but bounds the length that it says it was made with.
pub fn bound(bytes: &mut [u8]) {
    if let Some(flags) = bytes.get(12..16).map(word) {
        let blocks = flags >> 1;
        put(bytes, 12..16, &(blocks.min(MAX_BLOCKS) << 1 | flags & 1).to_le_bytes());
    }
}

/// Mends everything that is checked before its contents count: magic, version, checksums, and lengths that go beyond the
/// end.
pub fn mend(bytes: &mut [u8]) {
    if bytes.len() < HEAD {
        return;
    }
    put(bytes, 0..8, &MAGIC);
    put(bytes, 8..12, &VERSION.to_le_bytes());
    bound(bytes);
    let crc = crc32fast::hash(&bytes[..32]);
    put(bytes, 32..36, &crc.to_le_bytes());
    let salt: [u8; 8] = *bytes[16..].first_chunk().expect("a whole prefix");
    let mut rest = &mut bytes[HEAD..];
    while rest.len() >= HEAD && rest[..3] == ITEM {
        let room = rest.len() - HEAD;
        let header = (word(&rest[4..]) as usize).min(room);
        let payload = (word(&rest[8..]) as usize).min(room - header);
        put(rest, 4..8, &(header as u32).to_le_bytes());
        put(rest, 8..12, &(payload as u32).to_le_bytes());
        let body = HEAD..HEAD + header + payload;
        let crc = crc32fast::hash(&rest[body.clone()]);
        put(rest, 12..16, &crc.to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&salt);
        crc.update(&rest[..32]);
        let crc = crc.finalize();
        put(rest, 32..36, &crc.to_le_bytes());
        rest = &mut rest[body.end..];
    }
}

/// A segment with these records (header and payload), the first of which is `first`. `salt` tells uses of a file apart.
pub fn segment(first: u64, starts_log: bool, salt: u64, records: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut out = [MAGIC.as_slice(), &VERSION.to_le_bytes(), &u32::from(starts_log).to_le_bytes()].concat();
    out.extend(salt.to_le_bytes());
    out.extend(first.to_le_bytes());
    out.extend([0; 4]);
    for (index, (header, payload)) in (first..).zip(records) {
        out.extend(ITEM);
        out.push(1);
        out.extend((header.len() as u32).to_le_bytes());
        out.extend((payload.len() as u32).to_le_bytes());
        out.extend([0; 4]);
        out.extend(index.to_le_bytes());
        out.extend(first.to_le_bytes()); // durable up to the segment's beginning
        out.extend([0; 4]);
        out.extend(*header);
        out.extend(*payload);
    }
    mend(&mut out);
    out
}

/// A mark at the end of a segment: the log was closed here, before record `next`.
pub fn mark(next: u64) -> Vec<u8> {
    let mut out = ITEM.to_vec();
    out.push(2);
    out.extend([0; 12]);
    out.extend(next.to_le_bytes());
    out.extend(next.to_le_bytes());
    out.extend([0; 4]);
    out
}
