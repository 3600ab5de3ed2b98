//! Why something about an engine can't be: what failed, and what the user can do. Exit codes are made of it elsewhere.

use std::fmt;

/// What can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Flags or variables: mend them.
    Usage,
    /// The engine isn't there, or has not answered: try again.
    Unavailable,
    /// The engine has refused: mend what it was given.
    Refused,
    /// A file.
    Io,
}

/// Why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineError {
    /// What can be done about it, roughly.
    pub kind: Kind,
    /// What failed.
    pub why: String,
    /// What the user can do.
    pub help: Option<String>,
}

impl EngineError {
    /// What failed.
    pub fn new(kind: Kind, why: impl fmt::Display) -> Self {
        Self { kind, why: why.to_string(), help: None }
    }

    /// Wrong flags or variables.
    pub fn usage(why: impl fmt::Display) -> Self {
        Self::new(Kind::Usage, why)
    }

    /// With what the user can do.
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
