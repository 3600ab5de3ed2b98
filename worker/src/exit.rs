//! Exit codes, one table for every binary (docs/configuration.md). For schedulers a code means either "a retry may
//! succeed" or "a retry never succeeds".

/// Done.
pub const OK: i32 = 0;
/// Training failed: a NaN, a process that died. Worth a retry.
pub const FAILED: i32 = 1;
/// Wrong flags (clap's own code). Never retry.
pub const USAGE: i32 = 2;
/// Bad data. Never retry.
pub const DATA: i32 = 65;
/// No leader was reached in time. Worth a retry.
pub const UNAVAILABLE: i32 = 69;
/// A file could not be written.
pub const IO: i32 = 74;
/// A proof that does not count: too few pushes, or too few steps to learn anything. Worth a retry on a quieter
/// machine, or with more steps.
pub const DOES_NOT_COUNT: i32 = 75;
/// Bad job file, or servers that refuse the job. Never retry.
pub const CONFIG: i32 = 78;
/// SIGINT.
pub const INTERRUPTED: i32 = 130;
/// SIGTERM, or the launcher is gone.
pub const TERMINATED: i32 = 143;

/// What a code means that its process may have had no way to explain: a full disk keeps the message, too.
pub fn meaning(code: i32) -> Option<&'static str> {
    match code {
        DATA => Some("bad data"),
        UNAVAILABLE => Some("no leader was reached in time"),
        IO => Some("a file could not be written; is its disk full?"),
        CONFIG => Some("a bad job file, or servers refuse the job"),
        _ => None,
    }
}

/// Whether a restart of the same process may succeed, as the code tells engines.
pub fn may_restart(code: i32) -> bool {
    matches!(code, UNAVAILABLE | IO) || code >= 128
}
