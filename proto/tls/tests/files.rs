//! Certificates in folders: who may read the key, faults of a folder, and changes during use.

use paraft_tls::{
    Credentials, CredentialsError, Need, Role,
    access::As,
    authority::{Authority, issued_in},
};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
    time::Duration,
};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn role(text: &str) -> Role {
    text.parse().expect("a role")
}

fn issue(authority: &Authority, text: &str, dir: &Path) {
    authority.issue("test", &[role(text)], DAY).expect("issued").save(dir).expect("written");
}

#[test]
fn a_folder_that_will_not_do_says_why() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path().join("certs");
    let ours = Authority::new("ours").expect("made");
    ours.save(&dir).expect("written");
    let worker = dir.join("worker");
    issue(&ours, "worker:a", &worker);
    assert_eq!(issued_in(&dir).expect("read"), std::slice::from_ref(&worker));
    let mode = |p: &Path| fs::metadata(p).expect("there").permissions().mode() & 0o777;
    for private in [dir.join("ca.key"), worker.join("tls.key")] {
        assert_eq!(mode(&private), 0o600, "{}", private.display());
    }
    assert_eq!((mode(&dir), mode(&worker)), (0o700, 0o700));
    assert!(
        Credentials::of_folder(&worker, As::Worker)
            .expect("good")
            .rights()
            .are_enough_for(Need::Worker, Some("a"))
    );

    let key = worker.join("tls.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).expect("set");
    let open = Credentials::of_folder(&worker, As::Worker).expect_err("others may read it");
    assert!(
        matches!(open, CredentialsError::Open { .. }) && open.to_string().contains("chmod 600"),
        "{open}"
    );
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("set");

    let whole = fs::read_to_string(&key).expect("read");
    for (name, text, word) in [
        ("tls.key", "", "tls.key"),
        ("tls.key", &whole[..whole.len() / 2], "tls.key"),
        ("tls.key", &*fs::read_to_string(dir.join("ca.key")).expect("read"), "tls.crt and tls.key"),
        ("tls.crt", "nothing", "tls.crt"),
        ("ca.crt", "", "ca.crt"),
    ] {
        let path = worker.join(name);
        let before = fs::read(&path).expect("read");
        fs::write(&path, text).expect("written");
        let bad = Credentials::of_folder(&worker, As::Worker).expect_err("it will not do").to_string();
        assert!(bad.contains(word), "{bad}");
        fs::write(&path, before).expect("written");
    }
    // A read must not block on something that is no regular file, nor read an endless one.
    let crt = worker.join("tls.crt");
    fs::remove_file(&crt).expect("removed");
    assert!(Command::new("mkfifo").arg(&crt).status().expect("mkfifo").success());
    for (at, word) in [(None, "no file"), (Some("/dev/zero"), "no file"), (Some("large"), "too large")] {
        if let Some(at) = at {
            fs::write(worker.join("large"), vec![b'-'; 2 << 20]).expect("written");
            fs::remove_file(&crt).expect("removed");
            symlink(at, &crt).expect("linked");
        }
        let bad = Credentials::of_folder(&worker, As::Worker).expect_err("it will not do").to_string();
        assert!(bad.contains("tls.crt") && bad.contains(word), "{bad}");
    }
    fs::remove_file(&crt).expect("removed");
    fs::copy(dir.join("ca.crt"), &crt).expect("copied");
    let bad = Credentials::of_folder(&worker, As::Worker).expect_err("an authority is nobody").to_string();
    assert!(bad.contains("paraft:worker:JOB") || bad.contains("tls.crt and tls.key"), "{bad}");
    fs::remove_file(worker.join("ca.crt")).expect("removed");
    assert!(Credentials::of_folder(&worker, As::Worker).is_err_and(|e| e.to_string().contains("ca.crt")));
    assert!(Authority::open(&worker).is_err_and(|e| e.to_string().contains("paraft certs new")));
}

#[test]
fn one_text_has_all_three() {
    let ours = Authority::new("ours").expect("made");
    let i = ours.issue("test", &[role("peer")], DAY).expect("issued");
    let text = [&*i.cert, &i.key, &i.authorities].concat();
    assert!(Credentials::of_text(&text, "stdin").expect("good").rights().are_enough_for(Need::Peer, None));
    for part in [&*i.cert, &i.key, "", &[&*i.cert, &i.key].concat()] {
        assert!(Credentials::of_text(part, "stdin").is_err_and(|e| e.to_string().starts_with("stdin: ")));
    }
}

#[test]
fn a_change_is_seen_and_one_by_half_changes_nothing() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (certs, dir) = (scratch.path().join("certs"), scratch.path().join("mine"));
    let ours = Authority::new("ours").expect("made");
    ours.save(&certs).expect("written");
    issue(&ours, "worker:a", &dir);
    let credentials = Credentials::of_folder(&dir, As::Worker).expect("good");
    let look = || std::thread::sleep(Duration::from_millis(1100));
    let is = |job: &str| credentials.rights().are_enough_for(Need::Worker, Some(job));

    fs::write(dir.join("tls.key"), "half").expect("written");
    look();
    assert!(is("a"), "what does not fit together is left");
    issue(&ours, "worker:b", &dir);
    look();
    assert!(is("b") && !is("a"));
    assert_eq!(credentials.withdrawn(), 0);

    // A new authority, which trusts its predecessor; then only itself.
    let mut next = Authority::open(&certs).expect("there").next("next").expect("made");
    issue(&next, "worker:c", &dir);
    look();
    assert!(is("c"));
    assert_eq!(credentials.withdrawn(), 0, "the old one is trusted still");
    next.alone();
    issue(&next, "worker:d", &dir);
    look();
    assert!(is("d"));
    assert_eq!(credentials.withdrawn(), 1);
}
