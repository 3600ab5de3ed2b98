//! The keys of a job, queried from the types that read them, so that there is no second list; and proposals for
//! mistyped keys.

use crate::refused::{Refused, job_of};
use paraft_common::kind::KIND;
use strsim::levenshtein;
use toml::{Table, Value};

/// A name of no key and no word.
const PROBE: &str = "?";
/// Maximum depth of nested tables.
const DEPTH: usize = 3;

/// The refusal of a job with only this key, in a table of this kind.
pub(crate) fn probe(path: &[String], kind: Option<&str>, key: &str) -> Option<Refused> {
    let mut inner = Table::from_iter([(key.to_string(), Value::String(PROBE.into()))]);
    inner.extend(kind.map(|k| (KIND.to_string(), Value::String(k.into()))));
    for above in path.iter().rev() {
        inner = Table::from_iter([(above.clone(), Value::Table(inner))]);
    }
    job_of(inner).err().map(serde_path_to_error::Error::into_inner)
}

/// Whole keys of a job, below `path`.
pub(crate) fn known(path: &[String]) -> Vec<String> {
    let whole = |key: &str| [path, &[key.to_string()]].concat().join(".");
    let mut keys = Vec::new();
    let said = match probe(path, None, KIND) {
        // The optimizer in [local] has the keys of [optimizer].
        Some(Refused::Word { .. }) if path.len() > 1 => Vec::new(),
        Some(Refused::Word { of, .. }) => {
            keys.push(whole(KIND));
            of.iter().map(|kind| probe(path, Some(kind), PROBE)).collect()
        }
        _ => vec![probe(path, None, PROBE)],
    };
    for refused in said.into_iter().flatten() {
        let Refused::Key { key, takes } = refused else { continue };
        for field in takes.iter().filter(|_| key == PROBE) {
            if !keys.contains(&whole(field)) {
                keys.push(whole(field));
                let path = [path, &[field.to_string()]].concat();
                keys.extend(if path.len() < DEPTH { known(&path) } else { Vec::new() });
            }
        }
    }
    keys
}

/// All keys of a job that have a value, as `train.mode`, without those whose names the user chooses.
pub fn job_keys() -> Vec<String> {
    let all = known(&[]);
    let is_table =
        |key: &String| all.iter().any(|k| k.strip_prefix(key.as_str()).is_some_and(|k| k.starts_with('.')));
    all.iter().filter(|key| !is_table(key)).cloned().collect()
}

/// The probably intended key: the same name in another table; a similar name in this table; a similar name
/// anywhere.
pub(crate) fn meant(wrong: &str, parent: &str, there: &[&str]) -> Option<String> {
    let all = known(&[]);
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_string();
    // The key is refused at this place, though another kind of the table may have it.
    let elsewhere = |k: &String| k.rsplit_once('.').map_or("", |(p, _)| p) != parent;
    let same = all.iter().filter(|k| last(k) == wrong && elsewhere(k));
    let same: Vec<String> = same.map(|k| format!("`{k}`")).collect();
    if !same.is_empty() {
        return Some(same.join(" or "));
    }
    let here = there.iter().map(|w| (levenshtein(wrong, w), w)).min().filter(|(d, _)| *d <= 3);
    // Elsewhere only a very similar name; first the same table.
    let near = |d: usize| 3 * d <= wrong.len();
    let anywhere = all
        .iter()
        .map(|k| (levenshtein(wrong, &last(k)), elsewhere(k), k))
        .filter(|(d, elsewhere, _)| near(*d) && (*d > 0 || *elsewhere));
    match here {
        Some((_, w)) if parent.is_empty() => Some(format!("`{w}`")),
        Some((_, w)) => Some(format!("`{parent}.{w}`")),
        None => anywhere.min().map(|(.., k)| format!("`{k}`")),
    }
}
