//! A hung leader from the view of connected workers: a server stopped with SIGSTOP refuses and closes
//! nothing. Also a leader that is only slow.

use crate::common::*;
use paraft_client::{Acked, Transport};
use paraft_common::{Mode, ServerId, Step};
use paraft_proof::{At, Fate, Ledger};
use std::sync::mpsc::Receiver;

/// The first shard in the status of each server that answers.
fn first_shard(fleet: &Fleet) -> Vec<(u64, Value)> {
    let out = fleet.ask(&["status", "--json"]);
    let lines = text(&out.stdout);
    let servers = lines.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    let of = |s: Value| {
        let shards = s["shards"].as_array()?.iter();
        Some((s["server"].as_u64()?, shards.into_iter().find(|s| s["shard"] == 0)?.clone()))
    };
    servers.filter_map(of).collect()
}

fn leader(fleet: &Fleet) -> u64 {
    wait("a leader", || {
        let all = first_shard(fleet);
        let leads = all.iter().find(|(_, shard)| shard["role"] == "leader").map(|(server, _)| *server);
        leads.ok_or(format!("{all:?}"))
    })
}

fn fleet(folder: &Path, transport: Transport) -> (Fleet, At) {
    paraft_tls::Access::Insecure.set(); // as its servers
    let fleet = Fleet::start(folder, None);
    fleet.all("serving");
    let at = At { addresses: fleet.addresses.clone(), shards: 3, replicas: 3, transport };
    (fleet, at)
}

/// Whether all threads of a process are stopped.
fn stands(pid: Pid) -> Result<(), String> {
    let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap_or_default();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it is there").flatten().map(stat);
    // The state follows the name, which is in parentheses.
    let runs: Vec<String> =
        tasks.filter(|t| !t.rsplit_once(") ").is_some_and(|(_, t)| t.starts_with('T'))).collect();
    if runs.is_empty() { Ok(()) } else { Err(format!("{runs:?}")) }
}

/// The servers that acknowledged pushes since the last call, and the streams.
fn acknowledged(acks: &Receiver<Acked>) -> (BTreeSet<ServerId>, BTreeSet<(u32, Instant)>) {
    let all: Vec<Acked> = acks.try_iter().collect();
    let by = all.iter().map(|a| a.leader).collect();
    (by, all.iter().map(|a| (a.shard.0, a.opened)).collect())
}

#[test]
fn pushes_to_a_stopped_leader_are_applied_once_by_the_next() {
    for transport in [Transport::Tcp, Transport::Auto] {
        let scratch = tempfile::tempdir().expect("scratch");
        let (fleet, at) = fleet(scratch.path(), transport);
        let ledger = Ledger { grace_ms: 60_000, ..Ledger::in_every_bucket(Mode::Asp, 1, 10_000, 3) };
        let mut page = ledger.join(&at, 0).expect("a session");
        let acks = page.client.acks();
        page.begin().expect("weights");
        for _ in 0..2 {
            (0..20).for_each(|_| _ = page.step().expect("a step"));
            // A step ends with its weights, which may come before the last of its acks.
            page.client.wait_for_acks().expect("acks");
            acknowledged(&acks);
            let stopped = leader(&fleet);
            let process = fleet.servers[stopped as usize].as_ref().expect("it runs");
            process.signal(Signal::SIGSTOP);
            // On a loaded machine its other threads run for a moment.
            wait("all of its threads to stand", || stands(process.pid()));
            for _ in 0..20 {
                page.step().expect("a step");
            }
            page.client.wait_for_acks().expect("acks");
            let (by, streams) = acknowledged(&acks);
            assert!(!by.contains(&ServerId(stopped)), "{stopped} is stopped, and {by:?} acknowledged");
            assert_eq!(streams.iter().filter(|(shard, _)| *shard == 0).count(), 1, "{streams:?}");
            process.signal(Signal::SIGCONT);
            // It handles the data in its sockets, and learns that it is deposed.
            (0..20).for_each(|_| _ = page.step().expect("a step"));
            fleet.all("serving");
        }
        assert_eq!(page.client.counters().rejoins, 0, "the session went on");
        let made = page.done;
        let weights = page.finish().expect("the final weights");
        let fate = |_, step: Step, _| if step <= made { Fate::Acknowledged } else { Fate::Unmade };
        let tally = ledger.read(&weights, fate);
        assert_eq!((tally.lost, tally.doubled, tally.damaged), (0, 0, 0), "{tally:?}");
        assert_eq!(tally.acknowledged, 3 * made.0);
    }
}

