//! The command line that continues what this process has begun.

use paraft_engines::fleet::quoted;
use std::path::Path;

/// `paraft submit` sets it for the launcher that it starts; it is nothing to repeat.
const DETACHED: &str = "--detached";

/// The command line of this process, which runs this subcommand, with a flag of it set to this path; `given`: the flag's
/// value so far. For a shell.
pub fn command(subcommand: &str, flag: &str, given: Option<&Path>, path: &Path) -> String {
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    with_flag(words, subcommand, flag, given, path)
}

fn with_flag(
    mut words: Vec<String>,
    subcommand: &str,
    flag: &str,
    given: Option<&Path>,
    path: &Path,
) -> String {
    // Behind a script stand its own flags, of any name: the first one of a name is this program's, if it has one.
    if let Some(given) = given {
        remove(&mut words, flag, |value| Path::new(value) == given);
    }
    if subcommand == "train" {
        remove(&mut words, DETACHED, |_| true);
    }
    let at = words.iter().skip(1).position(|word| word == subcommand).map_or(words.len(), |i| i + 2);
    words.insert(at, format!("{flag}={}", path.display()));
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// Removes the first such flag, with its value: in the same word, or in the next one if it is the value.
fn remove(words: &mut Vec<String>, flag: &str, is_value: impl Fn(&str) -> bool) {
    let with_value = format!("{flag}=");
    let Some(at) = words.iter().position(|word| word == flag || word.starts_with(&with_value)) else {
        return;
    };
    let is_alone = words.remove(at) == flag;
    if is_alone && words.get(at).is_some_and(|next| is_value(next)) {
        words.remove(at);
    }
}

#[cfg(test)]
#[path = "again_tests.rs"]
mod tests;
