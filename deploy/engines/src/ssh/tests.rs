//! Tests of `ssh`.

use super::*;
use crate::{
    Part,
    golden::{golden, some_fleet},
};

pub(super) fn fleet() -> Fleet {
    let hosts = hosts_of("n1 slots=2\nroot@n2 slots=2 # fast\n\nn3\n").expect("hosts");
    Fleet { time: None, hosts, args: Vec::new(), ..some_fleet() }
}

#[test]
fn the_script_is_as_the_golden_one_and_a_script() {
    for path in golden("ssh", &Ssh, &fleet()) {
        let checked = std::process::Command::new("sh").arg("-n").arg(&path).status().expect("sh");
        assert!(checked.success(), "{}", path.display());
    }
}

#[test]
fn servers_fill_the_first_hosts_and_workers_the_last() {
    let parts = placed(&fleet()).expect("room");
    let told: Vec<_> = parts.iter().map(|(role, at)| format!("{role} {at}")).collect();
    let all = "server 0@n1, server 1@root@n2, server 2@n3, worker 0@n3, worker 1@root@n2, worker 2@root@n2, worker 3@n1";
    assert_eq!(told.join(", "), all);
    assert_eq!(addresses(&fleet(), &parts), ["n1:7071", "n2:7072", "n3:7073"]);
    let handle = Handle { parts, ..Handle::default() };
    assert_eq!(by_host(&handle)["root@n2"], [(Role::Server, 1), (Role::Worker, 1), (Role::Worker, 2)]);
}

#[test]
fn what_has_no_room_is_refused_with_the_numbers() {
    let why = |fleet: Fleet| placed(&fleet).expect_err("refused").to_string();
    assert!(why(Fleet { hosts: Vec::new(), ..fleet() }).contains("--hosts"));
    let few = Fleet { hosts: vec!["a".into(), "b".into()], ..fleet() };
    assert!(why(few.clone()).contains("3 servers, and 2 hosts"));
    placed(&Fleet { spread: false, ..few }).expect("together");
    let many = Part { count: 6, ..Part::default() };
    assert!(why(Fleet { workers: many, ..fleet() }).contains("6 workers, and the hosts have 5 slots"));
    for wrong in ["n1 slot=2", "n1 slots=0", "-oProxyCommand=x", "a;b"] {
        assert!(hosts_of(wrong).is_err(), "{wrong}");
    }
}
