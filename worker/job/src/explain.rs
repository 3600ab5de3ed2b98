//! Explains to the user what is wrong with a key of a job file.
//!
//! [`Refused`] gives the reason; the path of `serde_path_to_error` gives the place.

use crate::{
    keys,
    refused::{Refused, list},
};
use serde_path_to_error::{Path, Segment};

/// Why a table is not a job.
pub(crate) struct Problem {
    /// The whole key, `cluster.durability`; empty if no key is at fault.
    pub key: String,
    /// The fault, with the key.
    pub message: String,
    /// What to do.
    pub remedy: Option<String>,
}

/// The explanation of a refusal at this path.
pub(crate) fn explain(path: &Path, refused: &Refused) -> Problem {
    let keys = path.iter().map_while(|s| match s {
        Segment::Map { key } => Some(key.as_str()),
        _ => None,
    });
    let mut keys: Vec<&str> = keys.collect();
    let (said, remedy) = match refused {
        Refused::Key { key, takes } => {
            if keys.last() == Some(&key.as_str()) {
                keys.pop();
            }
            let parent = keys.join(".");
            keys.push(key);
            let place = if parent.is_empty() { "a job".into() } else { format!("[{parent}]") };
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
    let message = if key.is_empty() { said } else { format!("{key}: {said}") };
    Problem { key, message, remedy }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
