//! Tests of `track`.

use crate::Job;
use std::path::Path;

fn parse(track: &str) -> Result<Job, String> {
    let text =
        format!("[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"digits\"\n[track]\n{track}\n");
    Job::parse(&text, Path::new("job.toml"), &[]).map_err(|e| e.to_string())
}

#[test]
fn it_is_an_address_and_perhaps_an_experiment() {
    for good in [
        "mlflow = \"http://localhost:5000\"",
        "mlflow = \"https://mlflow.example.org/team\"\nexperiment = \"Läufe\"",
    ] {
        let job = parse(good).expect(good);
        let again = Job::parse(&job.to_toml(), Path::new("job.toml"), &[]).expect("as it was written");
        assert_eq!(again.track, job.track);
    }
}

#[test]
fn what_is_no_server_is_refused_and_so_is_a_password() {
    for (track, words) in [
        ("experiment = \"x\"", "missing field `mlflow`"),
        ("mlflow = \"localhost:5000\"", "job.toml:7: track.mlflow: `localhost:5000` is no address"),
        ("mlflow = \"http://\"", "is no address"),
        ("mlflow = \"http://a b\"", "is no address"),
        ("mlflow = \"file:///tmp\"", "write http://host:5000"),
        ("mlflow = \"http://me:secret@host\"", "MLFLOW_TRACKING_USERNAME"),
        ("mlflow = \"http://host\"\nexperiment = \" \"", "track.experiment"),
        ("mlflow = \"http://host\"\nwandb = \"x\"", "unknown key `wandb`; [track] takes `mlflow`"),
    ] {
        let said = parse(track).expect_err(track);
        assert!(said.contains(words), "{said}\n{words}");
        assert!(!said.contains("secret"), "{said}");
    }
}
