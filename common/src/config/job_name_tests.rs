//! Tests of `job_name`.

use super::*;

#[test]
fn job_names_have_one_rule() {
    for name in ["a", "A9", "_x", "0", "mnist.v2-final_3", &"n".repeat(128)] {
        assert_eq!(check_name(name), Ok(()), "{name}");
    }
    for name in [
        "",
        "*",
        "a*",
        ".",
        "..",
        ".a",
        "-x",
        " a",
        "a b",
        "a/b",
        "a\\b",
        "a:b",
        "a,b",
        "a%b",
        "a$b",
        "a\n",
        "\u{202e}a",
        "\u{e9}",
        &"n".repeat(129),
    ] {
        let why = check_name(name).expect_err(name);
        assert!(why.contains("1 to 128 letters, digits, `.`, `_` and `-`"), "{why}");
        assert!(!why.chars().any(|c| c.is_control() || c == '\u{202e}'), "{why:?}");
    }
}

#[test]
fn pattern_of_names_has_one_star_behind_a_name() {
    for pattern in ["*", "a", "alice-*", "a.*"] {
        assert_eq!(check_names(pattern), Ok(()), "{pattern}");
    }
    for pattern in ["", "**", "a**", "*a", "a*b", ".*", "-*", "a b*", "..", "\u{202e}*"] {
        assert!(check_names(pattern).is_err(), "{pattern}");
    }
}
