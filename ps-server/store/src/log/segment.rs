//! One segment file: walking over its items.

use super::{
    Record,
    format::{BadPrefix, HEAD_BYTES, Head, ITEM_MAGIC, Kind, PREFIX_BYTES, Prefix, VERSION, body_crc},
};
use crate::{
    StoreError,
    disk::{Access, Disk, DiskFile},
    error::named,
};
use bytes::Bytes;
use std::{
    io,
    path::{Path, PathBuf},
};

/// So many bytes are searched or rewritten at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// An open segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub path: PathBuf,
    pub file: Box<dyn DiskFile>,
    pub prefix: Prefix,
    /// Behind the last item that was read or written.
    pub offset: u64,
}

/// What is behind the end of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Beyond {
    /// The furthest that an item there says the log was durable; 0 if none says.
    pub synced: u64,
    /// Where the last item there ends; 0 if there is none.
    pub end: u64,
}

impl Segment {
    /// Opens a segment and stands before its first item. Refuses one that is shorter than it was made, unless it is
    /// `being_cut`.
    pub fn open(
        disk: &dyn Disk,
        path: PathBuf,
        access: Access,
        being_cut: bool,
    ) -> Result<Segment, StoreError> {
        let file = disk.open(&path, access).map_err(StoreError::io("open", &path))?;
        let mut bytes = [0; PREFIX_BYTES];
        let size = file.size().map_err(StoreError::io("read", &path))?;
        if size < PREFIX_BYTES as u64 {
            return Err(StoreError::damaged(&path, 0, "it is shorter than an empty segment"));
        }
        file.read_at(0, &mut bytes).map_err(StoreError::io("read", &path))?;
        match Prefix::decode(&bytes) {
            Ok(prefix) if size < prefix.reserved && !being_cut => {
                let what = format!(
                    "it ends there, though {} bytes were made durable before its first record: what followed was cut off",
                    prefix.reserved
                );
                Err(StoreError::damaged(&path, size, what))
            }
            Ok(prefix) => Ok(Segment { path, file, prefix, offset: PREFIX_BYTES as u64 }),
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

    /// The head of the item at the offset, if that is what the log goes on with at index `next`.
    fn head(&self, next: u64, size: u64) -> Result<Option<Head>, StoreError> {
        let mut bytes = [0; HEAD_BYTES];
        let left = size.saturating_sub(self.offset);
        if left < HEAD_BYTES as u64 {
            return Ok(None);
        }
        self.read_at(self.offset, &mut bytes)?;
        let head = Head::decode(self.prefix.salt, &bytes);
        Ok(head.filter(|h| h.index == next && h.body_bytes() <= left - HEAD_BYTES as u64))
    }

    /// Reads the item at the offset and goes behind it: its head, and the record if it is one. `None`: there is
    /// no whole item with index `next`. `size`: the file's.
    pub fn read(&mut self, next: u64, size: u64) -> Result<Option<(Head, Option<Record>)>, StoreError> {
        let Some(head) = self.head(next, size)? else { return Ok(None) };
        let end = self.offset + HEAD_BYTES as u64 + head.body_bytes();
        if head.kind == Kind::Mark {
            self.offset = end;
            return Ok(Some((head, None)));
        }
        let mut header = vec![0; head.body_bytes() as usize];
        self.read_at(self.offset + HEAD_BYTES as u64, &mut header)?;
        let mut header = Bytes::from(header);
        let payload = header.split_off(head.header_bytes as usize).into();
        if head.body_crc != body_crc(&header, &payload) {
            return Ok(None);
        }
        self.offset = end;
        Ok(Some((head, Some(Record { index: head.index, header, payload }))))
    }

    /// Goes behind the record with index `last` and reads no bodies.
    pub fn skip_to_end_of(&mut self, last: u64) -> Result<(), StoreError> {
        let (size, mut next) = (self.size()?, self.prefix.first);
        while next <= last {
            let Some(head) = self.head(next, size)? else {
                let what = format!("record {next} is not where it was written");
                return Err(StoreError::damaged(&self.path, self.offset, what));
            };
            self.offset += HEAD_BYTES as u64 + head.body_bytes();
            next += u64::from(head.kind == Kind::Record);
        }
        Ok(())
    }

    /// Looks for items of this use of the file anywhere from the offset on.
    pub fn beyond(&self) -> Result<Beyond, StoreError> {
        let (size, mut found, mut at) = (self.size()?, Beyond::default(), self.offset);
        let mut chunk = Vec::new();
        while at + HEAD_BYTES as u64 <= size {
            // Heads that begin in this chunk are read whole: chunks overlap by one head less a byte.
            let bytes = (CHUNK_BYTES + HEAD_BYTES as u64 - 1).min(size - at);
            chunk.resize(bytes as usize, 0);
            self.read_at(at, &mut chunk)?;
            for place in memchr::memmem::find_iter(&chunk, &ITEM_MAGIC) {
                let head = chunk[place..].first_chunk().and_then(|h| Head::decode(self.prefix.salt, h));
                if let Some(head) = head {
                    let end = at + place as u64 + HEAD_BYTES as u64 + head.body_bytes();
                    found.synced = found.synced.max(head.synced);
                    found.end = found.end.max(end.min(size));
                }
            }
            at += CHUNK_BYTES;
        }
        Ok(found)
    }

    /// Writes what lies from `from` to the offset again, as it is.
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

    /// Cuts what is behind the offset and puts zeros in its place, `room` bytes in all where they can be reserved, and
    /// never fewer than it says that it has: it may have been made when segments were longer. Not durable yet, and until
    /// then the file may be shorter than it says.
    pub fn cut(&mut self, room: u64) -> io::Result<()> {
        let room = room.max(self.prefix.reserved);
        self.file.set_len(self.offset).map_err(named("cut", &self.path))?;
        let reserved = self.file.allocate(room);
        if reserved.is_err() && self.offset < self.prefix.reserved {
            // A full disk: zeros that take no space.
            self.file.set_len(self.prefix.reserved).map_err(named("lengthen", &self.path))?;
        }
        Ok(())
    }
}

/// The name of the segment that begins with record `first`.
pub(super) fn segment_path(dir: &Path, first: u64) -> PathBuf {
    dir.join(format!("{first:016}.log"))
}
