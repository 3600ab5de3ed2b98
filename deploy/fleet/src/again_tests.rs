//! Tests of `again`.

use super::*;

fn again(line: &str, flag: &str, given: Option<&str>) -> String {
    let words: Vec<String> = line.split(' ').map(str::to_string).collect();
    let subcommand = words[1].clone();
    with_flag(words, &subcommand, flag, given.map(Path::new), Path::new("runs/t-1"))
}

#[test]
fn a_flag_is_set_or_replaced_before_the_scripts_own() {
    for (line, given, now) in [
        ("paraft train a.toml", None, "paraft train --resume=runs/t-1 a.toml"),
        ("paraft train --resume old a.toml", Some("old"), "paraft train --resume=runs/t-1 a.toml"),
        ("paraft train a.toml --resume", Some("latest"), "paraft train --resume=runs/t-1 a.toml"),
        ("paraft launch --resume a.py", Some("latest"), "paraft launch --resume=runs/t-1 a.py"),
        ("paraft launch --resume=x a.py", Some("x"), "paraft launch --resume=runs/t-1 a.py"),
        ("paraft launch a.py --resume y", None, "paraft launch --resume=runs/t-1 a.py --resume y"),
        (
            "paraft train a.toml --detached /f --fleet b",
            None,
            "paraft train --resume=runs/t-1 a.toml --fleet b",
        ),
    ] {
        assert_eq!(again(line, "--resume", given), now);
    }
}

#[test]
fn words_are_quoted_for_a_shell() {
    let words = ["paraft", "sweep", "my job.toml"].map(String::from).to_vec();
    let line = with_flag(words, "sweep", "--run-dir", None, Path::new("runs/a b"));
    assert_eq!(line, "paraft sweep '--run-dir=runs/a b' 'my job.toml'");
}
