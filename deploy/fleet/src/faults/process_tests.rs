//! Tests of `process`.

use super::*;

#[test]
fn proc_gives_the_listener_its_command_and_its_state() {
    let me = std::process::id();
    let listeners: Vec<_> =
        (0..2).map(|_| std::net::TcpListener::bind("127.0.0.1:0").expect("a port")).collect();
    let ports: Vec<u16> = listeners.iter().map(|l| l.local_addr().expect("bound").port()).collect();
    assert_eq!(listener(ports[1]), Some(me));
    let mut seen: Vec<u16> = listens_on(me).into_iter().filter(|p| ports.contains(p)).collect();
    // Another test may listen on the same port at another address.
    seen.dedup();
    assert_eq!(seen, ports, "in the order of their opening");
    let client = std::net::TcpStream::connect(("127.0.0.1", ports[0])).expect("it listens");
    let from = client.local_addr().expect("connected").port();
    assert_eq!(owner_of(&[(7, me)], from), Some(7));
    assert_eq!(owner_of(&[(7, 1)], from), None, "it is another process's");
    let started = started(me).expect("one's own");
    assert_eq!(started.args.len(), std::env::args().count());
    assert_eq!(started.cwd, std::env::current_dir().expect("one's own"));
    assert!(lives(me) && parent(me).expect("one's own") > 0);
}

#[test]
fn a_zombie_process_does_not_count_as_alive() {
    let mut child = std::process::Command::new("true").spawn().expect("true(1)");
    while lives(child.id()) {
        std::thread::yield_now();
    }
    assert!(Path::new(&format!("/proc/{}", child.id())).exists(), "a zombie still");
    child.wait().expect("waited for");
}
