//! Tests of `process`.

use super::*;

#[test]
fn a_silent_process_ends_with_what_its_code_means() {
    let folder = tempfile::tempdir().expect("a folder");
    for (i, (script, end)) in [
        ("exit 74", "ended with exit code 74: a file could not be written; is its disk full?"),
        ("echo 'error: no room' >&2; exit 74", "ended with exit code 74: no room"),
        ("exit 3", "ended with exit code 3"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut process = Process::start(format!("worker-{i}"), command, folder.path()).expect("sh starts");
        while process.ended().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(process.end(), end);
    }
}
