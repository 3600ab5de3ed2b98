//! Tests of `paths`.

use super::*;
use crate::{Job, keys, refused::Refused};
use paraft_common::kind::KIND;
use toml::Table;

/// Whether a key of the job takes a path, according to the type that reads it. serde says so only in words.
fn takes_a_path(key: &str) -> bool {
    let parts: Vec<String> = key.split('.').map(str::to_string).collect();
    let [above @ .., last] = parts.as_slice() else { return false };
    let kinds: Vec<Option<&str>> = match keys::probe(above, None, KIND) {
        Some(Refused::Word { of, .. }) => of.iter().map(|kind| Some(*kind)).collect(),
        _ => vec![None],
    };
    kinds.into_iter().any(|kind| {
        // The kind first: behind other keys it is read through a buffer, which has words of its own.
        let kind = kind.map(|k| (KIND.to_string(), Value::String(k.into())));
        let mut table = Table::from_iter(kind.into_iter().chain([(last.clone(), Value::Boolean(true))]));
        for part in above.iter().rev() {
            table = Table::from_iter([(part.clone(), Value::Table(table))]);
        }
        let refused = Value::Table(table).try_into::<Job>().err();
        refused.is_some_and(|e| e.message().contains("expected path string"))
    })
}

#[test]
fn the_path_keys_are_all_keys_that_take_a_path() {
    let mut found: Vec<String> = keys::known(&[]).into_iter().filter(|key| takes_a_path(key)).collect();
    found.sort();
    assert_eq!(found, PATHS);
}

#[test]
fn a_set_path_is_the_shells_and_a_path_in_the_file_the_files() {
    let text = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"csv\"\npath = \"rows.csv\"\n[cluster]\nworker_command = [\"./own\"]\n";
    let set = ["data.test_path=held.csv", "checkpoint={ dir = \"kept\" }", "train.init=job:first"];
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    let job = Job::parse(text, Path::new("jobs/job.toml"), &set).expect("a job");
    let here = std::env::current_dir().expect("a working directory");
    let data = toml::Value::try_from(&job.data).expect("a table");
    assert_eq!(data["path"].as_str(), Some("rows.csv"));
    assert_eq!(data["test_path"].as_str(), here.join("held.csv").to_str());
    assert_eq!(job.checkpoint.and_then(|c| c.dir), Some(here.join("kept")));
    assert_eq!(job.train.init.as_deref(), Some(Path::new("job:first")));
    assert_eq!(job.cluster.worker_command, ["./own"]);
}

#[test]
fn a_set_command_has_the_shells_program_and_script() {
    let set = ["cluster.script=[\"./run.sh\", \"Cargo.toml\", \"Cargo.toml\"]".to_string()];
    let job = Job::parse("", Path::new("jobs/job.toml"), &set).expect("a job");
    let here = std::env::current_dir().expect("a working directory");
    let whole = |name: &str| here.join(name).to_string_lossy().into_owned();
    assert_eq!(job.cluster.script, [whole("run.sh"), whole("Cargo.toml"), "Cargo.toml".into()]);
    let set = ["cluster.script=[\"python3\", \"-m\"]".to_string()];
    let job = Job::parse("", Path::new("jobs/job.toml"), &set).expect("a job");
    assert_eq!(job.cluster.script, ["python3", "-m"]);
}

#[test]
fn a_path_is_rebased_unless_it_is_absolute() {
    let mut values = [Value::from("a.csv"), Value::from("/b.csv"), Value::from("")];
    for value in &mut values {
        rebase("data.path", value, Path::new("/data")).expect("a text");
    }
    assert_eq!(values, [Value::from("/data/a.csv"), Value::from("/b.csv"), Value::from("")]);
    let mut other = Value::from("mlp");
    rebase("model.kind", &mut other, Path::new("/data")).expect("a text");
    assert_eq!(other.as_str(), Some("mlp"));
}
