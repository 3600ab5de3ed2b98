//! Tests of `vowpal`.
//!
//! Indices are those of the package vowpalwabbit 9.11.9: `Workspace(options).parse(line).iter_features()`, cut to the
//! bits.

use super::*;

fn read(text: &str, options: &VowpalOptions) -> Result<SparseBatch, String> {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("a.vw");
    std::fs::write(&path, text).expect("writes");
    read_vowpal(&path, options).map_err(|e| e.to_string())
}

/// The first sample's ids and values.
fn features(line: &str, options: &VowpalOptions) -> Vec<(u64, f32)> {
    let batch = read(line, options).expect("reads");
    let (ids, weights) = batch.fields[0].row(0);
    ids.iter().enumerate().map(|(i, id)| (*id, weights.get(i).copied().unwrap_or(1.0))).collect()
}

#[test]
fn indices_are_those_of_vowpal_wabbit() {
    let default = VowpalOptions::default();
    let all = VowpalOptions { hash: VowpalHash::All, ..default };
    let wide = VowpalOptions { bits: 22, ..default };
    let bare = VowpalOptions { bits: 24, constant: false, ..all };
    let (one, two) = (|id| (id, 1.0), |id| (id, 2.0));
    let cases = [
        (
            "1 |f a |f b |g a:2 a",
            default,
            vec![one(14355), one(146788), two(157167), one(157167), one(116060)],
        ),
        ("1 |f a:b c:b:d :b", default, vec![one(229422), one(226076), one(146788), one(116060)]),
        ("1 |f a:b|c d", default, vec![one(14174), one(166545), one(116060)]),
        (
            "1 |12 012 18446744073709551617 x:-0.5",
            default,
            vec![one(24), one(13), (98015, -0.5), one(116060)],
        ),
        ("1 |f :3 :4 a", default, vec![(34875, 3.0), (34876, 4.0), one(14355), one(116060)]),
        ("1 | :3 :4 a |z:0.5 a", default, vec![(0, 3.0), (1, 4.0), one(92594), (193322, 0.5), one(116060)]),
        ("1 |ns:2.0 a:3 b", default, vec![two(50664), (180474, 6.0), one(116060)]),
        ("1 |f:2|g:3 a", default, vec![(157167, 3.0), one(116060)]),
        ("1 |f a:2 b:0 c:-0.5", default, vec![two(14355), (253856, -0.5), one(116060)]),
        ("1 |f 1:2 -1:3 1.5", default, vec![two(34876), (194988, 3.0), one(53731), one(116060)]),
        ("1 |f über é ï:2", default, vec![one(126979), one(238967), two(50522), one(116060)]),
        ("1 |f \u{1}a\ta", default, vec![one(14355), one(14355), one(116060)]),
        ("1 || a", default, vec![one(92594), one(116060)]),
        ("1 ", default, vec![one(116060)]),
        ("1 |7 a 12 über:2 x:y", all, vec![one(122665), one(96217), two(163611), one(215697), one(116060)]),
        ("1 |7 a 12 über:2", wide, vec![one(1932839), one(19), two(1110069), one(3261788)]),
        ("1 |7 a 12 :b", bare, vec![one(8746969), one(12181289), one(15266029)]),
    ];
    for (line, options, mut expected) in cases {
        let mut seen = features(line, &options);
        // The package has another order.
        seen.sort_by(|a, b| a.partial_cmp(b).expect("finite"));
        expected.sort_by(|a, b| a.partial_cmp(b).expect("finite"));
        assert_eq!(seen, expected, "{line}");
    }
}

#[test]
fn labels_importance_and_tags_are_those_of_vowpal_wabbit() {
    let options = VowpalOptions::default();
    let text = "1 |f a\n-1 2|f a\n-1 2 |f a\n 1  0.5 0 'tag |f a\n+1 tag|f a\n1 3 'x|f a\n\n1 0 |f\r\n";
    let batch = read(text, &options).expect("reads");
    assert_eq!(batch.labels, [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(batch.importance, [1.0, 1.0, 2.0, 0.5, 1.0, 3.0, 0.0]);
    let numbers = VowpalOptions { task: Task::Regression, ..options };
    assert_eq!(read("-2.5 |f a\n0 |f b\n", &numbers).expect("reads").labels, [-2.5, 0.0]);
}

#[test]
fn what_vowpal_wabbit_guesses_is_refused_with_its_place() {
    for (text, expected) in [
        ("1 |f a\n1|f a\n", "line 2, column 1: the sample has no label; write a blank before the bar"),
        ("|f a\n", "line 1, column 1: the sample has no label; write the label"),
        ("'tag |f a\n", "line 1, column 1: the sample has no label; write the label"),
        ("x |f a\n", "line 1, column 1: label `x` is no finite number"),
        ("1\t|f a\n", "line 1, column 2: a tab before the bar"),
        ("1 -1 |f a\n", "line 1, column 3: importance `-1`"),
        ("1 1 0.5 |f a\n", "line 1, column 5: base `0.5`: no model here starts from a prediction"),
        ("1 1 0 1 |f a\n", "line 1, column 7: `1` is the fourth word"),
        ("1 |f a: b\n", "line 1, column 8: value `` of `a` is no finite number"),
        ("1 |f a:2x\n", "line 1, column 8: value `2x` of `a`"),
        (
            "1 |f a:nancy\n",
            "line 1, column 8: value `nancy` of `a` is no finite number; write a finite value, or",
        ),
        ("1 |f a:Information\n", "line 1, column 8: value `Information`"),
        ("1 |f a:-x\n", "line 1, column 8: value `-x`"),
        ("1 |f a:1e39\n", "line 1, column 8: value `1e39`"),
        ("1 |f: a\n", "line 1, column 4: namespace `f:` is no name:factor"),
        ("1 |f:x a\n", "line 1, column 4: namespace `f:x`"),
        ("1 |:2 a\n", "line 1, column 4: namespace `:2`"),
        ("2 |f a\n", "line 1, column 1: label `2` is neither 1 nor 0 nor -1"),
        ("", "a.vw: no sample"),
    ] {
        let error = read(text, &VowpalOptions::default()).expect_err(expected);
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
    for bits in [0, 62] {
        let error = read("1 |f a\n", &VowpalOptions { bits, ..VowpalOptions::default() }).expect_err("bits");
        assert!(error.contains("[data] bits"), "{error}");
    }
}
