//! Tests of `values`.

use super::*;

/// Resident anonymous memory of this process.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("a Linux");
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).expect("what is resident");
    line.trim().trim_end_matches(" kB").trim().parse::<usize>().expect("a number") << 10
}

#[test]
fn pages_take_memory_from_their_first_write_to_their_release() {
    const LEN: usize = 64 << 20;
    let before = resident();
    let mut pages = Pages::new(LEN).expect("address space");
    assert!(pages[LEN - 1] == 0.0 && resident() < before + (16 << 20), "nothing was written");
    let part = LEN / 4 + 7..LEN / 2 + 9;
    pages[part.clone()].fill(1.0);
    pages[part.end] = 2.0;
    pages[part.start - 1] = 3.0;
    assert!(resident() > before + part.len() * F32 / 2, "it was");
    pages.release(part.clone());
    assert!(resident() < before + (32 << 20), "{} MiB are there", (resident() - before) >> 20);
    assert_eq!(
        (pages[part.start - 1], pages[part.end], pages[LEN / 3]),
        (3.0, 2.0, 0.0),
        "its neighbours stay"
    );
    pages.release(0..LEN);
    assert_eq!((pages[part.start - 1], pages[part.end]), (0.0, 0.0));
    let mut none = Pages::new(0).expect("nothing");
    none.release(0..0);
    assert!(none.is_empty() && none.deref_mut().is_empty());
}

#[test]
fn a_scratch_file_has_its_room_and_leaves_no_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut scratch = Scratch::new(folder.path(), 3000).expect("room");
    assert!(scratch.iter().all(|v| *v == 0.0));
    scratch[2999] = 5.0;
    assert_eq!((scratch.len(), scratch[2999]), (3000, 5.0));
    assert_eq!(std::fs::read_dir(folder.path()).expect("reads").count(), 0);
    let why = Scratch::new(folder.path(), usize::MAX / 64).expect_err("no disk is so large");
    assert!(matches!(why.raw_os_error(), Some(27 | 28)), "{why}");
    assert!(Scratch::new(&folder.path().join("none"), 1).is_err());
}
