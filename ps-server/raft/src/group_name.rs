//! Names of groups.

use std::{fmt, sync::Arc};

/// The name of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupName {
    /// For replicas: unique among the groups of the fleet.
    pub number: u32,
    /// For people.
    pub text: Arc<str>,
    /// Whether a replica that sleeps still watches its leader's process: no request would wake it.
    pub watched: bool,
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
