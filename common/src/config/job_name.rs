//! The rule for names of jobs, and for patterns of names.

/// The longest name of a job.
pub const MAX_NAME_CHARS: usize = 128;

/// Checks the name of a job. The name is part of paths, labels, certificate roles (`worker:NAME`,
/// `worker:PREFIX*`), flags and logs, so it contains no character that is special there. Every prefix
/// of a valid name is valid.
///
/// # Errors
///
/// The rule that the name breaks, for people.
pub fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let shown: String = name.chars().take(MAX_NAME_CHARS).collect();
    let wrong = match name.chars().next() {
        None => "is empty".to_string(),
        Some(first @ ('.' | '-')) => format!("begins with `{first}`"),
        _ => match (name.chars().find(|c| !fits(*c)), name.len()) {
            (Some(c), _) => format!("has {c:?}"),
            (None, long) if long > MAX_NAME_CHARS => format!("has {long} characters"),
            _ => return Ok(()),
        },
    };
    Err(format!(
        "`{}` cannot be a job's name: it {wrong}. A name has 1 to {MAX_NAME_CHARS} letters, digits, `.`, `_` and `-`, and begins \
         with neither `.` nor `-`",
        shown.escape_debug()
    ))
}

/// Checks a job pattern of a certificate: a name, a prefix with `*` behind it, or `*`.
///
/// # Errors
///
/// The allowed patterns, for people.
pub fn check_names(pattern: &str) -> Result<(), String> {
    let beginning = pattern.strip_suffix('*');
    match beginning.unwrap_or(pattern) {
        "" if beginning.is_some() => Ok(()),
        name => check_name(name)
            .map_err(|why| format!("{why}; behind a beginning of names stands one `*` (alice-*)")),
    }
}

#[cfg(test)]
#[path = "job_name_tests.rs"]
mod tests;
