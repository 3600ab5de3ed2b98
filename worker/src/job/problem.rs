//! What is wrong with a key of a job file, in words for whoever wrote it.
//!
//! serde says what it met and what it wanted, in words of Rust and mostly without the place. The place is found by trial:
//! the key without which the job is not refused, or refused for something else. Which keys there are is asked of serde
//! too, so that no second list of them has to be kept.

use super::Job;
use paraft_common::config::overlay;
use toml::{Table, Value};

/// Why a table is no job.
pub(super) struct Problem {
    /// The whole key, `cluster.durability`, where one is to blame.
    pub key: Option<String>,
    /// What is wrong, with the key.
    pub message: String,
    /// What to do.
    pub remedy: Option<String>,
}

/// Keys that earlier versions had, and what to do without them.
const GONE: [(&str, &str); 2] = [
    ("cluster.log", "take the key out: cluster.durability decides what enters the log"),
    ("cluster.pull_from", "take the key out: leaders answer the pulls of workers"),
];
/// No key has this name.
const PROBE: &str = "?";
/// Tables in tables, at most.
const DEPTH: usize = 3;

/// What is wrong with a table that serde refuses with this error.
pub(super) fn explain(table: &Table, error: &toml::de::Error) -> Problem {
    let said = first_line(error);
    let Some(key) = to_blame(table, &said) else {
        return Problem { key: None, message: said, remedy: None };
    };
    let words = quoted(&said);
    if said.starts_with("unknown field") {
        let (parent, last) = key.rsplit_once('.').unwrap_or(("", &key));
        let place = if parent.is_empty() { "a job".to_string() } else { format!("[{parent}]") };
        let there = words.get(1..).unwrap_or_default();
        let takes = if there.is_empty() { "no other keys with this kind".into() } else { list(there) };
        let message = format!("{key}: unknown key `{last}`; {place} takes {takes}");
        let gone = GONE.iter().find(|(gone, _)| *gone == key).map(|(_, why)| why.to_string());
        let remedy = gone.or_else(|| meant(last, parent, there).map(|m| format!("did you mean {m}?")));
        return Problem { message, remedy, key: Some(key) };
    }
    if let (true, Some((wrong, there))) = (said.starts_with("unknown variant"), words.split_first()) {
        let near = there.iter().min_by_key(|w| distance(wrong, w)).filter(|w| distance(wrong, w) <= 3);
        let remedy = near.map(|w| format!("did you mean `{w}`?"));
        return Problem {
            message: format!("{key}: `{wrong}` is none of {}", list(there)),
            remedy,
            key: Some(key),
        };
    }
    let kind =
        ["invalid type: ", "invalid value: ", "invalid length "].iter().find_map(|k| said.strip_prefix(k));
    let message = match kind.and_then(|rest| rest.rsplit_once(", expected ")) {
        // serde does not say which there are where it met no text at all.
        Some(("unit variant", _)) => format!("{key}: a word in quotes is expected"),
        Some((is, wanted)) => format!("{key}: {is}, where {} is expected", in_words(wanted)),
        None => format!("{key}: {said}"),
    };
    Problem { key: Some(key), message, remedy: None }
}

/// The line, from 1, on which a key is set, or else the table that it is in.
pub(super) fn line_of(text: &str, key: &str) -> Option<usize> {
    let mut at = key;
    loop {
        if let Some(line) = overlay::line_of(text, at) {
            return Some(line);
        }
        at = at.rsplit_once('.')?.0;
    }
}

/// The error without what it adds about its place.
fn first_line(error: &toml::de::Error) -> String {
    error.message().lines().next().unwrap_or_default().trim().to_string()
}

fn refusal(table: Table) -> Option<String> {
    table.try_into::<Job>().err().map(|e| first_line(&e))
}

/// The key without which serde does not say this any more. A `kind` comes last: without it nothing fits.
fn to_blame(table: &Table, said: &str) -> Option<String> {
    // One part of the job at a time: it has no other duties, so that a key of another part, which is needed there, is
    // not taken for the one.
    let alone = |(key, value): (&String, &Value)| Table::from_iter([(key.clone(), value.clone())]);
    let table = &table.iter().map(alone).find(|part| refusal(part.clone()).as_deref() == Some(said))?;
    if let Some(missing) = said.strip_prefix("missing field") {
        let missing = quoted(missing).pop()?;
        let (lacks, _) = paths(table)
            .into_iter()
            .find(|(p, is_table)| *is_table && refusal(with(table, p, &missing)).as_deref() != Some(said))?;
        return Some(lacks.join("."));
    }
    let mut keys: Vec<_> = paths(table).into_iter().filter(|(_, is_table)| !is_table).collect();
    keys.sort_by_key(|(path, _)| path.last().is_some_and(|k| k == "kind"));
    let found = keys.into_iter().find(|(path, _)| refusal(without(table, path)).as_deref() != Some(said));
    found.map(|(path, _)| path.join("."))
}

