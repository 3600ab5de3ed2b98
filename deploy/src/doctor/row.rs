//! A row of what `doctor` says.

#[derive(Clone, Copy, PartialEq)]
pub enum Verdict {
    Ok,
    /// It is not there, and need not be.
    Absent,
    Warn,
    Fail,
}

pub struct Row {
    pub what: String,
    pub verdict: Verdict,
    pub found: String,
    pub means: String,
}

pub fn row(what: impl ToString, verdict: Verdict, found: impl ToString, means: impl ToString) -> Row {
    Row { what: what.to_string(), verdict, found: found.to_string(), means: means.to_string() }
}
