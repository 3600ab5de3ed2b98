//! What an earlier release has written is read by this one: its log is replayed entry by entry, its snapshot is restored,
//! and the state hashes to what it hashed to then. (Digests were another hash in that release; these are of the states that had its
//! digests, `e311ca214c01c98d` and `95b454547a910e0d`.)

use paraft_common::JobShard;
use paraft_server::replay::replay;
use paraft_store::RealDisk;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// As segments lie on a disk.
const SEGMENT_BYTES: u64 = 1 << 20;

/// A copy of what a release left: a replay locks the folder.
fn copy(name: &str, to: &Path) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let to = to.join("shard-0");
    fs::create_dir_all(to.join("log")).expect("a folder"); // git keeps no empty one
    let mut folders = vec![(from, to.clone())];
    while let Some((from, to)) = folders.pop() {
        fs::create_dir_all(&to).expect("a folder");
        for entry in fs::read_dir(&from).expect("the fixture").map(|e| e.expect("an entry")) {
            let to = to.join(entry.file_name());
            if entry.file_type().expect("a type").is_dir() {
                folders.push((entry.path(), to));
                continue;
            }
            fs::copy(entry.path(), &to).expect("copied");
            if to.extension().is_some_and(|e| e == "log") {
                let file = fs::File::options().write(true).open(&to).expect("opens");
                file.set_len(SEGMENT_BYTES).expect("as long as it was");
            }
        }
    }
    to
}

#[test]
fn a_log_and_a_snapshot_of_the_release_before_give_the_state_that_they_gave_then() {
    let cases = [
        ("release-0/log/shard-0", (0, 131, 132, 60), 0xd095_948e_ea70_2125_u64),
        ("release-0/snapshot/shard-0", (4096, 4096, 0, 2022), 0x6a75_f893_5926_85ec),
    ];
    for (name, (snapshot, index, entries, version), digest) in cases {
        let scratch = tempfile::tempdir().expect("scratch");
        let path = copy(name, scratch.path());
        let replayed = replay(Arc::new(RealDisk), JobShard::default(), &path, u64::MAX).expect(name);
        let r = &replayed.replayed;
        assert_eq!((r.snapshot, r.index, r.entries), (snapshot, index, entries), "{name}");
        assert_eq!(replayed.shard.version(), version, "{name}");
        let last = r.digests.last().expect("one at the end").1;
        assert_eq!(
            (last.index, format!("{:016x}", last.digest)),
            (index, format!("{digest:016x}")),
            "{name}"
        );
    }
}
