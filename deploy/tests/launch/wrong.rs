//! What is wrong is said before anything starts.

use crate::{Place, common::*, run_out};

#[test]
fn what_cannot_be_launched_is_said_before_anything_starts() {
    let place = Place::new();
    fs::write(place.scratch.path().join("plain.sh"), "").expect("a file");
    fs::write(place.scratch.path().join("train.py"), "").expect("a file");
    let cases: [(&[&str], i32, &[&str]); 11] = [
        (&["none.py"], 78, &["none.py", "cannot be read"]),
        (&["./none.sh"], 78, &["none.sh", "cannot be started"]),
        (&["plain.sh"], 78, &["no `plain.sh` on the PATH"]),
        (&["./plain.sh"], 78, &["not executable", "chmod +x"]),
        (&["--python", "python-none", "train.py"], 78, &["no `python-none` on the PATH", "--python"]),
        (&["--python", "/none/python", "-m", "train"], 78, &["/none/python", "cannot be started"]),
        (&["--worker", "3", "train.py"], 2, &["`--worker` is no flag of `paraft launch`", "behind it"]),
        (&[], 2, &["SCRIPT"]),
        (&["--mode", "sync", "train.py"], 2, &["sync", "ssp:S"]),
        (&["--replicas", "3", "train.py"], 78, &["3 replicas on 1 servers", "help"]),
        (&["--set", "train.group_size=2", "train.py"], 78, &["train.group_size", "torch.distributed"]),
    ];
    for (args, code, words) in cases {
        let (was, _, err) = run_out(place.launch(args));
        assert_eq!(was, Some(code), "{args:?}: {err}");
        contains(&err, words);
        assert!(!place.run_dir().join("metrics.jsonl").exists(), "{args:?}: something was begun");
    }
}
