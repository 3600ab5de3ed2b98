//! File descriptors of this process: how many it may have, and how many it has.

/// Beyond this many more are of no use: a server bounds its connections by their memory before that, and some programs
/// that a process starts close every descriptor up to its limit, one by one.
const MAX_USEFUL: u64 = 1 << 20;

/// What a process without a limit, or of a system that does not say one, is taken to have.
const UNKNOWN: u64 = 1024;

/// Raises the soft limit of descriptors to the hard one (to 1,048,576 at most), for this process and those that it
/// starts, and gives the soft limit that then holds. The soft limit is 1,024 by default for the sake of programs that use
/// `select`; ours do not. Where it cannot be raised it stays, and a line of the log says so.
pub fn raise_descriptor_limit() -> u64 {
    #[cfg(unix)]
    {
        use nix::sys::resource::{Resource, getrlimit, setrlimit};
        let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return UNKNOWN };
        let wanted = hard.min(MAX_USEFUL);
        if wanted > soft
            && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard)
        {
            tracing::warn!(soft, hard, %error, "the limit of file descriptors stays as it is");
        }
    }
    let limit = descriptor_limit();
    tracing::info!(limit, "file descriptors");
    limit
}

/// The soft limit of descriptors of this process.
pub fn descriptor_limit() -> u64 {
    #[cfg(unix)]
    {
        use nix::sys::resource::{Resource, getrlimit};
        getrlimit(Resource::RLIMIT_NOFILE).map_or(UNKNOWN, |(soft, _)| soft.min(MAX_USEFUL))
    }
    #[cfg(not(unix))]
    UNKNOWN
}

/// Descriptors that this process has open. Where none is left to count them with, that is the limit; where the system
/// has no list of them, 0.
pub fn open_descriptors() -> u64 {
    match std::fs::read_dir("/proc/self/fd") {
        // One of them is the folder that is read.
        Ok(entries) => (entries.count() as u64).saturating_sub(1),
        Err(e) if is_shortage(&e) => descriptor_limit(),
        Err(_) => 0,
    }
}

/// Whether an error says that this process or its host has no descriptor left: it passes when others are closed.
pub fn is_shortage(e: &std::io::Error) -> bool {
    #[cfg(unix)]
    {
        use nix::errno::Errno;
        let code = e.raw_os_error();
        code == Some(Errno::EMFILE as i32) || code == Some(Errno::ENFILE as i32)
    }
    #[cfg(not(unix))]
    {
        let _ = e;
        false
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn the_soft_limit_rises_to_the_hard_one_and_open_files_count() {
        use nix::sys::resource::{Resource, getrlimit};
        let limit = raise_descriptor_limit();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
        assert_eq!((limit, soft), (hard.min(MAX_USEFUL), hard.min(MAX_USEFUL)));
        // Other tests of this process open and close files meanwhile, but not so many.
        let before = open_descriptors();
        let held: Vec<_> = (0..200).map(|_| File::open("/dev/null").expect("a descriptor")).collect();
        let during = open_descriptors();
        assert!(during >= before + 150, "{before} and 200 more are {during}");
        assert!(during < limit);
        drop(held);
    }

    #[test]
    fn only_a_lack_of_descriptors_is_a_shortage() {
        let of = std::io::Error::from_raw_os_error;
        assert!(is_shortage(&of(24)) && is_shortage(&of(23)), "EMFILE, ENFILE");
        assert!(!is_shortage(&of(2)) && !is_shortage(&std::io::Error::other("x")));
    }
}
