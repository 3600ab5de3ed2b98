//! Who answers a worker's pulls.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Where pulls may be answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PullFrom {
    /// The shard's leader.
    #[default]
    Leader,
    /// Any replica that has applied what the pull asks for: one on the worker's host, or else the workers spread over all.
    Any,
}

impl PullFrom {
    /// The word in job files and flags.
    pub fn name(self) -> &'static str {
        match self {
            PullFrom::Leader => "leader",
            PullFrom::Any => "any",
        }
    }
}

impl fmt::Display for PullFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no such place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pulls are not answered by `{0}`; write `leader` or `any`")]
pub struct ParsePullFromError(String);

impl FromStr for PullFrom {
    type Err = ParsePullFromError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let all = [PullFrom::Leader, PullFrom::Any];
        all.into_iter().find(|p| p.name() == s).ok_or_else(|| ParsePullFromError(s.to_string()))
    }
}