/// Every key, and whether its value is a table.
fn paths(table: &Table) -> Vec<(Vec<String>, bool)> {
    let mut all = Vec::new();
    for (key, value) in table {
        let inner = value.as_table().map(paths);
        all.push((vec![key.clone()], inner.is_some()));
        for (path, is_table) in inner.into_iter().flatten() {
            all.push(([vec![key.clone()], path].concat(), is_table));
        }
    }
    all
}

/// The table in which the last part of `path` is.
fn parent<'a>(table: &'a mut Table, path: &[String]) -> Option<&'a mut Table> {
    path.iter().try_fold(table, |at, key| at.get_mut(key)?.as_table_mut())
}

fn without(table: &Table, path: &[String]) -> Table {
    let mut left = table.clone();
    if let Some((last, above)) = path.split_last()
        && let Some(at) = parent(&mut left, above)
    {
        at.remove(last);
    }
    left
}

fn with(table: &Table, path: &[String], key: &str) -> Table {
    let mut more = table.clone();
    if let Some(at) = parent(&mut more, path) {
        at.insert(key.into(), Value::String(PROBE.into()));
    }
    more
}

/// What serde says to a job with these keys alone.
fn probe(path: &[String], kind: Option<&str>, key: &str) -> String {
    let mut inner = Table::from_iter([(key.to_string(), Value::String(PROBE.into()))]);
    inner.extend(kind.map(|k| ("kind".to_string(), Value::String(k.into()))));
    for above in path.iter().rev() {
        inner = Table::from_iter([(above.clone(), Value::Table(inner))]);
    }
    refusal(inner).unwrap_or_default()
}

/// Whole keys of a job, below `path`.
fn known_keys(path: &[String]) -> Vec<String> {
    let mut said = vec![probe(path, None, PROBE)];
    let mut keys = Vec::new();
    if said[0].starts_with("missing field `kind`") {
        let kinds = quoted(&probe(path, None, "kind"));
        keys.push([path, &["kind".into()]].concat().join("."));
        said = kinds.iter().skip(1).map(|kind| probe(path, Some(kind), PROBE)).collect();
    }
    for said in said.iter().filter(|s| s.starts_with(&format!("unknown field `{PROBE}`"))) {
        for field in quoted(said).into_iter().skip(1) {
            let path = [path, &[field]].concat();
            let whole = path.join(".");
            if !keys.contains(&whole) {
                keys.push(whole);
                let below = if path.len() < DEPTH { known_keys(&path) } else { Vec::new() };
                keys.extend(below);
            }
        }
    }
    keys
}

/// Which key may have been meant: the same name in another table; a name like it in this one; in any.
fn meant(wrong: &str, parent: &str, there: &[String]) -> Option<String> {
    let all = known_keys(&[]);
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_string();
    // Where it stands it is refused, though another kind of the table may have it.
    let refused = |k: &&String| k.rsplit_once('.').map_or("", |(p, _)| p) != parent;
    let same: Vec<String> = all.iter().filter(|k| last(k) == wrong).filter(refused).cloned().collect();
    if !same.is_empty() {
        return Some(same.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(" or "));
    }
    let here = there.iter().map(|w| (distance(wrong, w), w)).min().filter(|(d, _)| *d <= 3);
    // Elsewhere only what is hardly another word; the same table first.
    let near = |d: usize| 3 * d <= wrong.len();
    let elsewhere = |k: &String| k.rsplit_once('.').map_or("", |(p, _)| p) != parent;
    let anywhere =
        all.iter().map(|k| (distance(wrong, &last(k)), elsewhere(k), k)).filter(|(d, ..)| near(*d));
    match here {
        Some((_, w)) if parent.is_empty() => Some(format!("`{w}`")),
        Some((_, w)) => Some(format!("`{parent}.{w}`")),
        None => anywhere.min().map(|(.., k)| format!("`{k}`")),
    }
}

/// What serde wants, for a reader of TOML.
fn in_words(wanted: &str) -> String {
    match wanted {
        "u8" => "a whole number from 0 to 255".into(),
        "u16" => "a whole number from 0 to 65535".into(),
        "u32" => "a whole number from 0 to 4294967295".into(),
        "u64" | "usize" => "a whole number from 0".into(),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".into(),
        "f32" | "f64" => "a number".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "a list".into(),
        "a string" | "path string" => "a text".into(),
        w if w.starts_with("struct ") || w.contains("enum ") || w == "a map" => "a table".into(),
        w => w.into(),
    }
}

fn list(words: &[String]) -> String {
    words.iter().map(|w| format!("`{w}`")).collect::<Vec<_>>().join(", ")
}

/// The words in backquotes.
fn quoted(message: &str) -> Vec<String> {
    message.split('`').skip(1).step_by(2).map(str::to_string).collect()
}

