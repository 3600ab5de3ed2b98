//! Converts a table to a job, with structured errors.
//!
//! serde reports errors through a type of the reader's choice. [`Refused`] keeps their parts, so that no code has
//! to parse messages.

use crate::Job;
use paraft_common::kind::Tree;
use serde::de::{Expected, Unexpected};
use std::fmt::Display;
use toml::{Table, Value};

/// Why serde refuses a value.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    /// The table accepts only other keys.
    #[error("unknown key `{key}`; it takes {}", list(takes))]
    Key { key: String, takes: &'static [&'static str] },
    /// The key accepts only other words.
    #[error("`{word}` is none of {}", list(of))]
    Word { word: String, of: &'static [&'static str] },
    /// The table needs this key.
    #[error("missing field `{key}`")]
    Missing { key: &'static str },
    /// The value has another type, or is out of range.
    #[error("{is}, where {wanted} is expected")]
    Value { is: String, wanted: String },
    /// The type's own message.
    #[error("{0}")]
    Other(String),
}

impl serde::de::Error for Refused {
    fn custom<T: Display>(message: T) -> Self {
        Self::Other(message.to_string())
    }

    fn invalid_type(is: Unexpected<'_>, wanted: &dyn Expected) -> Self {
        Self::Value { is: is.to_string(), wanted: wanted.to_string() }
    }

    fn invalid_value(is: Unexpected<'_>, wanted: &dyn Expected) -> Self {
        Self::Value { is: is.to_string(), wanted: wanted.to_string() }
    }

    fn unknown_variant(word: &str, of: &'static [&'static str]) -> Self {
        Self::Word { word: word.into(), of }
    }

    fn unknown_field(key: &str, takes: &'static [&'static str]) -> Self {
        Self::Key { key: key.into(), takes }
    }

    fn duplicate_field(key: &'static str) -> Self {
        Self::Other(format!("`{key}` is there twice"))
    }

    fn missing_field(key: &'static str) -> Self {
        Self::Missing { key }
    }
}

/// Deserializes a job's table. An error has the path of the fault.
pub(crate) fn job_of(table: Table) -> Result<Job, serde_path_to_error::Error<Refused>> {
    serde_path_to_error::deserialize(Tree::of(&Value::Table(table)))
}

/// A list of words in backquotes.
pub(crate) fn list(words: &[&str]) -> String {
    words.iter().map(|w| format!("`{w}`")).collect::<Vec<_>>().join(", ")
}
