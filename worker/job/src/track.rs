//! `[track]`: where a run is tracked, in addition to its own record.

use crate::check::{Check, bad};
use serde::{Deserialize, Serialize};

/// `[track]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrackConfig {
    /// An MLflow server, as `http://host:5000`.
    pub mlflow: String,
    /// The run's experiment there; default: the job's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experiment: Option<String>,
}

impl TrackConfig {
    pub(crate) fn check(&self) -> Check {
        let rest = ["http://", "https://"].iter().find_map(|scheme| self.mlflow.strip_prefix(scheme));
        let host = rest.unwrap_or_default().split(['/', '?', '#']).next().unwrap_or_default();
        // It would appear in the run's folder and parameters.
        if host.contains('@') {
            let why = "a user in the address";
            let remedy = "take it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN";
            return bad("track.mlflow", why, remedy);
        }
        if host.is_empty() || self.mlflow.contains(|c: char| c.is_whitespace() || c.is_control()) {
            let why = format!("`{}` is no address of a server", self.mlflow.escape_debug());
            return bad("track.mlflow", why, "write http://host:5000, or https://host");
        }
        let name = self.experiment.as_deref();
        if name.is_some_and(|n| n.trim().is_empty() || n.len() > 250 || n.contains(char::is_control)) {
            let remedy = "use 1 to 250 characters, or take the key out";
            return bad("track.experiment", "this is no name", remedy);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
}
