//! One segment file: reading its items.

use super::format::{
    BadPrefix, Entry, HEAD_BYTES, Head, ITEM_MAGIC, PREFIX_BYTES, Prefix, VERSION, body_crc, decode_table,
};
use crate::{
    StoreError,
    disk::{Access, Disk, DiskFile},
    error::named,
};
use bytes::Bytes;
use paraft_common::Payload;
use std::{
    io,
    path::{Path, PathBuf},
};

/// Bytes that are searched or rewritten at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// An open segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub path: PathBuf,
    pub file: Box<dyn DiskFile>,
    pub prefix: Prefix,
    /// End of the last item that was read or written.
    pub offset: u64,
}

/// An item and its position.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundItem {
    pub at: u64,
    pub head: Head,
}

impl FoundItem {
    /// The end of the item.
    pub fn end(&self) -> u64 {
        self.at + HEAD_BYTES as u64 + self.head.body_bytes()
    }
}

impl Segment {
    /// Opens a segment, positioned at its first item. Refuses a file that is shorter than it was created, unless it
    /// is `being_cut`.
    pub fn open(
        disk: &dyn Disk,
        path: PathBuf,
        access: Access,
        being_cut: bool,
    ) -> Result<Segment, StoreError> {
        let file = disk.open(&path, access).map_err(StoreError::io("open", &path))?;
        let size = file.size().map_err(StoreError::io("read", &path))?;
        let mut bytes = [0; PREFIX_BYTES];
        let bytes = &mut bytes[..PREFIX_BYTES.min(usize::try_from(size).unwrap_or(usize::MAX))];
        file.read_at(0, bytes).map_err(StoreError::io("read", &path))?;
        match Prefix::decode(bytes) {
            Ok(prefix) if size < prefix.reserved && !being_cut => {
                let what = format!(
                    "it ends there, though {} bytes were made durable before its first record: what followed was cut off",
                    prefix.reserved
                );
                Err(StoreError::damaged(&path, size, what))
            }
            Ok(prefix) if size < prefix.start() => {
                Err(StoreError::damaged(&path, size, "it ends before its first record"))
            }
            Ok(prefix) => Ok(Segment { path, file, prefix, offset: prefix.start() }),
            Err(BadPrefix::Damaged(what)) => Err(StoreError::damaged(&path, 0, what)),
            Err(BadPrefix::Version(found)) => Err(StoreError::Version { path, found, supported: VERSION }),
        }
    }

    pub fn size(&self) -> Result<u64, StoreError> {
        self.file.size().map_err(StoreError::io("read", &self.path))
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.file.read_at(offset, into).map_err(StoreError::io("read", &self.path))
    }

    /// The state of every group when the segment was started; `None` if the table is damaged.
    pub fn table(&self) -> Result<Option<Vec<Entry>>, StoreError> {
        let mut bytes = vec![0; self.prefix.table_bytes as usize]; // within the file
        self.read_at(PREFIX_BYTES as u64, &mut bytes)?;
        match crc32fast::hash(&bytes) == self.prefix.table_crc {
            true => Ok(decode_table(&bytes)),
            false => Ok(None),
        }
    }

    /// The item at `at`, if its head is valid and the file contains its body. `size`: the file's.
    pub fn item(&self, at: u64, size: u64) -> Result<Option<FoundItem>, StoreError> {
        let left = size.saturating_sub(at);
        let mut bytes = [0; HEAD_BYTES];
        if left < HEAD_BYTES as u64 {
            return Ok(None);
        }
        self.read_at(at, &mut bytes)?;
        let head = Head::decode(self.prefix.salt, &bytes);
        let head = head.filter(|h| h.body_bytes() <= left - HEAD_BYTES as u64);
        Ok(head.map(|head| FoundItem { at, head }))
    }

    /// An item's header and payload; `None` if their checksum is wrong.
    pub fn body(&self, item: &FoundItem) -> Result<Option<(Bytes, Payload)>, StoreError> {
        let mut header = vec![0; item.head.body_bytes() as usize]; // bounded by `Head::decode`
        self.read_at(item.at + HEAD_BYTES as u64, &mut header)?;
        let mut header = Bytes::from(header);
        let payload: Payload = header.split_off(item.head.header_bytes as usize).into();
        let whole = item.head.body_crc == body_crc(&header, &payload);
        Ok(whole.then_some((header, payload)))
    }

    /// The items of this use of the file whose heads lie anywhere from `from` on, in order.
    pub fn beyond(&self, from: u64) -> Result<Vec<FoundItem>, StoreError> {
        let (size, mut found, mut at) = (self.size()?, Vec::new(), from);
        let head_bytes = HEAD_BYTES as u64;
        let mut chunk = Vec::new();
        while at + head_bytes <= size {
            // Heads at the end of this chunk are read completely: chunks overlap by one head minus a byte.
            let bytes = (CHUNK_BYTES + head_bytes - 1).min(size - at);
            chunk.resize(bytes as usize, 0);
            self.read_at(at, &mut chunk)?;
            for place in memchr::memmem::find_iter(&chunk, &ITEM_MAGIC) {
                let head = Head::decode(self.prefix.salt, &chunk[place..]);
                found.extend(head.map(|head| FoundItem { at: at + place as u64, head }));
            }
            at += CHUNK_BYTES;
        }
        Ok(found)
    }

    /// Rewrites the bytes from `from` to the offset unchanged.
    pub fn rewrite(&mut self, from: u64) -> Result<(), StoreError> {
        let (mut at, mut chunk) = (from, Vec::new());
        while at < self.offset {
            chunk.resize(CHUNK_BYTES.min(self.offset - at) as usize, 0);
            self.read_at(at, &mut chunk)?;
            let written = self.file.write_at(at, &mut [std::io::IoSlice::new(&chunk)]);
            written.map_err(StoreError::io("write", &self.path))?;
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Cuts everything after the offset and fills it with zeros, to `room` bytes in all if they can be reserved,
    /// and never below the size in the prefix: the segment may be from a time of longer segments. Not durable yet;
    /// until then the file may be shorter than its prefix claims.
    pub fn cut(&mut self, room: u64) -> io::Result<()> {
        let room = room.max(self.prefix.reserved);
        self.file.set_len(self.offset).map_err(named("cut", &self.path))?;
        let reserved = self.file.allocate(room);
        if reserved.is_err() && self.offset < self.prefix.reserved {
            // On a full disk: a sparse file of zeros.
            self.file.set_len(self.prefix.reserved).map_err(named("lengthen", &self.path))?;
        }
        Ok(())
    }
}

/// The path of the segment that starts with item `first`.
pub(super) fn segment_path(dir: &Path, first: u64) -> PathBuf {
    dir.join(format!("{first:016}.log"))
}