/// Edit distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let next = (diagonal + usize::from(ca != *cb)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = row[j + 1];
            row[j + 1] = next;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const BASE: &str = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"digits\"\n";

    fn said(more: &str, set: &[&str]) -> String {
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        let text = format!("{BASE}{more}");
        Job::parse(&text, Path::new("job.toml"), &set).expect_err(more).to_string()
    }

    #[test]
    fn what_is_wrong_is_said_with_the_whole_key_and_what_it_takes() {
        for (more, words) in [
            (
                "[cluster]\nservers = 3\ndurability = \"quorum\"",
                "job.toml:8: cluster.durability: `quorum` is none of `quorum-disk`, `quorum-memory`, `leader`",
            ),
            (
                "[cluster]\nmax_restarts = -1",
                "job.toml:7: cluster.max_restarts: integer `-1`, where a whole number from 0 to 4294967295 is expected",
            ),
            (
                "[optimizer]\nkind = \"sgd\"\nlr = \"x\"",
                "job.toml:8: optimizer.lr: string \"x\", where a number is expected",
            ),
            ("[optimizer]\nlr = 0.1", "job.toml:6: optimizer: missing field `kind`"),
            (
                "[train]\nshuffle = 3",
                "job.toml:7: train.shuffle: integer `3`, where true or false is expected",
            ),
            ("[train]\nmode = \"x\"", "job.toml:7: train.mode: `x` is no consistency mode"),
            (
                "[eval]\nearly_stop = { patience = -1 }",
                "job.toml:7: eval.early_stop.patience: integer `-1`, where a whole number",
            ),
            // The first of two mistakes.
            ("[cluster]\naddresses = 3\nservers = \"x\"", "cluster.addresses: integer `3`, where a list is"),
        ] {
            let said = said(more, &[]);
            assert!(said.contains(words), "{said}\n{words}");
        }
    }

    #[test]
    fn a_key_in_the_wrong_place_is_told_the_right_one() {
        for (more, set, words) in [
            ("", &["durability=leader"][..], &["--set durability=leader: durability: unknown key"][..]),
            (
                "",
                &["cluster.log=auto"],
                &["unknown key `log`", "help: take the key out", "cluster.durability"],
            ),
            ("", &["durability=leader"], &["help: did you mean `cluster.durability`?"]),
            ("", &["lr=3"], &["did you mean `local.lr` or `optimizer.lr`?"]),
            ("", &["min_delta=3"], &["did you mean `eval.early_stop.min_delta`?"]),
            (
                "",
                &["cluster.batch=3"],
                &["cluster.batch: unknown key `batch`; [cluster] takes", "`train.batch`?"],
            ),
            ("", &["model.kinds=mlp"], &["did you mean `model.kind`?"]),
            ("", &["data.foo=1"], &["unknown key `foo`; [data] takes no other keys with this kind"]),
            ("", &["epoch=3"], &["`train.epochs`?"]),
            ("", &["train.epoch=3"], &["`train.epochs`?"]),
            ("[train]\nepocs = 3", &[], &["job.toml:7: train.epocs: unknown key", "`train.epochs`?"]),
            ("[optimizer]\nkind = \"sgd\"\nweight_deca = 1", &[], &["`optimizer.weight_decay`?"]),
            (
                "",
                &["train.encoding=fp16"],
                &[
                    "--set train.encoding=fp16: train.encoding: `fp16` is none of `f32`, `bf16`",
                    "did you mean `f16`?",
                ],
            ),
            ("", &["model.kind=mlpp"], &["--set model.kind=mlpp: model.kind: `mlpp` is none of", "`mlp`?"]),
            ("", &["train.encoding=1"], &["train.encoding: integer `1`, where a text is expected"]),
            (
                "",
                &["train.encoding=top-k:2"],
                &["train.encoding: `top-k:2`: the fraction", "above 0 and at most 0.5"],
            ),
            ("", &["train.encoding=powersgd"], &["train.encoding: `powersgd`: the rank", "from 1 to 64"]),
            ("", &["train.error_feedback=true"], &["train.error_feedback: f32 leaves nothing out"]),
            ("", &["train=3"], &["--set train=3: train: integer `3`, where a table is expected"]),
        ] {
            let said = said(more, set);
            words.iter().for_each(|w| assert!(said.contains(w), "{said}\n{w}"));
        }
    }

    #[test]
    fn a_window_is_refused_where_nothing_reads_it() {
        let window = "[train]\nmode = \"asp\"\n[cluster]\nleader_window_ms = 50\n";
        let said = said(window, &[]);
        assert!(said.contains("job.toml:9: cluster.leader_window_ms: durability quorum-memory"), "{said}");
        let text = format!("{BASE}{window}durability = \"leader\"");
        let job = Job::parse(&text, Path::new("job.toml"), &[]).expect("a job");
        assert_eq!((job.cluster.leader_window().ms, job.cluster.leader_window().pushes), (50, 256));
    }
}
