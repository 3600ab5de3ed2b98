//! What job files and commands name: a mode, or the rule that chooses one.

use super::AutoConfig;
use crate::consistency::Mode;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A text that names neither a mode nor the rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no consistency mode; write `bsp`, `ssp:S` with S from 0 to 1000000, `asp`, or `auto`")]
pub struct ParseChoiceError(String);

/// A mode, or the rule that chooses one: what job files and commands name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModeChoice {
    /// This one.
    Fixed(Mode),
    /// The rule's: [`crate::auto`].
    Auto,
}

impl ModeChoice {
    /// The mode that a job begins with.
    pub fn first(self, rule: &AutoConfig) -> Mode {
        match self {
            Self::Fixed(mode) => mode,
            Self::Auto => rule.first(),
        }
    }
}

impl From<Mode> for ModeChoice {
    fn from(mode: Mode) -> Self {
        Self::Fixed(mode)
    }
}

impl fmt::Display for ModeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(mode) => mode.fmt(f),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for ModeChoice {
    type Err = ParseChoiceError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        if s == "auto" {
            Ok(Self::Auto)
        } else {
            s.parse().map(Self::Fixed).map_err(|_| ParseChoiceError(s.into()))
        }
    }
}

impl Serialize for ModeChoice {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ModeChoice {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_back_what_they_print() {
        for s in ["auto", "bsp", "ssp:3", "asp"] {
            assert_eq!(s.parse::<ModeChoice>().unwrap().to_string(), s);
        }
    }
}
