//! Memory that another process of this host reads.
//!
//! Who makes it writes; the other maps it for reading only. It is sealed: it can neither shrink, so that no read faults, nor be
//! mapped for writing by anyone who is handed its descriptor. It has no more pages than were written.

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

/// What is taken begins at a multiple of this: a page, and so a multiple of any value's size.
pub(super) const UNIT: usize = 4096;

/// The file system of memory without a name, of plain pages.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

/// The largest that is mapped for somebody else.
const MOST: usize = 1 << 40;

/// A mapping, which ends with this.
struct Map {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it is a place of the address space and nothing else; who reads or writes there answers for it.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at a place that the kernel chooses changes no memory that anyone has.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, len })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into it any more: each holds the owner of this.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Memory of ours that another process may read. Parts of it are taken as [`Slot`]s.
pub struct Memory {
    map: Map,
    fd: OwnedFd,
    pub(super) free: Mutex<Free>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} shared bytes", self.map.len)
    }
}

/// What is not taken: where it begins, and its length. Neighbours are one.
#[derive(Debug)]
pub(super) struct Free(pub(super) BTreeMap<usize, usize>);

impl Free {
    /// The first place that is large enough: what was used last is warm, and few pages are ever touched.
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
    /// Room for `bytes`, none of which is there before it is written.
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
        Ok(Arc::new(Self { map, fd, free: Mutex::new(Free(BTreeMap::from([(0, len)]))) }))
    }

    /// Takes a part of `len` bytes, with whatever is there; `None`: there is no room for it.
    pub fn slot(self: &Arc<Self>, len: usize) -> Option<Slot> {
        let at = self.lock().take(len.next_multiple_of(UNIT).max(UNIT))?;
        Some(Slot { memory: self.clone(), at, len })
    }

    /// Where these bytes lie in it, if they do.
    pub fn place_of(&self, bytes: &[u8]) -> Option<usize> {
        let at = (bytes.as_ptr() as usize).checked_sub(self.map.base.as_ptr() as usize)?;
        (at.checked_add(bytes.len())? <= self.map.len).then_some(at)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A part of [`Memory`], given back with this. Nobody else writes to it; the other process may read it at any time.
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
    /// What it is a part of.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Its bytes, to be sent: it is given back when the last of them is let go.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the part lies in the mapping, which lives as long as `memory`; no other slot overlaps it, and only who has
        // this one by `&mut` writes to it. Its pages read as zeros before they are written. The other process cannot write.
        unsafe { slice::from_raw_parts(self.memory.map.base.as_ptr().add(self.at), self.len) }
    }
}

impl AsMut<[u8]> for Slot {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only way to it in this process. That the other process reads meanwhile is
        // its own affair: what it may rely on is said by the messages between the two.
        unsafe { slice::from_raw_parts_mut(self.memory.map.base.as_ptr().add(self.at), self.len) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.memory.lock().give(self.at, self.len.next_multiple_of(UNIT).max(UNIT));
    }
}

/// Memory of another process, mapped for reading. It may change at any moment.
pub struct Theirs(Map);

impl fmt::Debug for Theirs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of another process", self.0.len)
    }
}

impl Theirs {
    /// Maps what a descriptor stands for.
    ///
    /// # Errors
    /// It is no memory that keeps its size: reading it could end this process.
    pub fn new(fd: &OwnedFd) -> io::Result<Self> {
        let refused = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        if !fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return refused("shared memory that may shrink");
        }
        // Of huge pages there may be none left when one is read.
        if fstatfs(fd)?.f_type != TMPFS {
            return refused("shared memory that is not of plain pages");
        }
        let len = usize::try_from(fstat(fd)?.st_size).unwrap_or(0);
        if !(UNIT..=MOST).contains(&len) {
            return refused("shared memory of no possible size");
        }
        Ok(Self(Map::new(fd.as_fd(), len, ProtFlags::READ)?))
    }

    /// Whether it has these bytes, from the beginning of a unit on.
    pub fn has(&self, at: usize, len: usize) -> bool {
        at.is_multiple_of(UNIT) && at.checked_add(len).is_some_and(|end| end <= self.0.len)
    }

    /// Copies these bytes as they are, each eight of them read once. Where the other side writes meanwhile, it is a mixture; what
    /// is made of the copy is made of these bytes alone. Copies nothing where it has not as many.
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

    /// The bytes where they lie. To be read only while the other side has promised not to write there.
    pub(super) fn bytes(&self, at: usize, len: usize) -> &[u8] {
        if !self.has(at, len) {
            return &[];
        }
        // SAFETY: inside the mapping. They do not change: the server that lent them writes there only when they were given
        // back (`Shared::lend`), and a worker believes its servers in all else that they say of weights.
        unsafe { slice::from_raw_parts(self.0.base.as_ptr().add(at), len) }
    }
}
