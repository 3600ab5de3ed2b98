//! Flags that are short for `--set`, for the keys that change most often.

use clap::Args;
use paraft_fleet::failure::Failure;
use paraft_worker::{exit, job::assigns};
use serde::Serialize;

/// The short flags of commands that train a job file.
#[derive(Args, Clone, Debug)]
pub struct ShortArgs {
    /// Workers: short for --set train.workers=N.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub workers: Option<u32>,
    /// Passes over the training data: short for --set train.epochs=N.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub epochs: Option<u64>,
    /// Names the run: short for --set name=NAME.
    #[arg(long)]
    pub name: Option<String>,
}

impl ShortArgs {
    /// `--set` with these flags.
    ///
    /// # Errors
    /// A flag and an assignment are for the same key.
    pub fn with(&self, set: &[String]) -> Result<Vec<String>, Failure> {
        let name = self.name.as_deref().map(|name| assignment("name", name)).transpose()?;
        let flags = [
            ("--workers", "train.workers", self.workers.map(|n| format!("train.workers={n}"))),
            ("--epochs", "train.epochs", self.epochs.map(|n| format!("train.epochs={n}"))),
            ("--name", "name", name),
        ];
        let mut all = set.to_vec();
        for (flag, key, assignment) in flags {
            let Some(assignment) = assignment else { continue };
            only_once(flag, key, set)?;
            all.push(assignment);
        }
        Ok(all)
    }
}

/// Refuses an assignment of the key that a given flag already sets.
pub fn only_once(flag: &str, key: &str, set: &[String]) -> Result<(), Failure> {
    match set.iter().find(|assignment| assigns(assignment, key)) {
        None => Ok(()),
        Some(assignment) => {
            let why = format!("{flag} and --set {assignment} both set {key}");
            Err(Failure::new(exit::USAGE, why).help("give one of them"))
        }
    }
}

/// `key=["word", ...]` or `key="word"`, as `--set` reads it.
pub fn assignment(key: &str, value: impl Serialize) -> Result<String, Failure> {
    toml(value).map(|value| format!("{key}={value}"))
}

/// A text, or a list of texts, in TOML.
pub fn toml(value: impl Serialize) -> Result<String, Failure> {
    let value = serde_json::to_string(&value).map_err(|e| Failure::new(exit::USAGE, e))?;
    // JSON strings are TOML strings, except for this character.
    Ok(value.replace('\u{7f}', "\\u007f"))
}
