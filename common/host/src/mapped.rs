//! A file that is read where the page cache holds it.

use std::{fs::File, io, ops::Deref};

/// The bytes of a file that this program wrote, whole, and writes no more.
///
/// If the file is truncated while it is mapped, a read of the missing part ends the process with SIGBUS. For a worker that is the
/// same as being killed: the job continues. Read other programs' files instead of mapping them: those may change.
#[derive(Debug)]
pub struct Mapped(memmap2::Mmap);

impl Mapped {
    /// Maps a whole file. It may be closed and removed afterwards.
    #[expect(unsafe_code, reason = "a mapping is only as constant as its file")]
    pub fn whole(file: &File) -> io::Result<Self> {
        // SAFETY: the caller says that it is a file of ours, which is put in its place by a rename when it is complete, in a folder
        // that only this user can write, and is not opened for writing again; so the bytes do not change. If the user truncates
        // it all the same, a read of what is gone is a signal that ends the process, not memory of something else.
        unsafe { memmap2::Mmap::map(file) }.map(Self)
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_where_it_lies_also_when_its_name_is_gone() {
        let path = std::env::temp_dir().join(format!("paraft-mapped-{}", std::process::id()));
        std::fs::write(&path, b"as it was written").expect("writes");
        let mapped = Mapped::whole(&File::open(&path).expect("opens")).expect("maps");
        std::fs::remove_file(&path).expect("removes");
        assert_eq!(&*mapped, b"as it was written");
    }
}
