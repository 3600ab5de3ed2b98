//! The end of a run of scripts: its exit code, its output, and that no process is left.

use crate::{Place, common::*, ended, python, run_out};

#[test]
fn a_scripts_exit_code_and_last_lines_reach_the_user() {
    let place = Place::new();
    let text = "#!/bin/sh\n[ \"$RANK\" = 1 ] || exec sleep 60\necho one; echo the reason >&2; exit 7\n";
    place.script("train.sh", text);
    let (code, _, err) = run_out(place.launch(&["./train.sh"]));
    assert_eq!(code, Some(7), "{err}");
    contains(&err, &["worker-1 ended with exit code 7:\none\nthe reason\n", "worker-1.out"]);
    place.is_empty();
}

#[test]
fn a_traceback_of_all_scripts_is_shown_once() {
    if !python() {
        return;
    }
    for late in ["0", "1"] {
        let place = Place::new();
        let text = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif os.environ['RANK'] == 'LATE': time.sleep(0.3)\nraise ValueError('broken')\n";
        place.script("train.py", &text.replace("LATE", late));
        let (code, _, err) = run_out(place.launch(&["train.py"]));
        assert_eq!(code, Some(1), "{err}");
        assert_eq!(err.matches("Traceback").count(), 1, "{err}");
        assert!(err.contains("ValueError: broken\n") && err.contains("ended with exit code 1"), "{err}");
    }
}

#[test]
fn a_script_killed_before_training_ends_with_the_shells_code() {
    for how in ["kill -9 $$", "sh -c 'kill -9 $$'; exit $?"] {
        let place = Place::new();
        place.script("train.sh", &format!("#!/bin/sh\n[ \"$RANK\" = 1 ] || exec sleep 60\n{how}\n"));
        let (code, _, err) = run_out(place.launch(&["./train.sh"]));
        assert_eq!(code, Some(137), "{how}: {err}");
        assert!(err.contains("worker-1"), "{err}");
    }
}

#[test]
fn a_shell_whose_program_was_killed_restarts() {
    let place = Place::new();
    let text = "#!/bin/sh\n[ \"$RANK\" = 1 ] || exec sleep 60\n[ -e second ] && exit 3\n\
                touch second; echo old words; sh -c 'kill -9 $$'; exit $?\n";
    place.script("train.sh", text);
    let set = ["--set", "cluster.max_restarts=1", "./train.sh"];
    let (code, _, err) = run_out(place.launch(&set));
    assert_eq!(code, Some(3), "{err}");
    contains(
        &err,
        &["worker-1 ended with exit code 137; started again", "error: worker-1 ended with exit code 3\n"],
    );
    assert!(!err.contains("old words"), "{err}");
    place.is_empty();
}

/// Says that it is there, and on Ctrl-C that it has heard.
const KIND: &str = r#"
import os, time
child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.sh")
print("there", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.2)
    print("heard", flush=True)
"#;

#[test]
fn ctrl_c_ends_scripts_kindly_and_then_not() {
    if !python() {
        return;
    }
    let place = Place::new();
    place.script("child.sh", "#!/bin/sh\ntrap '' INT TERM\nwhile :; do sleep 1; done\n");
    place.script("kind.py", KIND);
    let text = "#!/bin/sh\n[ \"$RANK\" = 1 ] || exec python3 kind.py\n\
                trap '' INT TERM\n./child.sh & ./child.sh WITH & echo there; wait\n";
    let with = place.scratch.path().display().to_string();
    place.script("train.sh", &text.replace("./child.sh", &format!("{with}/child.sh")));
    let child = place.launch(&["./train.sh"]).spawn().expect("paraft starts");
    place.says("worker-0.out", "there");
    place.says("worker-1.out", "there");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).expect("SIGINT");
    let (code, out, err) = ended(child);
    assert_eq!(code, Some(130), "{err}");
    assert!(out.contains("heard") && err.contains("interrupted; the fleet has ended"), "{out}{err}");
    // Those who heed nothing, and what they have started, too.
    place.is_empty();
}

#[test]
fn a_second_interrupt_does_not_wait() {
    let place = Place::new();
    // Within the time that it would be given.
    let text = "#!/bin/sh\ntrap 'echo heard; sleep 8; echo saved; exit' INT\necho there\nwhile :; do sleep 0.1; done\n";
    place.script("train.sh", text);
    let child = place.launch(&["./train.sh"]).spawn().expect("paraft starts");
    let launcher = Pid::from_raw(child.id() as i32);
    for words in ["there", "heard"] {
        (0..2).for_each(|rank| place.says(&format!("worker-{rank}.out"), words));
        kill(launcher, Signal::SIGINT).expect("SIGINT");
    }
    let (code, _, err) = ended(child);
    assert_eq!(code, Some(130), "{err}");
    place.is_empty();
    for rank in 0..2 {
        let said = place.read(&format!("worker-{rank}.out"));
        assert!(!said.contains("saved"), "it was given its time: {said}");
    }
}

#[test]
fn sigterm_is_passed_on_as_it_is() {
    let place = Place::new();
    let text = "#!/bin/sh\n(trap 'echo a child too' TERM; while :; do sleep 0.1; done) &\n\
                trap 'sleep 0.5; echo saved; kill -9 $!; exit 0' TERM\necho there\nwhile :; do sleep 0.1; done\n";
    place.script("train.sh", text);
    let child = place.launch(&["./train.sh"]).spawn().expect("paraft starts");
    place.says("worker-0.out", "there");
    place.says("worker-1.out", "there");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("SIGTERM");
    let (code, _, err) = ended(child);
    assert_eq!(code, Some(143), "{err}");
    for rank in 0..2 {
        let said = place.read(&format!("worker-{rank}.out"));
        assert!(said.contains("saved") && !said.contains("a child too"), "{said}");
    }
    place.is_empty();
}

/// Ends when the lifeline closes, as the `paraft` package does.
const WATCHES: &str = r#"
import os, sys
print("there", sys.argv[1], flush=True)
assert os.read(int(os.environ["PARAFT_LIFELINE_FD"]), 1) == b""
"#;

#[test]
fn no_process_on_the_lifeline_outlives_its_launcher() {
    if !python() {
        return;
    }
    let place = Place::new();
    place.script("train.py", WATCHES);
    let child =
        place.launch(&["--workers", "3", "train.py"]).arg(place.run_dir()).spawn().expect("paraft starts");
    (0..3).for_each(|rank| place.says(&format!("worker-{rank}.out"), "there"));
    assert!(processes(&place.run_dir()).len() >= 4, "server and scripts: {:?}", processes(&place.run_dir()));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL).expect("SIGKILL");
    let _ = ended(child);
    place.is_empty();
}
