//! Tests of `fetch`.

use super::*;

/// The weights of buckets 3 and 5, of two values each.
fn fetch() -> Fetch {
    let wanted = [3, 5].map(|bucket| ((BucketId(bucket), 0), 8));
    Fetch::new(["a:1".to_string(), "b:1".into()], wanted)
}

fn bytes(len: usize) -> Payload {
    vec![0u8; len].into()
}

fn refusal(leader: &str) -> Refused {
    Refused { message: "not here".into(), leader: leader.into(), ..Refused::default() }
}

#[test]
fn arrived_vectors_are_not_asked_for_again() {
    let mut fetch = fetch();
    assert_eq!((fetch.next_server().as_deref(), fetch.buckets()), (Some("a:1"), vec![3, 5]));
    fetch.arrived((BucketId(3), 0), &bytes(8)).expect("it fits");
    fetch.failed("silent");
    assert_eq!((fetch.next_server().as_deref(), fetch.buckets()), (Some("b:1"), vec![5]));
    fetch.arrived((BucketId(5), 0), &bytes(8)).expect("it fits");
    assert_eq!((fetch.is_complete(), fetch.next_server()), (true, None), "everything is here");
}

#[test]
fn server_named_by_a_refusal_is_asked_next_and_once() {
    let mut fetch = fetch();
    assert_eq!(fetch.next_server().as_deref(), Some("a:1"));
    fetch.refused(refusal("c:1"));
    assert_eq!(fetch.next_server().as_deref(), Some("c:1"));
    fetch.refused(refusal("a:1"));
    assert_eq!(fetch.next_server().as_deref(), Some("b:1"));
    fetch.failed("no connection");
    assert_eq!(fetch.next_server(), None, "all were asked");
    let cause = |at: &str, why: &str| (at.to_string(), why.to_string());
    let causes = [cause("a:1", "not here"), cause("c:1", "not here"), cause("b:1", "no connection")];
    assert_eq!((fetch.causes(), fetch.is_complete()), (&causes[..], false));
}

#[test]
fn vector_that_does_not_fit_is_an_error() {
    let wrong = |id, len| fetch().arrived(id, &bytes(len)).expect_err("it does not fit");
    assert!(wrong((BucketId(3), 0), 4).contains("4 bytes where 8"), "its length");
    assert!(wrong((BucketId(4), 0), 8).contains("not asked for"), "its bucket");
    assert!(wrong((BucketId(3), 1), 8).contains("not asked for"), "its number");
}
