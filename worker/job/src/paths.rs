//! The keys of a job whose values are paths, and where relative ones start.
//!
//! In a job file that is the file's folder ([`Job::base_dir`](crate::Job)), on the command line the working directory of the
//! shell. A path of the command line is therefore absolute before it enters the job's table.

use paraft_common::config::OF_JOB;
use std::path::Path;
use toml::Value;

/// Keys that name a file or a folder.
pub(crate) const PATHS: [&str; 4] = ["checkpoint.dir", "data.path", "data.test_path", INIT];

/// May also name a job of the fleet.
const INIT: &str = "train.init";

/// Keys that are a command: a first word with a slash is a path.
const COMMANDS: [&str; 2] = ["cluster.worker_command", SCRIPT];

/// Its second word is a path too, if it is a file.
const SCRIPT: &str = "cluster.script";

/// Makes the paths in a value absolute; relative ones start in the working directory. `key` are the parts of the value's
/// key, which may also be a table that contains path keys.
///
/// # Errors
/// The working directory is unknown, or no text; for users.
pub(crate) fn from_shell(key: &[&str], value: &mut Value) -> Result<(), String> {
    each(key, value, &|path| {
        std::path::absolute(path)
            .map_err(|e| format!("the working directory is unknown ({e}); give an absolute path"))?
            .into_os_string()
            .into_string()
            .map_err(|_| "the name of the working directory is not UTF-8; give an absolute path".into())
    })
}

/// Makes the paths in the value of a dotted key absolute; relative ones start in this folder.
///
/// # Errors
/// The folder's name is no text; for users.
pub fn rebase(key: &str, value: &mut Value, folder: &Path) -> Result<(), String> {
    let key: Vec<&str> = key.split('.').collect();
    each(&key, value, &|path| {
        let whole = folder.join(path).into_os_string().into_string();
        whole.map_err(|_| format!("the name of {} is not UTF-8", folder.display()))
    })
}

/// Replaces each relative path in the value of this key by what `whole` makes of it.
fn each(
    key: &[&str],
    value: &mut Value,
    whole: &dyn Fn(&str) -> Result<String, String>,
) -> Result<(), String> {
    let is_relative = |path: &str| !path.is_empty() && Path::new(path).is_relative();
    for name in PATHS {
        if let Some(Value::String(path)) = within(name, key, value)
            && is_relative(path)
            && (name != INIT || !path.starts_with(OF_JOB))
        {
            *path = whole(path)?;
        }
    }
    for name in COMMANDS {
        let Some(Value::Array(words)) = within(name, key, value) else { continue };
        if let Some(Value::String(program)) = words.first_mut()
            && program.contains('/')
            && is_relative(program)
        {
            *program = whole(program)?;
        }
        if name == SCRIPT
            && let Some(Value::String(word)) = words.get_mut(1)
            && is_relative(word)
        {
            let file = whole(word)?;
            if Path::new(&file).is_file() {
                *word = file;
            }
        }
    }
    Ok(())
}

/// The value of the key `name` in the value of `key`, if `key` is that key or contains it.
fn within<'v>(name: &str, key: &[&str], value: &'v mut Value) -> Option<&'v mut Value> {
    let parts: Vec<&str> = name.split('.').collect();
    let mut at = value;
    for part in parts.strip_prefix(key)? {
        at = at.as_table_mut()?.get_mut(*part)?;
    }
    Some(at)
}

#[cfg(test)]
#[path = "paths_tests.rs"]
mod tests;
