//! A push for each minibatch: nothing lies between two pushes.

use super::LocalRule;
use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EveryStep {}

impl LocalRule for EveryStep {}
