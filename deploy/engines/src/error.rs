//! Errors of engines: the failure and the remedy. Other modules map them to exit codes.

use std::fmt;

/// The kind of remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Correct the flags or variables.
    Usage,
    /// The engine is missing or has not answered: retry.
    Unavailable,
    /// The engine has refused: correct its input.
    Refused,
    /// A file cannot be read or written.
    Io,
}

/// An error of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineError {
    /// The kind of remedy.
    pub kind: Kind,
    /// The failure.
    pub why: String,
    /// The remedy for the user.
    pub help: Option<String>,
}

impl EngineError {
    /// An error of this kind.
    pub fn new(kind: Kind, why: impl fmt::Display) -> Self {
        Self { kind, why: why.to_string(), help: None }
    }

    /// Invalid flags or variables.
    pub fn usage(why: impl fmt::Display) -> Self {
        Self::new(Kind::Usage, why)
    }

    /// Adds the remedy for the user.
    pub fn help(mut self, help: impl fmt::Display) -> Self {
        self.help = Some(help.to_string());
        self
    }
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)?;
        self.help.as_ref().map_or(Ok(()), |help| write!(f, " ({help})"))
    }
}

impl std::error::Error for EngineError {}
