//! What release 0.1 has written is read by this one: its log is replayed entry by entry, its snapshot is restored, and the state has
//! the digest that it had then.

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

/// A copy of what a release left, since a replay locks the folder; and in it the shard's folder.
fn copy(name: &str, to: &Path) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    for folder in ["log", "shard-0"] {
        let (from, to) = (from.join(folder), to.join(folder));
        fs::create_dir_all(&to).expect("a folder");
        for entry in fs::read_dir(&from).expect("the fixture").map(|e| e.expect("an entry")) {
            let to = to.join(entry.file_name());
            fs::copy(entry.path(), &to).expect("copied");
            if to.extension().is_some_and(|e| e == "log") {
                let file = fs::File::options().write(true).open(&to).expect("opens");
                file.set_len(SEGMENT_BYTES).expect("as long as it was");
            }
        }
    }
    to.join("shard-0")
}

#[test]
fn log_and_snapshot_of_release_0_1_give_the_same_state() {
    let cases = [
        ("release-0.1/log", (0, 133, 134, 60), 0x5ac6_02e4_02a6_e500_u64),
        ("release-0.1/snapshot", (4096, 4105, 9, 2024), 0xe4bf_dcbc_af2d_4d8b),
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
