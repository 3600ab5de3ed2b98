//! Tests of `set`.

use super::*;

#[test]
fn values_are_toml_or_text_and_tables_are_made() {
    let mut t: Table = toml::from_str("[train]\nbatch = 3").expect("toml");
    for a in ["train.batch=64", "train.mode=ssp:4", "optimizer.lr = 0.5", "x.y.z=[1, 2]", "name=\"a b\""] {
        apply(&mut t, a).expect(a);
    }
    assert_eq!(t["train"]["batch"].as_integer(), Some(64));
    assert_eq!(t["train"]["mode"].as_str(), Some("ssp:4"));
    assert_eq!(t["optimizer"]["lr"].as_float(), Some(0.5));
    assert_eq!(t["x"]["y"]["z"].as_array().map(Vec::len), Some(2));
    assert_eq!(t["name"].as_str(), Some("a b"));
    apply(&mut t, "constraints.\"fc1.weight\".max_norm=2").expect("quoted");
    assert_eq!(t["constraints"]["fc1.weight"]["max_norm"].as_integer(), Some(2));
    for a in ["novalue", "=1", "a..b=1", "train.batch.x=1", "a.\"b=1", "a.\"b\"c=1", "a.\"\"=1", "a.=1"] {
        assert!(apply(&mut t, a).is_err(), "{a}");
    }
}

#[test]
fn a_table_assigns_the_keys_in_it_and_no_others() {
    for (assignment, key, does) in [
        ("train.workers = 3", "train.workers", true),
        ("train={ workers = 3 }", "train.workers", true),
        ("train={ batch = 3 }", "train.workers", false),
        ("train.workers", "train.workers", false),
        ("name=a", "name", true),
    ] {
        assert_eq!(assigns(assignment, key), does, "{assignment}");
    }
}

#[test]
fn an_assignment_is_of_its_key_and_of_all_in_it() {
    assert!(is_of("train.batch = 3", "train.batch") && is_of("local={}", "local.outer.lr"));
    assert!(!is_of("train.batch=3", "train") && !is_of("train=3", "trainer.batch") && !is_of("=3", "train"));
}
