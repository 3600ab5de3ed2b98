//! The server's own fault points: a disk that gets full, slow or fails, and a clock that is wrong, when the faults file says so.

use paraft_fleet::faults::{EIO, ENOSPC, Faults, POLL_INTERVAL};
use paraft_server::files::DataFile;
use paraft_store::{Disk, RealDisk, faulty::FaultyDisk};
use std::{path::PathBuf, sync::Arc, thread, time::Duration};

/// This machine's disk, with faults that follow `file` for as long as the process lives. `server` is its place
/// in the list.
pub fn follow(file: PathBuf, server: u32) -> std::io::Result<Arc<dyn Disk>> {
    let disk = FaultyDisk::new(Arc::new(RealDisk));
    let faulty = disk.clone();
    let watch = move || {
        let mut last = Faults::default();
        loop {
            match Faults::read(&file) {
                Ok(now) if now != last => {
                    apply(&faulty, &last, &now, server);
                    last = now;
                }
                Ok(_) => {}
                Err(e) => {
                    tracing::warn!(file = %file.display(), error = %e, "the faults file cannot be read")
                }
            }
            thread::sleep(POLL_INTERVAL);
        }
    };
    thread::Builder::new().name("faults".into()).spawn(watch)?;
    tracing::warn!("this server has fault points (--faults)");
    Ok(Arc::new(disk))
}

fn apply(door: &FaultyDisk, last: &Faults, now: &Faults, server: u32) {
    let full = now.full_disk.contains(&server);
    if full != last.full_disk.contains(&server) {
        tracing::warn!(full, "fault on purpose: the disk");
        door.full_after(full.then_some(0));
    }
    let (reads, changes) =
        (|f: &Faults| f.failing_reads.contains(&server), |f: &Faults| f.errno_of_changes(server));
    let votes = |f: &Faults| f.full_votes.contains(&server);
    if reads(now) != reads(last) || changes(now) != changes(last) || votes(now) != votes(last) {
        let (failing, no_votes) = (changes(now), votes(now));
        tracing::warn!(reads = reads(now), changes = ?failing, votes = no_votes, "fault on purpose: the disk fails");
        door.fail_reads(reads(now).then_some(EIO));
        match failing {
            None if no_votes => {
                door.fail_changes_of(Some(ENOSPC), |path| DataFile::of(path) == Some(DataFile::Vote));
            }
            failing => door.fail_changes(failing),
        }
    }
    let clock = |f: &Faults| f.clock_s.get(&server).copied().unwrap_or(0);
    if clock(now) != clock(last) {
        tracing::warn!(seconds = clock(now), "fault on purpose: the clock");
        paraft_host::clock::shift(clock(now));
    }
    let slow = |f: &Faults| f.slow_disk_ms.get(&server).copied().unwrap_or(0);
    if slow(now) != slow(last) {
        tracing::warn!(ms = slow(now), "fault on purpose: slow fsyncs");
        door.slow_syncs(Duration::from_millis(slow(now)));
    }
}
