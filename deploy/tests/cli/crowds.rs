//! Servers with few file descriptors, and crowds that take them.

use crate::common::*;
use std::{
    net::TcpStream,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};

/// As many connections to each server as it has descriptors twice, for this long: each that is closed comes again.
const CROWD: usize = 250;
const TIME: Duration = Duration::from_secs(12);

fn crowd(address: &str, over: &AtomicBool, dialled: &AtomicUsize) {
    let mut open: Vec<TcpStream> = Vec::new();
    let to = address.parse().expect("an address");
    while !over.load(Relaxed) {
        if open.len() < CROWD {
            if let Ok(socket) = TcpStream::connect_timeout(&to, Duration::from_millis(500)) {
                socket.set_nonblocking(true).expect("a socket");
                dialled.fetch_add(1, Relaxed);
                open.push(socket);
            }
            continue;
        }
        open.retain(|s| s.peek(&mut [0]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends the crowd home, also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// The last step in the record of a run.
fn step(run_dir: &Path) -> u64 {
    Launcher::metrics_in(run_dir).iter().filter_map(|e| e["step"].as_u64()).max().unwrap_or(0)
}

#[test]
fn exhausted_descriptors_stop_no_replica_and_no_training() {
    paraft_host::raise_descriptor_limit(); // the crowd's end of the connections is in this process
    let scratch = tempfile::tempdir().expect("scratch");
    let settings = "durability = \"quorum-disk\"\nshards = 1\n";
    let job = digits("bsp", 3, 100_000).replace("[train]\n", "[train]\nworkers = 1\n") + settings;
    let mut fleet = Fleet::with_descriptors(scratch.path(), &job, Some(128));
    fleet.all("serving");
    let run_dir = scratch.path().join("run");
    fs::create_dir(&run_dir).expect("a folder");
    let _worker = Held(fleet.worker(0, &run_dir).stderr(Stdio::null()).spawn().expect("a worker"));
    let reaches = |what: &str, least: u64| {
        wait(what, || match step(&run_dir) {
            now if now >= least => Ok(()),
            now => Err(format!("step {now}")),
        });
    };
    reaches("the training to begin", 1);
    let (over, dialled) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|s| {
        for address in fleet.addresses.clone() {
            let (over, dialled) = (&over, &dialled);
            s.spawn(move || crowd(&address, over, dialled));
        }
        let _over = Over(&over);
        wait("the crowd to come", || match dialled.load(Relaxed) {
            n if n >= 3 * CROWD => Ok(()),
            n => Err(format!("{n} connections")),
        });
        let (began, before) = (Instant::now(), step(&run_dir));
        while began.elapsed() < TIME {
            std::thread::sleep(Duration::from_millis(200));
        }
        reaches("the training to go on beside the crowd", before + 1);
    });
    fleet.all("serving");
    let after = step(&run_dir);
    reaches("the training to go on", after + 1);
    for id in 0..3 {
        let server = fleet.servers[id].as_mut().expect("it was not killed");
        assert_eq!(server.ended(), None, "server {id} runs");
        let entries = fs::read_dir(fleet.data(id)).expect("its folder");
        let names: Vec<_> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        assert!(
            !names.iter().any(|n| n.contains("unusable")),
            "nothing of server {id} was quarantined: {names:?}"
        );
    }
    let status = text(&fleet.ask(&["status", "--json"]).stdout);
    let servers: Vec<Value> = status.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
    let shed: u64 = servers.iter().filter_map(|s| s["connections"]["shed"].as_u64()).sum();
    assert!(shed > 0, "strangers gave way to strangers: {status}");
}
