//! The audit log: every administrative act that this server was asked for, by whom, and what became of it. One line of JSON each, in
//! `audit.jsonl` of the data folder; nothing reads it back.

use crate::connections::Visitor;
use parking_lot::Mutex;
use serde::Serialize;
use std::{
    fs::File,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Its name in the data folder.
pub const FILE: &str = "audit.jsonl";

/// Of an act that was not done so much is written, and so many of them in a second.
const MOST_CHARS: usize = 300;
const REFUSED_A_SECOND: u32 = 20;

#[derive(Serialize)]
struct Act<'a> {
    unix_ms: u64,
    who: String,
    from: String,
    act: &'a str,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<&'a str>,
}

/// See the module.
pub struct Audit {
    path: PathBuf,
    file: Mutex<Option<File>>,
    /// Since when, how many that were not done.
    refused: Mutex<(Instant, u32)>,
}

impl Audit {
    /// That of a data folder.
    pub fn of(data: &Path) -> Self {
        Self { path: data.join(FILE), file: Mutex::default(), refused: Mutex::new((Instant::now(), 0)) }
    }

    /// Somebody asked for something; `why_not`: it was not done.
    pub fn note(&self, by: &Visitor, act: impl AsRef<str>, why_not: Option<&str>) {
        let short =
            |text: &str| text.chars().take(MOST_CHARS).collect::<String>().replace(char::is_control, "?");
        let (act, why_not) = (short(act.as_ref()), why_not.map(short));
        let (act, why_not) = (act.as_str(), why_not.as_deref());
        // What is not done may be asked for without end.
        if why_not.is_some() {
            let mut refused = self.refused.lock();
            if refused.0.elapsed() >= Duration::from_secs(1) {
                *refused = (Instant::now(), 0);
            }
            refused.1 += 1;
            if refused.1 > REFUSED_A_SECOND {
                return;
            }
        }
        let (who, from) = (by.rights().to_string(), by.origin().to_string());
        tracing::info!(who, from, act, why_not, "asked for");
        let unix_ms = paraft_host::clock::unix_ms();
        let line = Act { unix_ms, who, from, act, done: why_not.is_none(), why_not };
        let Ok(line) = serde_json::to_string(&line) else { return };
        let mut file = self.file.lock();
        if file.is_none() {
            let open = File::options().append(true).create(true).mode(0o600).open(&self.path);
            *file = open.map_err(|error| self.fails(&error)).ok();
        }
        if let Some(open) = &mut *file
            && let Err(error) = writeln!(open, "{line}")
        {
            self.fails(&error);
            *file = None;
        }
    }

    /// What was asked for goes on: a full disk must not keep an operator from draining its server. The line is in the log too.
    fn fails(&self, error: &std::io::Error) {
        tracing::error!(path = %self.path.display(), %error, "the audit log cannot be written");
    }
}
