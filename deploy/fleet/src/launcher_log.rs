//! What a launcher notes of its run: a log in the run's folder, beside those of the servers and workers.

use paraft_host::logs;
use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::Path,
};
use tracing::{Dispatch, dispatcher::with_default};

/// The file. `paraft submit` makes it the standard error of its launcher.
pub const LAUNCHER_LOG: &str = "launcher.log";

/// The log of one run. By default it writes nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct LauncherLog(Option<Dispatch>);

impl LauncherLog {
    /// Appends to the file in this folder, unless standard error goes there, which has the same lines.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join(LAUNCHER_LOG);
        Ok(Self(if is_stderr(&path) { None } else { Some(logs::in_file(&path)?) }))
    }

    pub(crate) fn info(&self, line: &str) {
        self.write(|| tracing::info!("{line}"));
    }

    pub(crate) fn warn(&self, line: &str) {
        self.write(|| tracing::warn!("{line}"));
    }

    pub(crate) fn error(&self, line: &str) {
        self.write(|| tracing::error!("{line}"));
    }

    fn write(&self, line: impl FnOnce()) {
        if let Some(log) = &self.0 {
            with_default(log, line);
        }
    }
}

fn is_stderr(path: &Path) -> bool {
    let stderr = io::stderr().as_fd().try_clone_to_owned().and_then(|fd| File::from(fd).metadata());
    let Ok((stderr, file)) = stderr.and_then(|stderr| Ok((stderr, fs::metadata(path)?))) else {
        return false;
    };
    (stderr.dev(), stderr.ino()) == (file.dev(), file.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_each_level_are_appended_once() {
        let scratch = tempfile::tempdir().expect("scratch");
        for line in ["first", "second"] {
            let log = LauncherLog::open(scratch.path()).expect("a log");
            log.info(line);
            log.warn("server-0 was ended");
            log.warn("server-0 was ended");
            log.error("it failed");
        }
        LauncherLog::default().info("nowhere");
        let text = fs::read_to_string(scratch.path().join(LAUNCHER_LOG)).expect("a log");
        for (words, times) in [
            ("\"message\":\"first\"", 1),
            ("\"level\":\"INFO\"", 2),
            ("\"message\":\"server-0 was ended\"", 2),
            ("\"level\":\"ERROR\"", 2),
            ("nowhere", 0),
        ] {
            assert_eq!(text.matches(words).count(), times, "{words}: {text}");
        }
    }
}
