//! Tests of `host`.

use super::*;

#[test]
fn a_loopback_address_is_refused_where_there_is_another_host() {
    let scratch = tempfile::tempdir().expect("scratch");
    let folder = Folder::of(scratch.path()).expect("folder");
    let at = |address: &str, host: &str| Address {
        address: address.into(),
        host: host.into(),
        node: host.into(),
        attempt: 0,
    };
    folder.publish("server-0", &at("127.0.0.1:1", "a")).expect("published");
    folder.can_meet(&at("127.0.0.1:2", "a")).expect("all on one host");
    for own in ["10.0.0.2:2", "127.0.0.1:2"] {
        let why = folder.can_meet(&at(own, "b")).expect_err("refused");
        assert!(why.message().contains("loopback"), "{}", why.message());
    }
    folder.publish("server-0", &at("10.0.0.1:1", "a")).expect("published");
    folder.can_meet(&at("10.0.0.2:2", "b")).expect("reachable");
}

#[test]
fn the_kernels_table_has_this_hosts_addresses() {
    let trie = "Main:\n  |-- 127.0.0.1\n     /32 host LOCAL\n  |-- 10.1.0.0\n     /24 link UNICAST\n  |-- 10.1.0.7\n     /32 host LOCAL\n";
    assert_eq!(first_local(trie), Some(Ipv4Addr::new(10, 1, 0, 7)));
    assert_eq!(first_local("  |-- 127.0.0.1\n     /32 host LOCAL\n"), None);
}
