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
#[path = "track_tests.rs"]
mod tests;
