//! Tests of `role`.

use super::*;

fn role(text: &str) -> Role {
    text.parse().expect("a role")
}

#[test]
fn a_role_reads_back_from_a_uri() {
    for text in ["admin", "peer", "submit:*", "worker:alice-*", "reader:a b/ü:c%"] {
        assert_eq!(Role::of_uri(&role(text).uri()), Some(role(text)), "{text}");
        assert!(role(text).uri().is_ascii());
        assert_eq!(role(text).to_string(), text);
    }
    for uri in [
        "spiffe://x/worker",
        "paraft:",
        "paraft:worker",
        "paraft:worker:",
        "paraft:admin:x",
        "paraft:root",
        "paraft:worker:%zz",
        "paraft:worker:%f",
    ] {
        assert_eq!(Role::of_uri(uri), None, "{uri}");
    }
    assert!("worker".parse::<Role>().is_err_and(|e| e.contains("worker:JOBS")));
}

#[test]
fn a_role_is_for_its_jobs_alone() {
    for (text, need, job, enough) in [
        ("worker:a", Need::Worker, Some("a"), true),
        ("worker:a", Need::Worker, Some("ab"), false),
        ("worker:a", Need::Worker, Some(""), false),
        ("worker:a", Need::Worker, None, true),
        ("worker:a*", Need::Worker, Some("ab"), true),
        ("worker:a*", Need::Worker, Some("b"), false),
        ("worker:*", Need::Worker, Some("b"), true),
        ("worker:*", Need::Submit, Some("b"), false),
        ("worker:*", Need::Reader, Some("b"), true),
        ("reader:*", Need::Worker, Some("b"), false),
        ("submit:b", Need::Worker, Some("b"), true),
        ("submit:*", Need::Admin, None, false),
        ("submit:*", Need::Peer, None, false),
        ("admin", Need::Submit, Some("b"), true),
        ("admin", Need::Peer, None, false),
        ("peer", Need::Peer, None, true),
        ("peer", Need::Reader, Some("b"), true),
        ("peer", Need::Worker, Some("b"), false),
        ("peer", Need::Admin, None, false),
        ("peer", Need::Operate, None, true),
        ("admin", Need::Operate, None, true),
        ("submit:*", Need::Operate, None, false),
        ("peer", Need::Any, None, true),
    ] {
        assert_eq!(role(text).is_enough_for(need, job), enough, "{text} {need} {job:?}");
    }
    let none = Rights::none();
    assert!(Need::ALL.iter().all(|n| !none.are_enough_for(*n, None)));
    let all = Rights::all("test");
    assert!(Need::ALL.iter().all(|n| all.are_enough_for(*n, Some("x")) && all.are_for_all(*n)));
}
