//! Tests of `host`.

use super::*;
use crate::engine::run_with_input;

#[test]
fn a_file_is_copied_unchanged_and_private() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run_dir = scratch.path().join("a run's $HOME");
    let job = "name = \"$(touch x) `y` 'z'\\\"\n";
    let fleet = Fleet {
        run_dir: run_dir.clone(),
        job: job.into(),
        program: "sh".into(),
        ..super::super::tests::fleet()
    };
    let text = put(&fleet, &vec![(Role::Worker, 0)], &carried(&fleet).expect("files")).expect("text");
    run_with_input("sh", &["-s"], &text).expect("put");
    assert_eq!(fs::read_to_string(run_dir.join("job.toml")).expect("there"), job);
    let mode = |path: &Path| {
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).expect("there").permissions())
    };
    assert_eq!((mode(&run_dir) & 0o777, mode(&run_dir.join("job.toml")) & 0o777), (0o700, 0o600));
}

#[test]
fn keys_are_copied_only_to_hosts_that_need_them() {
    let scratch = tempfile::tempdir().expect("scratch");
    let folder = |name: &str| {
        let folder = scratch.path().join(name);
        fs::create_dir(&folder).expect("a folder");
        FILES
            .iter()
            .for_each(|file| fs::write(folder.join(file), format!("{name} {file}\n")).expect("written"));
        folder.to_string_lossy().into_owned()
    };
    let certs = crate::Certs::Each { server: folder("peer"), worker: folder("worker") };
    let run_dir = scratch.path().join("run");
    let fleet =
        Fleet { run_dir: run_dir.clone(), program: "sh".into(), certs, ..super::super::tests::fleet() };
    let text = put(&fleet, &vec![(Role::Worker, 0)], &carried(&fleet).expect("files")).expect("text");
    assert!(!text.contains("peer tls.key"), "a host without a server has a server's key");
    run_with_input("sh", &["-s"], &text).expect("put");
    let key = run_dir.join("certs-worker/tls.key");
    assert_eq!(fs::read_to_string(&key).expect("there"), "worker tls.key\n");
    let mode = |path: &Path| {
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).expect("there").permissions()) & 0o777
    };
    assert_eq!((mode(&run_dir.join("certs-worker")), mode(&key)), (0o700, 0o600));
    let script = fs::read_to_string(run_dir.join(SCRIPT)).expect("there");
    assert!(script.contains("/certs-worker ") && !script.contains("tls.key"), "{script}");
}