#[test]
fn a_worker_leaves_a_stopped_leader_for_its_successor_by_itself() {
    let l = Launcher::training(&digits("asp", 3, 100_000), 2);
    let log = || fs::read_to_string(l.run_dir.join("worker-0.log")).unwrap_or_default();
    let stopped = pid_of(&l.run_dir, "--id 0");
    kill(stopped, Signal::SIGSTOP).expect("SIGSTOP");
    wait("the worker to find the successor", || match log() {
        log if log.contains("here is its successor") => Ok(()),
        log => Err(log),
    });
    let trained = || l.metrics().iter().filter(|e| e["event"] == "train").count();
    let before = trained();
    wait("training to go on", || if trained() > before { Ok(()) } else { Err(trained().to_string()) });
    kill(stopped, Signal::SIGCONT).expect("SIGCONT");
    kill(Pid::from_raw(l.child.id() as i32), Signal::SIGTERM).expect("SIGTERM");
    contains(&l.output().2, &["interrupted; the fleet has ended"]);
}

#[test]
fn a_leader_that_lives_and_is_slow_is_asked_about_and_not_left() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (fleet, at) = fleet(scratch.path(), Transport::Auto);
    let ledger = Ledger { grace_ms: 60_000, ..Ledger::in_every_bucket(Mode::Bsp, 2, 40, 3) };
    let join = |worker| ledger.join(&at, worker).expect("a session");
    let (mut first, mut second) = (join(0), join(1));
    let acks = first.client.acks();
    let refused = || {
        let followers = first_shard(&fleet).into_iter().filter(|(_, shard)| shard["role"] == "follower");
        followers.filter_map(|(_, shard)| shard["redirected"].as_u64()).sum::<u64>()
    };
    let leads = leader(&fleet);
    std::thread::scope(|s| {
        let waits = s.spawn(move || {
            first.begin().expect("weights");
            for _ in 0..10 {
                first.step().expect("a step");
            }
            first
        });
        second.begin().expect("weights");
        (0..9).for_each(|_| _ = second.step().expect("a step"));
        // The tenth round has one push, which no leader acknowledges.
        let before = refused();
        wait("followers to be asked", || {
            let asked = refused() - before;
            if asked >= 3 { Ok(()) } else { Err(format!("{asked} asks")) }
        });
        second.step().expect("a step");
        let first = waits.join().expect("no panic");
        assert_eq!((first.done, first.client.counters().rejoins), (Step(10), 0));
    });
    assert_eq!(leader(&fleet), leads);
    let (_, streams) = acknowledged(&acks);
    assert_eq!(streams.len(), 3, "one stream a shard, from the beginning to the end: {streams:?}");
}

/// A server takes a lane for broken after 3 s without a byte. That is no mistake of the worker's.
#[test]
fn a_stopped_worker_goes_on_after_seconds_on_other_streams() {
    for transport in ["auto", "tcp"] {
        let body = digits("bsp", 1, 60) + &format!("grace_ms = 120000\ntransport = \"{transport}\"\n");
        let l = Launcher::training(&body, 1);
        let worker = pid_of(&l.run_dir, "paraft worker");
        kill(worker, Signal::SIGSTOP).expect("it is there");
        wait("all of its threads to stand", || stands(worker));
        std::thread::sleep(Duration::from_secs(6));
        kill(worker, Signal::SIGCONT).expect("it is there");
        let (code, _, said) = l.output();
        assert_eq!(code, Some(0), "{transport}: {said}");
    }
}
