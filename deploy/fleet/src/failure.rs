//! The result of a failed command: an exit code and one message with its remedy.

use paraft_engines::{EngineError, Kind};
use paraft_trace::TraceError;
pub use paraft_worker::exit;
use paraft_worker::{ErrorKind, JobError, WorkerError};
use serde::{Deserialize, Serialize};
use std::{
    fmt::Display,
    fs::{self, OpenOptions},
    io::{self, Write},
    path::Path,
};

/// Why a command failed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Failure {
    code: i32,
    message: String,
    help: Option<String>,
    diverged: bool,
}

impl Failure {
    /// A failure with its exit code (`paraft_worker::exit`).
    pub fn new(code: i32, message: impl Display) -> Self {
        Self { code, message: message.to_string(), help: None, diverged: false }
    }

    /// Adds the remedy.
    pub fn help(mut self, help: impl Display) -> Self {
        self.help = Some(help.to_string());
        self
    }

    /// Adds one more remedy, on a line of its own.
    pub fn more_help(mut self, help: impl Display) -> Self {
        self.help = Some(match self.help {
            Some(before) => format!("{before}\n  help: {help}"),
            None => help.to_string(),
        });
        self
    }

    /// The failure of a worker with this output, which is not added to the message. Only the output of a
    /// worker tells whether training has diverged: exit codes are for schedulers, which need no reason.
    pub fn of_output(self, output: &str) -> Self {
        let words = ["training has diverged", "holds a NaN or an infinity"];
        let diverged = self.code == exit::FAILED && words.iter().any(|w| output.contains(w));
        Self { diverged, ..self }
    }

    /// The loss or a gradient became NaN or infinite.
    pub fn not_finite(self) -> Self {
        Self { diverged: true, ..self }
    }

    /// The exit code.
    pub fn code(&self) -> i32 {
        self.code
    }

    /// The message, without the remedy.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether training failed because the loss or a gradient became NaN or infinite.
    pub fn diverged(&self) -> bool {
        self.diverged
    }

    /// Hands the failure to the process that has made this file and waits for this process. Without the
    /// file no process waits.
    pub fn hand_over(&self, file: &Path) -> io::Result<()> {
        match OpenOptions::new().write(true).open(file) {
            Ok(mut file) => file.write_all(serde_json::to_string(self)?.as_bytes()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// The failure that an ended process has handed over in this file, if it has.
    pub fn handed_over(file: &Path) -> Option<Self> {
        serde_json::from_str(&fs::read_to_string(file).ok()?).ok()
    }

    /// A file or folder that cannot be written.
    pub fn write(path: &Path, e: impl Display) -> Self {
        Self::new(exit::IO, format!("{}: {e}", path.display())).help("choose another folder with --run-dir")
    }
}

impl From<TraceError> for Failure {
    fn from(e: TraceError) -> Self {
        let code = match &e {
            TraceError::Io(..) => exit::IO,
            TraceError::Malformed { .. } | TraceError::Empty(_) => exit::DATA,
        };
        Self::new(code, e)
    }
}

impl From<JobError> for Failure {
    fn from(e: JobError) -> Self {
        Self::new(exit::CONFIG, e)
    }
}

impl From<EngineError> for Failure {
    fn from(e: EngineError) -> Self {
        let code = match e.kind {
            Kind::Usage => exit::USAGE,
            Kind::Unavailable => exit::UNAVAILABLE,
            Kind::Refused => exit::CONFIG,
            Kind::Io => exit::IO,
        };
        Self { help: e.help, ..Self::new(code, e.why) }
    }
}

impl From<WorkerError> for Failure {
    fn from(e: WorkerError) -> Self {
        let diverged = e.kind() == ErrorKind::Diverged;
        Self { diverged, ..Self::new(e.exit_code(), e) }
    }
}

impl From<paraft_checkpoint::CheckpointError> for Failure {
    fn from(e: paraft_checkpoint::CheckpointError) -> Self {
        WorkerError::from(e).into()
    }
}

impl From<paraft_record::RecordError> for Failure {
    fn from(e: paraft_record::RecordError) -> Self {
        Self::new(exit::IO, e)
    }
}

/// Prints a failure to standard error; returns the exit code.
pub fn report(result: Result<i32, Failure>) -> i32 {
    match result {
        Ok(code) => code,
        Err(f) => {
            // The reader may be gone (`2>&1 | head`): the exit code still reports the failure.
            let mut said = io::stderr();
            if !f.message.is_empty() {
                let _ = writeln!(said, "error: {}", f.message);
            }
            if let Some(help) = f.help {
                let _ = writeln!(said, "  help: {help}");
            }
            f.code
        }
    }
}
