//! The audit log: every administrative request to this server, its caller, and its outcome. One line of JSON
//! each, in `audit.jsonl` of the data folder; no code reads it.

use crate::{connections::Visitor, files::DataFile};
use paraft_store::{Access, Disk, DiskFile};
use parking_lot::Mutex;
use serde::Serialize;
use std::{
    io::{self, IoSlice},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Maximum characters of a line about a refused request, and maximum number of those lines per second.
const MAX_REFUSAL_CHARS: usize = 300;
const MAX_REFUSALS_PER_SECOND: u32 = 20;

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

/// The open file. After a partly written line, the next one starts a new line.
struct Lines {
    file: Box<dyn DiskFile>,
    end: u64,
}

impl Lines {
    fn open(disk: &dyn Disk, path: &Path) -> io::Result<Self> {
        let file = disk.open(path, Access::Append)?;
        let end = file.size()?;
        let mut lines = Self { file, end };
        let mut last = [b'\n'];
        if end > 0 {
            lines.file.read_at(end - 1, &mut last)?;
        }
        if last != [b'\n'] {
            lines.write("")?;
        }
        Ok(lines)
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        self.file.write_at(self.end, &mut [IoSlice::new(line.as_bytes()), IoSlice::new(b"\n")])?;
        self.end += line.len() as u64 + 1;
        Ok(())
    }
}

/// The audit log. See the module.
pub struct Audit {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    file: Mutex<Option<Lines>>,
    /// Start of the current second, and the number of refused requests in it.
    refused: Mutex<(Instant, u32)>,
}

impl Audit {
    /// The audit log of a data folder.
    pub fn of(disk: Arc<dyn Disk>, data: &Path) -> Self {
        let path = data.join(DataFile::Audit.name());
        Self { disk, path, file: Mutex::default(), refused: Mutex::new((Instant::now(), 0)) }
    }

    /// Records a request; `why_not`: it was refused.
    pub fn note(&self, by: &Visitor, act: impl AsRef<str>, why_not: Option<&str>) {
        let short = |text: &str| {
            text.chars().take(MAX_REFUSAL_CHARS).collect::<String>().replace(char::is_control, "?")
        };
        let (act, why_not) = (short(act.as_ref()), why_not.map(short));
        let (act, why_not) = (act.as_str(), why_not.as_deref());
        // Refused requests may arrive without end.
        if why_not.is_some() {
            let mut refused = self.refused.lock();
            if refused.0.elapsed() >= Duration::from_secs(1) {
                *refused = (Instant::now(), 0);
            }
            refused.1 += 1;
            if refused.1 > MAX_REFUSALS_PER_SECOND {
                return;
            }
        }
        let (who, from) = (by.rights().to_string(), by.origin().to_string());
        tracing::info!(who, from, act, why_not, "asked for");
        let unix_ms = paraft_host::clock::unix_ms();
        let line = Act { unix_ms, who, from, act, done: why_not.is_none(), why_not };
        let Ok(line) = serde_json::to_string(&line) else { return };
        let mut file = self.file.lock();
        let written = match &mut *file {
            Some(open) => open.write(&line),
            none => Lines::open(&*self.disk, &self.path).and_then(|open| none.insert(open).write(&line)),
        };
        if let Err(error) = written {
            self.fails(&error);
            *file = None; // opened again for the next act
        }
    }

    /// The request itself continues: a full disk must not prevent an operator from draining its server. The
    /// line is in the log, too.
    fn fails(&self, error: &std::io::Error) {
        tracing::error!(path = %self.path.display(), %error, "the audit log cannot be written");
    }
}
