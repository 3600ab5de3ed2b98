//! Defects of the Raft library that Paraft works around (each was observed once), with real servers.

use crate::common::*;

/// Of the times in /proc, on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Processor time of a process so far, in seconds.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    // After the name, which may hold anything: state is the first, utime and stime the 12th and 13th.
    let fields: Vec<&str> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
    let ticks: f64 = fields[11..13].iter().map(|f| f.parse::<f64>().expect("ticks")).sum();
    ticks / TICKS_PER_SECOND
}

/// A stream to a peer that fails at once was reopened at once, without its pause: a leader used a whole
/// core while one follower was down.
#[test]
fn leaders_beside_a_dead_server_sleep() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = Fleet::start(scratch.path(), None);
    fleet.all("serving");
    fleet.kill(2);
    fleet.all("repairing");
    // The control group's leader keeps trying to send the dead server an entry that it lacks.
    fleet.ask(&["drain", "2", "--wait", "0"]);
    let cpu =
        |fleet: &Fleet| -> Vec<f64> { fleet.servers.iter().flatten().map(|s| cpu_seconds(s.id())).collect() };
    let (before, window) = (cpu(&fleet), Duration::from_secs(4));
    std::thread::sleep(window);
    for (id, (after, before)) in cpu(&fleet).into_iter().zip(before).enumerate() {
        let share = (after - before) / window.as_secs_f64();
        assert!(share < 0.3, "server {id} has nothing to do and takes {share:.2} of a core");
    }
}

/// A stopped server answers no keepalive, its kernel accepts data, and no call to it ends by itself: no
/// process may wait for it.
#[test]
fn a_hung_server_holds_no_client_up() {
    let mut training = Launcher::training(&digits("bsp", 3, 40), 3);
    let hung = pid_of(&training.run_dir, "server-0");
    kill(hung, Signal::SIGSTOP).expect("SIGSTOP");
    wait("the training to end beside it", || match training.metrics().iter().any(|e| e["final"] == true) {
        true => Ok(()),
        false => Err(format!("{:?}", training.child.try_wait())),
    });
    // The launcher kills processes that do not end.
    let (code, _, err) = training.output();
    assert_eq!(code, Some(0), "{err}");
}
