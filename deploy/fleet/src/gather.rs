//! The bootstrap of a fleet from an engine's tasks. Each task connects to the first task, which waits
//! for all of them, sends each the job, and forwards the servers' addresses.
//!
//! The protocol is lines of JSON over TCP. It runs until the servers know each other, and again at the
//! end, so that no server exits before the last worker. In between no message passes, and the first
//! task may fail: the others continue to train.

use crate::failure::Failure;
use paraft_tls::{Need, access::Expected, blocking::WriteHalf};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io::{self, BufRead, Read, Write},
    path::PathBuf,
    sync::atomic::{AtomicI32, Ordering::Relaxed},
    time::Duration,
};

mod first;
mod meeting;

pub(crate) use first::{First, refuse};
pub(crate) use meeting::{Meeting, Over};

/// How long the first task waits for all tasks: an engine starts tasks when resources are free.
const TASKS_TIMEOUT: Duration = Duration::from_secs(300);

/// An unauthenticated connection may last this long.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximal bytes of a line: the longest contains the job file.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// The certificate that a task must show.
const TASK_CERTIFICATE: Expected = Expected { need: Need::Worker, job: None };

/// A message from a task to the first task.
#[derive(Serialize, Deserialize)]
enum ToFirst {
    Hello {
        id: String,
        rank: u32,
        tasks: u32,
    },
    /// The address of its server.
    Listens(String),
    /// The exit code of its worker; 128 plus the signal after a signal.
    Ended(i32),
}

/// A message from the first task to a task.
#[derive(Serialize, Deserialize)]
enum FromFirst {
    Plan(Plan),
    Servers(Vec<String>),
    /// All workers have ended, or one has failed with this code: the task may end.
    Over(Option<(u32, i32)>),
    Refused(String),
}

/// The plan of the fleet, and the address of one task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub run_dir: PathBuf,
    /// The job file.
    pub job: String,
    pub resume: Option<PathBuf>,
    /// The first tasks, up to this number, run a server.
    pub servers: u32,
    /// A port on the first task's host, for the script's own processes.
    pub port: u16,
    /// The address of this task for other hosts.
    pub host: String,
    /// The fleet already runs: the task rejoins and starts no server. These are its servers.
    pub founded: Vec<String>,
}

/// Fails if the user has interrupted this task.
pub(crate) fn check_interrupted(interrupted: &AtomicI32) -> Result<(), Failure> {
    match interrupted.load(Relaxed) {
        0 => Ok(()),
        number => Err(Failure::new(128 + number, "interrupted; this task has ended")),
    }
}

fn say(mut stream: &WriteHalf, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_string(what)?;
    line.push('\n');
    stream.write_all(line.as_bytes())?;
    stream.flush()
}

/// Messages with a read timeout are short and arrive in one piece.
fn hear<T: DeserializeOwned>(reader: &mut impl BufRead) -> io::Result<T> {
    let mut line = String::new();
    match reader.take(MAX_LINE_BYTES).read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(serde_json::from_str(&line)?),
    }
}
