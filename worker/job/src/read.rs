//! Reads a job from a text, or explains why it is none: file, line, key, what to do.

use crate::{
    Job,
    check::Unfit,
    explain::{self, Problem},
    job::default_optimizer,
    place,
    refused::{Refused, job_of},
    set, tables,
};
use std::path::{Path, PathBuf};
use toml::Table;

/// The maximum size of a job file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Why a text is not a job: file, line, what to do.
#[derive(Debug, thiserror::Error)]
#[error("{}{}: {message}{}", file.display(), line.map(|l| format!(":{l}")).unwrap_or_default(), remedy.as_deref().map(|r| format!("\n  help: {r}")).unwrap_or_default())]
pub struct JobError {
    /// The job file.
    pub file: PathBuf,
    /// The line, from 1, if one is at fault.
    pub line: Option<usize>,
    /// The fault.
    pub message: String,
    /// What to do.
    pub remedy: Option<String>,
    /// It has a key that no job of its kinds has.
    pub unknown_key: bool,
}

impl Job {
    /// Reads a job file and applies `--set` assignments. Relative paths in the file start in its folder, those in assignments
    /// in the working directory.
    pub fn load(path: &Path, set: &[String]) -> Result<Self, JobError> {
        let wrong = |message: String| JobError {
            file: path.to_path_buf(),
            line: None,
            message,
            remedy: Some("give the path of a job file; examples/ has some".into()),
            unknown_key: false,
        };
        let read = || {
            let mut text = String::new();
            let file = std::fs::File::open(path)?;
            std::io::Read::read_to_string(&mut std::io::Read::take(file, MAX_FILE_BYTES + 1), &mut text)?;
            Ok(text)
        };
        let text: String = read().map_err(|e: std::io::Error| wrong(format!("cannot be read: {e}")))?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(wrong(format!("it is longer than {MAX_FILE_BYTES} bytes: that is no job file")));
        }
        Self::parse(&text, path, set)
    }

    /// Like [`Self::load`], for a given text. `path` names it in messages, and the text's relative paths start in its
    /// folder.
    pub fn parse(text: &str, path: &Path, set: &[String]) -> Result<Self, JobError> {
        let error = |line, message: String, remedy: Option<String>| JobError {
            file: path.to_path_buf(),
            line,
            message,
            remedy,
            unknown_key: false,
        };
        let mut table: Table = toml::from_str(text).map_err(|e| {
            let at = e.span().map(|s| place::line_at(text, s.start));
            error(at, e.message().trim().to_string(), None)
        })?;
        for s in set {
            set::apply(&mut table, s).map_err(|e| error(None, e.to_string(), None))?;
        }
        // Without a kind the keys belong to the default one.
        if let Some(toml::Value::Table(optimizer)) =
            table.get_mut("optimizer").filter(|o| o.get("kind").is_none())
        {
            optimizer.insert("kind".into(), "sgd".into());
            optimizer.entry("lr").or_insert(default_optimizer().lr().into());
        }
        let names = tables::names(&table);
        let mut job = job_of(table).map_err(|e| {
            let Problem { key, message, remedy } = explain::explain(e.path(), e.inner(), &names);
            let unknown_key = matches!(e.inner(), Refused::Key { .. });
            let named = tables::named(&key, &names);
            let why = match set.iter().rev().find(|s| set::is_of(s, &key) || set::is_of(s, &named)) {
                Some(s) => error(None, format!("--set {s}: {message}"), remedy),
                None => error(place::nearest(text, &key), message, remedy),
            };
            JobError { unknown_key, ..why }
        })?;
        if job.name.is_empty() {
            job.name = path.file_stem().map_or("job".into(), |s| s.to_string_lossy().into_owned());
        }
        job.base_dir = path.parent().map(Path::to_path_buf).unwrap_or_default();
        job.check().map_err(|Unfit { key, message, remedy }| {
            let named = tables::named(&key, &names);
            let from_set = set.iter().any(|s| set::is_of(s, &key) || set::is_of(s, &named));
            let line = place::line_of(text, &key).filter(|_| !from_set);
            error(line, format!("{}: {message}", tables::shown(&key)), Some(remedy))
        })?;
        Ok(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_common::optim::{OptimizerConfig, Sgd};

    #[test]
    fn keys_of_no_kind_change_the_default_optimizer() {
        let base = "[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n";
        let of =
            |more: &str, set: &[String]| Job::parse(&format!("{base}{more}"), Path::new("job.toml"), set);
        let sgd = |lr, weight_decay| OptimizerConfig::Sgd(Sgd { lr, weight_decay });
        let set = ["optimizer.weight_decay=0.5".to_string()];
        assert_eq!(of("[optimizer]\nlr = 0.25\n", &[]).expect("a rate").optimizer, sgd(0.25, 0.0));
        assert_eq!(of("", &set).expect("no table").optimizer, sgd(0.1, 0.5));
        let other = of("[optimizer]\nbeta1 = 0.9\n", &[]).expect_err("of another kind").to_string();
        assert!(other.contains("optimizer.beta1"), "{other}");
        let wrong = |set: &str| of("", &[set.to_string()]).expect_err("refused").unknown_key;
        assert_eq!((wrong("train.wrokers=1"), wrong("train.workers=0")), (true, false));
    }
}
