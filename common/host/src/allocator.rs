//! The allocator of our processes, and how it is set.
//!
//! Payload buffers of up to a megabyte come and go with each step; glibc's allocator gives their pages back and takes
//! them fresh each time. mimalloc keeps them for a while, but its version 2 only for 10 ms, which is less than a step.
//!
//! What it keeps, and the huge pages it asks for, can be more than what is in use: a server whose replicas held 115 MiB had
//! 350 to 450 MiB of the host, and 170 to 200 without either. Where there is little memory, speed gives way.
//!
//! A process that waits for work uses little of each huge page: a server without a job took 80 MiB with them and 52
//! without, one with 64 shards 216 and 71. So it has none until it gets a job.

pub use mimalloc::MiMalloc as Allocator;
use std::{
    ffi::{c_int, c_long},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

/// How long a freed page is kept before the system gets it back.
const PURGE_DELAY_MS: c_long = 300;
/// Huge pages are off until they are of use.
static WITHOUT_HUGE_PAGES: AtomicBool = AtomicBool::new(false);
/// Where the user says otherwise.
const VARIABLES: [&str; 2] = ["MIMALLOC_PURGE_DELAY", "MIMALLOC_RESET_DELAY"];
/// `mi_option_purge_delay` of mimalloc 2; the bindings do not name it.
const PURGE_DELAY: c_int = 15;

/// Sets the allocator for buffers that come and go or, where memory is scarce, so that what is freed goes back at once; unless
/// mimalloc's own environment variables say otherwise. Once, at the start of `main`.
pub fn set_up(scarce: bool) {
    if scarce {
        // It may be forbidden: then there is more kept than need be.
        let _ = rustix::thread::disable_transparent_huge_pages(true);
    }
    if VARIABLES.iter().all(|v| std::env::var_os(v).is_none()) {
        set(PURGE_DELAY, if scarce { 0 } else { PURGE_DELAY_MS });
    }
}

/// Takes no huge pages until [`use_huge_pages`].
pub fn spare_huge_pages() {
    let allowed = matches!(rustix::thread::transparent_huge_pages_are_disabled(), Ok(false));
    if allowed && rustix::thread::disable_transparent_huge_pages(true).is_ok() {
        WITHOUT_HUGE_PAGES.store(true, Relaxed);
    }
}

/// Large buffers come: takes huge pages for them, unless memory is scarce or someone else forbids them.
pub fn use_huge_pages() {
    if WITHOUT_HUGE_PAGES.swap(false, Relaxed) {
        let _ = rustix::thread::disable_transparent_huge_pages(false);
    }
}

#[expect(unsafe_code, reason = "a C function")]
fn set(option: c_int, value: c_long) {
    // SAFETY: it stores a number in a table; the option is one of mimalloc's.
    unsafe { libmimalloc_sys::mi_option_set(option, value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(unsafe_code, reason = "a C function")]
    fn get(option: c_int) -> c_long {
        // SAFETY: it reads a number from a table; the option is one of mimalloc's.
        unsafe { libmimalloc_sys::mi_option_get(option) }
    }

    #[test]
    fn the_option_is_the_one_that_the_bindings_do_not_name() {
        assert_eq!(get(PURGE_DELAY), 10, "mimalloc 2's default");
        set_up(false);
        assert_eq!(get(PURGE_DELAY), PURGE_DELAY_MS);
        set_up(true);
        assert_eq!(get(PURGE_DELAY), 0);
    }
}
