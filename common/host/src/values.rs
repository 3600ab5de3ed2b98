//! Vectors of `f32` that a process holds only in part.
//!
//! [`Pages`] are memory that is released piece by piece. [`Scratch`] is a mapped file, which the kernel
//! caches as far as memory permits. Both are as long as the model, whatever the size of memory.

use memmap2::{MmapMut, MmapOptions, UncheckedAdvice};
use rustix::fs::FallocateFlags;
use std::{
    fs::File,
    io,
    ops::{Deref, DerefMut, Range},
    path::Path,
};

const F32: usize = size_of::<f32>();

/// Zero-initialised values. A page takes memory only between its first write and its
/// [release](Self::release).
#[derive(Debug)]
pub struct Pages {
    map: Option<MmapMut>,
    page: usize,
}

impl Pages {
    /// A vector of `len` values.
    ///
    /// # Errors
    ///
    /// The process may not have so large an address space.
    pub fn new(len: usize) -> io::Result<Self> {
        let map = || MmapOptions::new().len(bytes(len)?).no_reserve_swap().map_anon();
        let map = (len > 0).then(map).transpose()?;
        Ok(Self { map, page: rustix::param::page_size() })
    }

    /// As [`Self::new`], for values that are read in no order: in huge pages, if the host has any.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn huge(len: usize) -> io::Result<Self> {
        let pages = Self::new(len)?;
        if let Some(map) = &pages.map {
            // Faster, not necessary: a kernel without huge pages refuses it.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(pages)
    }

    /// Releases this range: pages that lie whole in it take no memory, and read as zeros. The rest of
    /// the first and last page keeps its values.
    pub fn release(&mut self, range: Range<usize>) {
        let Some(map) = &self.map else { return };
        let (begin, end) =
            ((range.start * F32).next_multiple_of(self.page), (range.end * F32).min(map.len()));
        // The last page ends with the map.
        let end = if end == map.len() { end } else { end / self.page * self.page };
        if begin < end {
            // Correctness does not depend on the release, so an error is ignored.
            let _ = discard(map, begin..end);
        }
    }
}

#[expect(unsafe_code, reason = "nobody has a reference to what changes")]
fn discard(map: &MmapMut, bytes: Range<usize>) -> io::Result<()> {
    // SAFETY: `DontNeed` makes an anonymous private mapping's pages zeros. The caller has the mapping exclusively, so no reference to
    // these bytes lives, and zeros are valid values.
    unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) }
}

impl Deref for Pages {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.map.as_ref().map_or(&[], |map| bytemuck::cast_slice(map))
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.map.as_mut().map_or(&mut [], |map| bytemuck::cast_slice_mut(map))
    }
}

/// Zero-initialised values in an unnamed file, which ends with the process.
#[derive(Debug)]
pub struct Scratch(Option<MmapMut>);

impl Scratch {
    /// A vector of `len` values, in a file in this folder. Reserves its disk space.
    ///
    /// # Errors
    ///
    /// The folder is not writable, or its disk is full.
    pub fn new(folder: &Path, len: usize) -> io::Result<Self> {
        let map = || -> io::Result<MmapMut> {
            let file = tempfile::tempfile_in(folder)?;
            // A write without disk space would end the process with SIGBUS.
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes(len)? as u64)?;
            shared(&file)
        };
        (len > 0).then(map).transpose().map(Self)
    }
}

#[expect(unsafe_code, reason = "a mapping is only as constant as its file")]
fn shared(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the file has no name, so no other process can open, change or shorten it.
    unsafe { MmapMut::map_mut(file) }
}

impl Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.as_ref().map_or(&[], |map| bytemuck::cast_slice(map))
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.0.as_mut().map_or(&mut [], |map| bytemuck::cast_slice_mut(map))
    }
}

fn bytes(len: usize) -> io::Result<usize> {
    len.checked_mul(F32).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
#[path = "values_tests.rs"]
mod tests;
