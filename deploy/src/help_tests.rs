//! Tests of `help`.

use super::*;
use crate::Cli;
use clap::{CommandFactory, Parser};

/// The visible commands of a command.
fn visible(command: &Command) -> Vec<&str> {
    command.get_subcommands().filter(|c| !c.is_hide_set()).map(Command::get_name).collect()
}

#[test]
fn each_command_is_in_exactly_one_group() {
    let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|g| g.commands).map(|(name, _)| *name).collect();
    grouped.sort_unstable();
    let cli = Cli::command();
    let mut all = visible(&cli);
    all.sort_unstable();
    assert_eq!(grouped, all);
    assert!(GROUPS.iter().all(|g| !g.commands.is_empty()));
}

#[test]
fn each_command_has_an_example_that_is_one_of_it() {
    let cli = Cli::command();
    let mut examples = 0;
    for outer in visible(&cli) {
        let command = cli.find_subcommand(outer).expect("it is listed");
        let inner = visible(command).into_iter().map(Some);
        for inner in inner.chain([None]) {
            let path =
                [Some("paraft"), Some(outer), inner].into_iter().flatten().collect::<Vec<_>>().join(" ");
            let example = example(outer, inner).unwrap_or_else(|| panic!("no example of {path}"));
            assert!(example == path || example.starts_with(&format!("{path} ")), "{path}: {example}");
            let parsed = Cli::try_parse_from(example.split(' '));
            assert!(parsed.is_ok(), "{example}: {}", parsed.err().map(|e| e.to_string()).unwrap_or_default());
            examples += usize::from(inner.is_some());
        }
    }
    assert_eq!(examples, INNER.len(), "an example of no command");
}

#[test]
fn long_descriptions_are_folded_and_indented() {
    let text = folded(&"word ".repeat(40));
    assert!(text.lines().count() > 1 && text.lines().skip(1).all(|l| l.starts_with("              word")));
    assert!(text.lines().all(|l| l.len() <= WIDTH), "{text}");
    assert_eq!(folded("two words"), "two words");
}
