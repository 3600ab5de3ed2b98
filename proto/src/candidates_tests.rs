//! Tests of `candidates`.

use super::*;

#[test]
fn each_server_is_asked_once_and_a_named_one_next() {
    let mut servers = Candidates::of(["a", "b", "a"].map(String::from));
    let mut asked = Vec::new();
    while let Some(at) = servers.next() {
        let leader = match &*at {
            "a" => "c",
            "c" => "b",
            _ => "a", // a circle
        };
        servers.failed(&at, "no", leader);
        asked.push(at);
    }
    assert_eq!(asked, ["a", "c", "b"]);
    assert_eq!(servers.causes().len(), 3);
}

#[test]
fn names_without_an_end_end() {
    let mut servers = Candidates::of(["0".to_string()]);
    let mut asked = 0;
    while let Some(at) = servers.next() {
        asked += 1;
        servers.failed(&at, "no", &asked.to_string());
    }
    assert_eq!(asked, 1 + Candidates::MAX_NAMED);
}
