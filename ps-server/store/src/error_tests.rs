//! Tests of `error`.

use super::*;

#[test]
fn what_passes_is_told_from_damage() {
    use nix::errno::Errno;
    for passes in [
        Errno::EMFILE,
        Errno::ENFILE,
        Errno::ENOMEM,
        Errno::ENOSPC,
        Errno::EIO,
        Errno::EACCES,
        Errno::EROFS,
        Errno::ETIMEDOUT,
        Errno::EDQUOT,
    ] {
        let e = io::Error::from_raw_os_error(passes as i32);
        assert!(!is_damage(&e), "{e}");
        let e = named("write", Path::new("f"))(e);
        assert!(!is_damage(&e), "{e} has kept its kind");
        assert!(e.to_string().contains(&format!("{passes:?}: ")), "{e} names the error");
        let e = StoreError::io("open", Path::new("f"))(io::Error::from_raw_os_error(passes as i32));
        assert!(!e.is_damage() && e.to_string().contains(&format!("{passes:?}: ")), "{e}");
    }
    assert!(is_damage(&io::Error::from_raw_os_error(Errno::ENOENT as i32)));
    assert!(StoreError::damaged(Path::new("f"), 7, "a bit").is_damage());
    assert!(
        io::Error::from(StoreError::damaged(Path::new("f"), 7, "a bit")).kind() == io::ErrorKind::InvalidData
    );
}

#[test]
fn no_text_advises_to_throw_away_what_is_there() {
    let path = || PathBuf::from("f");
    for e in [
        StoreError::damaged(&path(), 7, "a bit"),
        StoreError::CutShort { path: path(), what: "its end".into() },
        StoreError::Version { path: path(), found: 2, supported: 1 },
        StoreError::Locked { dir: path() },
    ] {
        let text = e.to_string().to_lowercase();
        assert!(!["remove", "delete", "empty", "throw"].iter().any(|word| text.contains(word)), "{text}");
    }
}
