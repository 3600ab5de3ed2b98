//! `--set key=value` over a TOML file.

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
/// so `train.mode=ssp:4` needs no quotes. Missing tables are created.
pub fn apply(table: &mut Table, assignment: &str) -> Result<(), SetError> {
    let bad = |why: &str| SetError { assignment: assignment.into(), why: why.into() };
    let (path, text) = assignment.split_once('=').ok_or_else(|| bad("write key=value"))?;
    let mut keys =
        parts(path.trim()).ok_or_else(|| bad("the key has an empty part, or a quote that does not end"))?;
    let last = keys.pop().ok_or_else(|| bad("there is no key"))?;
    let mut at = table;
    for key in keys {
        let next = at.entry(key).or_insert_with(|| Value::Table(Table::new()));
        at = next.as_table_mut().ok_or_else(|| bad(&format!("`{key}` is a value, not a table")))?;
    }
    at.insert(last.to_string(), value(text.trim()));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_toml_or_text_and_tables_are_made() {
        let mut t: Table = toml::from_str("[train]\nbatch = 3").expect("toml");
        for a in ["train.batch=64", "train.mode=ssp:4", "optimizer.lr = 0.5", "x.y.z=[1, 2]", "name=\"a b\""]
        {
            apply(&mut t, a).expect(a);
        }
        assert_eq!(t["train"]["batch"].as_integer(), Some(64));
        assert_eq!(t["train"]["mode"].as_str(), Some("ssp:4"));
        assert_eq!(t["optimizer"]["lr"].as_float(), Some(0.5));
        assert_eq!(t["x"]["y"]["z"].as_array().map(Vec::len), Some(2));
        assert_eq!(t["name"].as_str(), Some("a b"));
        apply(&mut t, "constraints.\"fc1.weight\".max_norm=2").expect("quoted");
        assert_eq!(t["constraints"]["fc1.weight"]["max_norm"].as_integer(), Some(2));
        for a in ["novalue", "=1", "a..b=1", "train.batch.x=1", "a.\"b=1", "a.\"b\"c=1", "a.\"\"=1", "a.=1"] {
            assert!(apply(&mut t, a).is_err(), "{a}");
        }
    }

    #[test]
    fn an_assignment_is_of_its_key_and_of_all_in_it() {
        assert!(is_of("train.batch = 3", "train.batch") && is_of("local={}", "local.outer.lr"));
        assert!(
            !is_of("train.batch=3", "train") && !is_of("train=3", "trainer.batch") && !is_of("=3", "train")
        );
    }
}
