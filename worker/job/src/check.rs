//! The result of a section's check.

use std::borrow::Cow;

/// Why a job is invalid: the key, the fault, what to do.
pub(crate) struct Unfit {
    pub key: Cow<'static, str>,
    pub message: String,
    pub remedy: String,
}

/// What a check returns.
pub(crate) type Check = Result<(), Unfit>;

/// A key that is wrong.
pub(crate) fn bad(key: impl Into<Cow<'static, str>>, message: impl Into<String>, remedy: &str) -> Check {
    Err(Unfit { key: key.into(), message: message.into(), remedy: remedy.into() })
}
