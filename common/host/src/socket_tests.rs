//! Tests of `socket`.

use super::*;

#[test]
fn only_addresses_of_this_host_are_local() {
    for here in ["127.0.0.1:7070", "127.0.0.2:1", "[::1]:7070", "localhost:7070"] {
        assert!(is_local(here), "{here}");
    }
    // 192.0.2.0/24 is for documentation.
    for elsewhere in ["192.0.2.1:7070", "0.0.0.0:7070", "example.org:7070", "7070", "[::1]", "127.0.0.1:x"] {
        assert!(!is_local(elsewhere), "{elsewhere}");
        assert_eq!(socket_path(elsewhere), None, "{elsewhere}");
    }
}

#[test]
#[cfg(unix)]
fn sockets_without_a_listener_are_removed() {
    use std::os::unix::net::UnixListener;
    let dir = std::env::temp_dir().join(format!("paraft-sweep-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a folder");
    let at = |name: &str| dir.join(name);
    drop(UnixListener::bind(at("dead.sock")).expect("bound"));
    let lives = UnixListener::bind(at("lives.sock")).expect("bound");
    std::fs::write(at("other"), "").expect("written");
    sweep(&dir, Duration::from_secs(60));
    assert!(at("dead.sock").exists(), "it is new");
    sweep(&dir, Duration::ZERO);
    let left = ["dead.sock", "lives.sock", "other"].map(|name| at(name).exists());
    drop(lives);
    std::fs::remove_dir_all(&dir).expect("removed");
    assert_eq!(left, [false, true, true]);
}

#[test]
#[cfg(target_os = "linux")]
fn each_address_has_a_socket_of_its_own() {
    let paths = ["127.0.0.1:7070", "127.0.0.2:7070", "127.0.0.1:7071", "[::1]:7070"].map(socket_path);
    assert!(paths.iter().all(Option::is_some));
    for (i, path) in paths.iter().enumerate() {
        assert!(!paths[..i].contains(path), "{path:?}");
    }
    assert_eq!(socket_path("localhost:7070"), paths[0]);
}
