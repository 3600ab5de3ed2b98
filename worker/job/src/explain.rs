//! Explains to the user what is wrong with a key of a job file.
//!
//! [`Refused`] gives the reason; the path of `serde_path_to_error` gives the place.

use crate::{
    keys,
    refused::{Refused, list},
    tables::{TABLE, shown},
};
use serde_path_to_error::{Path, Segment};

/// Why a table is not a job.
pub(crate) struct Problem {
    /// The whole key, `cluster.durability` (`table.0.dim` of an entry of a list); empty if no key is at fault.
    pub key: String,
    /// The fault, with the key.
    pub message: String,
    /// What to do.
    pub remedy: Option<String>,
}

/// The explanation of a refusal at this path. `tables`: the names of the entries of `[[table]]`.
pub(crate) fn explain(path: &Path, refused: &Refused, tables: &[String]) -> Problem {
    let mut within: Vec<String> = Vec::new();
    for segment in path.iter() {
        match segment {
            Segment::Map { key } => within.push(key.clone()),
            // Other lists have values, without keys of their own.
            Segment::Seq { index } if within == [TABLE] => within.push(index.to_string()),
            _ => break,
        }
    }
    let mut keys: Vec<&str> = within.iter().map(String::as_str).collect();
    let (said, remedy) = match refused {
        Refused::Key { key, takes } => {
            if keys.last() == Some(&key.as_str()) {
                keys.pop();
            }
            let parent = keys.join(".");
            keys.push(key);
            let place = match (&keys[..], parent.is_empty()) {
                (_, true) => "a job".into(),
                ([TABLE, _, _], _) => format!("[[{TABLE}]]"),
                _ => format!("[{parent}]"),
            };
            let takes_none = takes.is_empty().then(|| "no other keys with this kind".to_string());
            let said = format!("unknown key `{key}`; {place} takes {}", takes_none.unwrap_or(list(takes)));
            (said, keys::meant(key, &parent, takes).map(|m| format!("did you mean {m}?")))
        }
        Refused::Word { word, of } => {
            let near = of.iter().map(|w| (strsim::levenshtein(word, w), w)).min_by_key(|(d, _)| *d);
            let near = near.filter(|(d, _)| *d <= 3).map(|(_, w)| format!("did you mean `{w}`?"));
            (refused.to_string(), near)
        }
        Refused::Missing { .. } | Refused::Value { .. } | Refused::Other(_) => (refused.to_string(), None),
    };
    let key = keys.join(".");
    let name = match &keys[..] {
        [TABLE, at, ..] => at.parse::<usize>().ok().and_then(|at| tables.get(at)),
        _ => None,
    };
    let message = match name {
        _ if key.is_empty() => said,
        Some(name) => format!("{}: table `{name}`: {said}", shown(&key)),
        None => format!("{}: {said}", shown(&key)),
    };
    Problem { key, message, remedy }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
