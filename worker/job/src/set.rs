//! `--set key=value` over a TOML file.

use crate::paths;
use toml::{Table, Value};

/// A `--set` that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--set {assignment}: {why}")]
pub struct SetError {
    /// The assignment.
    pub assignment: String,
    /// The fault.
    pub why: String,
}

/// Applies `a.b.c=value` to a table. The value is TOML (`0.1`, `true`, `[1, 2]`, `"text"`); anything else is text,
/// so `train.mode=ssp:4` needs no quotes. Missing tables are created. An entry of a list of tables goes by its name:
/// `table.items.dim=8`. Relative paths start in the working directory.
pub fn apply(table: &mut Table, assignment: &str) -> Result<(), SetError> {
    let bad = |why: &str| SetError { assignment: assignment.into(), why: why.into() };
    let (path, text) = assignment.split_once('=').ok_or_else(|| bad("write key=value"))?;
    let mut keys =
        parts(path.trim()).ok_or_else(|| bad("the key has an empty part, or a quote that does not end"))?;
    let mut value = value(text.trim());
    paths::from_shell(&keys, &mut value).map_err(|why| bad(&why))?;
    let last = keys.pop().ok_or_else(|| bad("there is no key"))?;
    let (mut at, mut keys) = (table, keys.into_iter());
    while let Some(key) = keys.next() {
        let mut next = at.entry(key).or_insert_with(|| Value::Table(Table::new()));
        if let Value::Array(entries) = next {
            let name = keys.next().ok_or_else(|| bad(&format!("name the entry: {key}.NAME.{last}")))?;
            let mut named =
                entries.iter_mut().filter(|e| e.get("name").and_then(Value::as_str) == Some(name));
            next = named.next().ok_or_else(|| bad(&format!("no entry of `{key}` is named `{name}`")))?;
        }
        at = next.as_table_mut().ok_or_else(|| bad(&format!("`{key}` is a value, not a table")))?;
    }
    at.insert(last.to_string(), value);
    Ok(())
}

/// A dotted key's parts; a quoted part may contain dots: `constraints."fc1.weight".max_norm`.
fn parts(path: &str) -> Option<Vec<&str>> {
    let (mut parts, mut rest) = (Vec::new(), path);
    loop {
        let (part, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => rest.split_at(rest.find('.').unwrap_or(rest.len())),
        };
        if part.is_empty() {
            return None;
        }
        parts.push(part);
        match after.strip_prefix('.') {
            Some(more) => rest = more,
            None => return after.is_empty().then_some(parts),
        }
    }
}

fn value(text: &str) -> Value {
    let parsed = toml::from_str::<Table>(&format!("v = {text}")).ok().and_then(|mut t| t.remove("v"));
    parsed.unwrap_or_else(|| Value::String(text.to_string()))
}

/// Whether this assignment sets the key, or a table that contains it.
pub fn is_of(assignment: &str, key: &str) -> bool {
    let path = assignment.split('=').next().unwrap_or_default().trim();
    !path.is_empty() && key.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Whether this assignment gives the key a value, by itself or in a table.
pub fn assigns(assignment: &str, key: &str) -> bool {
    let mut table = Table::new();
    let applied = apply(&mut table, assignment).is_ok();
    let value = key.split('.').try_fold(&Value::Table(table), |at, part| at.as_table()?.get(part)).is_some();
    applied && value
}

#[cfg(test)]
#[path = "set_tests.rs"]
mod tests;
