//! A user's script as a worker: its command, its checks, and its environment variables.
//!
//! The variables are torchrun's, for other packages of the script, and Paraft's own (docs/launch.md
//! lists both), so the script keeps its arguments. [`crate::process`] runs it.

use crate::failure::Failure;
use paraft_engines::Place;
use paraft_worker::{Job, exit};
use std::{
    ffi::OsString,
    fs, io,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

/// The location of a run's workers.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    /// The host of worker 0, and a free port there for the script's own processes.
    master: (String, u16),
    /// Threads of each worker, if the user has not set them.
    threads: usize,
    /// The engine's task of this worker; `None`: all workers are on this machine.
    place: Option<Place>,
}

impl Rendezvous {
    /// For a run with this many workers on this machine.
    pub fn new(workers: u32) -> io::Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        Ok(Self { master: ("127.0.0.1".into(), port), threads: threads(workers), place: None })
    }

    /// For the worker of this task.
    pub fn of(place: &Place, master: (String, u16)) -> Self {
        Self { master, threads: threads(place.local_tasks), place: Some(place.clone()) }
    }
}

/// An equal share of the processors.
fn threads(workers: u32) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / workers.max(1) as usize).max(1)
}

/// Freed memory that a script's process keeps for its next step: up to this size per block and in
/// total.
const MAX_ARENA_BYTES: &str = "1073741824";

/// Variables that only some runs set: those of an outer run must not leak in.
const OPTIONAL_VARIABLES: [&str; 3] = ["PARAFT_RESUME", "PARAFT_TRACE", "PARAFT_SLOW"];

/// The script's command with the place of this rank; `own` are Paraft's variables that only some runs
/// have.
pub fn command(
    job: &Job,
    rank: u32,
    at: &Rendezvous,
    own: impl IntoIterator<Item = (&'static str, OsString)>,
) -> Command {
    let mut words = job.cluster.script.iter();
    let mut command = Command::new(words.next().map_or("", String::as_str));
    command.args(words);
    OPTIONAL_VARIABLES.iter().for_each(|name| _ = command.env_remove(name));
    let (workers, place) = (job.ranks(), at.place.as_ref());
    let [rank, local_rank, host, workers, local_workers, hosts, port] = [
        rank,
        place.map_or(rank, |p| p.local_rank),
        place.map_or(0, |p| p.host),
        workers,
        place.map_or(workers, |p| p.local_tasks),
        place.map_or(1, |p| p.hosts),
        u32::from(at.master.1),
    ]
    .map(|n| n.to_string());
    for (name, value) in [
        ("PARAFT_RANK", &*rank),
        ("PARAFT_WORKERS", &workers),
        ("RANK", &rank),
        ("LOCAL_RANK", &local_rank),
        ("ROLE_RANK", &rank),
        ("WORLD_SIZE", &workers),
        ("LOCAL_WORLD_SIZE", &local_workers),
        ("ROLE_WORLD_SIZE", &workers),
        ("GROUP_RANK", &host),
        ("GROUP_WORLD_SIZE", &hosts),
        ("MASTER_ADDR", &at.master.0),
        ("MASTER_PORT", &port),
        ("TORCHELASTIC_RUN_ID", place.map_or(&job.name, |p| &p.id)),
        // Its output is forwarded without buffering.
        ("PYTHONUNBUFFERED", "1"),
    ] {
        command.env(name, value);
    }
    let threads = at.threads.to_string();
    // glibc returns a large activation's memory to the kernel when it is freed, and the next step would
    // map and zero it again, page by page.
    for (name, value) in [
        ("OMP_NUM_THREADS", &*threads),
        ("MALLOC_MMAP_THRESHOLD_", MAX_ARENA_BYTES),
        ("MALLOC_TRIM_THRESHOLD_", MAX_ARENA_BYTES),
    ] {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    command.envs(own);
    command
}

/// The name for people: the script's file, the module, or the program.
pub fn name(words: &[String]) -> String {
    let file = |word: &String| Path::new(word).file_name().map(|f| f.to_string_lossy().into_owned());
    let [program, rest @ ..] = words else { return "script".into() };
    // `python3 train.py` is train.py; `./run.sh config.toml` is run.sh.
    let runs_another = !program.contains('/') || file(program).is_some_and(|f| f.starts_with("python"));
    let named = match rest {
        [flag, module, ..] if runs_another && flag == "-m" => Some(module.clone()),
        [script, ..] if runs_another && !script.starts_with('-') => file(script),
        _ => None,
    };
    named.or_else(|| file(program)).unwrap_or_else(|| program.clone())
}

/// Makes its paths absolute: a program with a slash, and a second word that is a file, are relative to
/// the job file's folder.
pub fn absolute(words: &mut [String], base: &Path) {
    let whole = |word: &mut String| *word = base.join(&*word).to_string_lossy().into_owned();
    if let Some(program) = words.first_mut().filter(|p| p.contains('/')) {
        whole(program);
    }
    if let Some(file) = words.get_mut(1).filter(|f| base.join(&**f).is_file()) {
        whole(file);
    }
}

/// Checks it before anything starts.
pub fn check(words: &[String]) -> Result<(), Failure> {
    let wrong = |why: String| Failure::new(exit::CONFIG, why);
    let [program, rest @ ..] = words else { return Ok(()) };
    let found = match program.contains('/') {
        true => Some(PathBuf::from(program)),
        false => on_path(program),
    };
    let Some(found) = found else {
        let help = match Path::new(program).is_file() {
            true => format!("it is in this folder: write ./{program}"),
            false => "say which Python with --python, or install it".into(),
        };
        return Err(wrong(format!("there is no `{program}` on the PATH")).help(help));
    };
    match fs::metadata(&found) {
        Err(e) => return Err(wrong(format!("`{}` cannot be started: {e}", found.display()))),
        Ok(m) if m.is_dir() => return Err(wrong(format!("`{}` is a folder", found.display()))),
        Ok(m) if m.permissions().mode() & 0o111 == 0 => {
            return Err(wrong(format!("`{}` is not executable", found.display()))
                .help("make it so (chmod +x), or name the program that runs it before it"));
        }
        Ok(_) => {}
    }
    match rest.first() {
        Some(script) if script.ends_with(".py") => match fs::File::open(script) {
            Ok(_) => Ok(()),
            Err(e) => Err(wrong(format!("`{script}` cannot be read: {e}"))),
        },
        _ => Ok(()),
    }
}

/// The executable of this name in the PATH.
fn on_path(program: &str) -> Option<PathBuf> {
    let starts = |p: &PathBuf| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(program)).find(starts)
}

#[cfg(test)]
#[path = "script_tests.rs"]
mod tests;
