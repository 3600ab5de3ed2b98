//! Memory that another process of this host reads.
//!
//! The process that makes it writes it; the other maps it read-only. It is sealed: it cannot shrink, so no
//! read faults, and a process that receives its descriptor cannot map it for writing. It has no more pages
//! than were written.

use crate::pool::Buffer;
use bytes::Bytes;
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use std::{
    collections::BTreeMap,
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    slice,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Slots begin at multiples of this: a page, and so a multiple of any value's size.
pub(super) const UNIT: usize = 4096;

/// The file system of anonymous memory with ordinary pages.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

/// The largest memory that is mapped for another process.
const MAX_MAPPED_BYTES: usize = 1 << 40;

/// A mapping; dropping it unmaps.
struct Map {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it is a range of addresses and nothing else; the code that reads or writes there answers for it.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses changes no memory that is in use.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, len })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: no reference into it is left: each holder of one holds the owner of this.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Memory of ours that another process may read. Parts of it are taken as [`Slot`]s.
pub struct Memory {
    map: Map,
    fd: OwnedFd,
    pub(super) free: Mutex<FreeRanges>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} shared bytes", self.map.len)
    }
}

/// The free ranges, as start and length. Adjacent ranges are one.
#[derive(Debug)]
pub(super) struct FreeRanges(pub(super) BTreeMap<usize, usize>);

impl FreeRanges {
    /// The first range that is large enough: what was used last is in the cache, and few pages are ever
    /// touched.
    fn take(&mut self, len: usize) -> Option<usize> {
        let (&at, &room) = self.0.iter().find(|(_, room)| **room >= len)?;
        self.0.remove(&at);
        if room > len {
            self.0.insert(at + len, room - len);
        }
        Some(at)
    }

    fn give(&mut self, mut at: usize, mut len: usize) {
        if let Some((&before, &room)) = self.0.range(..at).next_back()
            && before + room == at
        {
            self.0.remove(&before);
            (at, len) = (before, room + len);
        }
        if let Some(room) = self.0.remove(&(at + len)) {
            len += room;
        }
        self.0.insert(at, len);
    }
}

impl Memory {
    /// Memory of `bytes` bytes; no page exists before it is written.
    ///
    /// # Errors
    /// The kernel has no such memory (Linux 5.1 is the first), or no descriptor or address space for it.
    pub fn new(bytes: usize) -> io::Result<Arc<Self>> {
        let len = bytes.next_multiple_of(UNIT).max(UNIT);
        let fd = memfd_create("paraft", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, len as u64)?;
        let map = Map::new(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        fcntl_add_seals(
            &fd,
            SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL,
        )?;
        Ok(Arc::new(Self { map, fd, free: Mutex::new(FreeRanges(BTreeMap::from([(0, len)]))) }))
    }

    /// Takes a part of `len` bytes, with its old contents; `None`: there is no room.
    pub fn slot(self: &Arc<Self>, len: usize) -> Option<Slot> {
        let at = self.lock().take(len.next_multiple_of(UNIT).max(UNIT))?;
        Some(Slot { memory: self.clone(), at, len })
    }

    /// The offset of these bytes in it, if they lie in it.
    pub fn place_of(&self, bytes: &[u8]) -> Option<usize> {
        let at = (bytes.as_ptr() as usize).checked_sub(self.map.base.as_ptr() as usize)?;
        (at.checked_add(bytes.len())? <= self.map.len).then_some(at)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn lock(&self) -> MutexGuard<'_, FreeRanges> {
        self.free.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A part of [`Memory`]; dropping it frees the part. Nothing else writes to it; the other process may read it
/// at any time.
pub struct Slot {
    memory: Arc<Memory>,
    at: usize,
    len: usize,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {}", self.len, self.at)
    }
}

impl Slot {
    /// The memory of this slot.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Its bytes, for sending: the part is freed when the last of them is dropped.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the part lies in the mapping, which lives as long as `memory`. No other slot overlaps it,
        // and only the holder of this one by `&mut` writes to it. Its pages read as zeros before they are
        // written. The other process cannot write.
        unsafe { slice::from_raw_parts(self.memory.map.base.as_ptr().add(self.at), self.len) }
    }
}

impl AsMut<[u8]> for Slot {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only access to it in this process. The other process may
        // read meanwhile; the messages between the two say which bytes it may rely on.
        unsafe { slice::from_raw_parts_mut(self.memory.map.base.as_ptr().add(self.at), self.len) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.memory.lock().give(self.at, self.len.next_multiple_of(UNIT).max(UNIT));
    }
}

/// Memory of another process, mapped for reading. It may change at any moment.
pub struct PeerMemory(Map);

impl fmt::Debug for PeerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of another process", self.0.len)
    }
}

impl PeerMemory {
    /// Maps the memory of a descriptor.
    ///
    /// # Errors
    /// It is not memory of a fixed size: reading it could end this process.
    pub fn new(fd: &OwnedFd) -> io::Result<Self> {
        let refused = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        if !fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return refused("shared memory that may shrink");
        }
        // A read may find no huge page left.
        if fstatfs(fd)?.f_type != TMPFS {
            return refused("shared memory that is not of plain pages");
        }
        let len = usize::try_from(fstat(fd)?.st_size).unwrap_or(0);
        if !(UNIT..=MAX_MAPPED_BYTES).contains(&len) {
            return refused("shared memory of no possible size");
        }
        Ok(Self(Map::new(fd.as_fd(), len, ProtFlags::READ)?))
    }

    /// Whether it contains these bytes, starting at a multiple of a unit.
    pub fn has(&self, at: usize, len: usize) -> bool {
        at.is_multiple_of(UNIT) && at.checked_add(len).is_some_and(|end| end <= self.0.len)
    }

    /// Copies these bytes as they are, each eight of them read once. If the other process writes meanwhile,
    /// the copy is a mixture; all later work uses the copy alone. Copies nothing if the memory is shorter.
    pub(crate) fn copy(&self, at: usize, into: &mut Buffer) {
        if !self.has(at, into.as_ref().len()) {
            return;
        }
        for (i, word) in into.words().iter_mut().enumerate() {
            // SAFETY: inside the mapping: `at` and the mapping's length are multiples of a page, so the last word is whole too.
            // It is aligned, and read atomically, since the other process may write to it.
            let place = unsafe { AtomicU64::from_ptr(self.0.base.as_ptr().add(at + 8 * i).cast()) };
            *word = place.load(Relaxed);
        }
    }

    /// The bytes in place. Read them only while the other process has promised not to write there.
    pub(super) fn bytes(&self, at: usize, len: usize) -> &[u8] {
        if !self.has(at, len) {
            return &[];
        }
        // SAFETY: inside the mapping. The bytes do not change: the server that lent them writes there only
        // after they were given back (`Shared::lend`), and a worker trusts its servers for weights in all
        // else, too.
        unsafe { slice::from_raw_parts(self.0.base.as_ptr().add(at), len) }
    }
}
