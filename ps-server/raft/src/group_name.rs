//! Names of groups.

use std::{fmt, sync::Arc};

/// The name of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupName {
    /// For replicas: unique among the groups of the fleet.
    pub number: u32,
    /// For people.
    pub text: Arc<str>,
    /// Whether it may sleep: its requests wake it.
    pub may_sleep: bool,
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
