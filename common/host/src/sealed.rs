//! Memory that can't change any more, which processes of a host share by passing its descriptor.

use memmap2::Mmap;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// No process can change its length or its bytes.
const SEALS: SealFlags =
    SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Bytes that can't change any more. They live as long as some process has a descriptor or a mapping.
#[derive(Debug)]
pub struct Sealed {
    file: File,
    map: Mmap,
}

impl Sealed {
    /// Copies parts, one behind the other.
    ///
    /// # Errors
    /// There is no memory, no descriptor, or the kernel has no sealed memory (Linux 3.17 is the first).
    pub fn copy_of<'a>(parts: impl Iterator<Item = &'a [u8]>) -> io::Result<Self> {
        let mut file =
            File::from(memfd_create("paraft-version", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        parts.into_iter().try_for_each(|part| file.write_all(part))?;
        fcntl_add_seals(&file, SEALS)?;
        Self::map(file)
    }

    /// Maps what another process has sealed.
    ///
    /// # Errors
    /// The memory is not sealed, or there is no address space.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        if !fcntl_get_seals(&fd)?.contains(SEALS.difference(SealFlags::SEAL)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "memory that is not sealed"));
        }
        Self::map(fd.into())
    }

    #[expect(unsafe_code, reason = "a mapping is only as constant as its file")]
    fn map(file: File) -> io::Result<Self> {
        if file.metadata()?.len() == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: the memory is sealed: the kernel refuses writes and truncation by every process.
        let map = unsafe { memmap2::MmapOptions::new().populate().map(&file)? };
        Ok(Self { file, map })
    }

    /// The descriptor, for another process of this host.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRef<[u8]> for Sealed {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_memory_keeps_its_bytes_and_its_length() {
        let sealed = Sealed::copy_of([&b"some "[..], b"bytes"].into_iter()).expect("there is memory");
        assert_eq!(sealed.as_ref(), b"some bytes");
        let other = sealed.fd().try_clone_to_owned().expect("a descriptor");
        let mut file = File::from(other.try_clone().expect("a descriptor"));
        assert!(file.write_all(b"x").is_err());
        assert!(file.set_len(3).is_err() && file.set_len(30).is_err());
        assert_eq!(Sealed::open(other).expect("it is sealed").as_ref(), b"some bytes");
    }

    #[test]
    fn memory_that_may_still_change_is_refused() {
        let open = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("memory");
        File::from(open.try_clone().expect("a descriptor")).write_all(b"bytes").expect("memory");
        assert_eq!(Sealed::open(open).map(drop).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
