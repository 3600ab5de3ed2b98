//! `paraft --help` and the help of its commands.

use crate::common::*;

#[test]
fn the_help_has_every_command_in_exactly_one_group() {
    let help = text(&run(&["--help"]).stdout);
    let commands = help.split("Options:").next().expect("the part before the options");
    let is_command = |line: &&str| line.starts_with("  ") && !line[2..].starts_with([' ', '$']);
    let shown: Vec<&str> =
        commands.lines().filter(is_command).filter_map(|line| line.split_whitespace().next()).collect();
    let script = text(&run(&["completions", "fish"]).stdout);
    let of_root = script.lines().filter(|l| l.contains("__fish_paraft_needs_command") && l.contains(" -a "));
    let all: BTreeSet<&str> = of_root
        .filter_map(|l| l.split(" -a \"").nth(1)?.split('"').next())
        .filter(|c| !["help", "man"].contains(c))
        .collect();
    let mut once = shown.clone();
    once.sort_unstable();
    assert!(all.len() > 20, "{script}");
    assert_eq!(once, Vec::from_iter(all), "{help}");
}

#[test]
fn a_commands_help_ends_with_an_example_after_certificates() {
    for args in
        [&["train", "--help"][..], &["launch", "-h"], &["submit", "--help"], &["fleet", "scale", "-h"]]
    {
        let help = text(&run(args).stdout);
        let place = |words: &str| help.find(words).unwrap_or_else(|| panic!("no `{words}` in {help}"));
        assert!(place("Options:") < place("Certificates:"), "{help}");
        let command = format!("Example: paraft {}", args[0]);
        assert!(place("Certificates:") < place(&command), "{help}");
        assert!(help.trim_end().lines().next_back().is_some_and(|l| l.starts_with(&command)), "{help}");
        assert!(help.find("--help").is_some_and(|at| at < place("--certs")), "{help}");
    }
}
