//! `paraft stop`, `paraft delete` and `paraft logs`: what a person does with a job of a fleet, by its name.

use crate::{jobs::FleetOf, submit::LAUNCHER_LOG};
use clap::Args;
use paraft_fleet::{ask, existing, failure::Failure, out, targets::addresses};
use paraft_proto::JobInfo;
use paraft_record::{Event, METRICS_FILE, read_events};
use paraft_worker::exit;
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct StopArgs {
    /// The job's name, as `paraft jobs` shows it.
    pub job: String,
    #[command(flatten)]
    pub fleet: FleetOf,
    /// Wait at most this many seconds until its workers have finished.
    #[arg(long, default_value_t = 60)]
    pub wait: u64,
}

#[derive(Args)]
pub struct DeleteArgs {
    /// The job's name, as `paraft jobs` shows it.
    pub job: String,
    #[command(flatten)]
    pub fleet: FleetOf,
}

#[derive(Args)]
pub struct LogsArgs {
    /// The job's name, as `paraft jobs` shows it.
    pub job: String,
    #[command(flatten)]
    pub fleet: FleetOf,
    /// The last lines of each log; 0: all of it.
    #[arg(long, short = 'n', default_value_t = 10)]
    pub lines: usize,
    /// Go on until the job has ended.
    #[arg(long, short = 'f')]
    pub follow: bool,
}

/// `paraft stop`: its workers finish where they are, and its weights are kept as after any end.
pub fn stop(args: &StopArgs) -> Result<i32, Failure> {
    let servers = args.fleet.servers()?;
    let was = existing::end(&servers, &args.job, false)?;
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let own = args.fleet.of.as_deref().filter(|of| of.is_dir());
    let mut seen = was.clone();
    while matches!(seen.as_str(), "running" | "waiting") {
        if Instant::now() > deadline {
            let why = format!("{} is told to stop, and some of its workers have not finished", args.job);
            return Err(Failure::new(exit::UNAVAILABLE, why)
                .help("it goes on; `paraft status` shows who; `paraft delete` does not wait for them"));
        }
        std::thread::sleep(Duration::from_millis(50));
        match find(&servers, &args.job) {
            Ok(Some(job)) => seen = job.state,
            Ok(None) => seen = "deleted".into(),
            // The servers that a launcher has started end with its run.
            Err(_) if own.is_some_and(is_over) => seen = "stopped, and its servers with it".into(),
            Err(e) if Instant::now() > deadline => return Err(e),
            Err(_) => {}
        }
    }
    match was == seen {
        true => out!("{} was {was} already", args.job),
        false => out!("{} is {seen}", args.job),
    }
    Ok(exit::OK)
}

/// `paraft delete`: with all that the servers have of it.
pub fn delete(args: &DeleteArgs) -> Result<i32, Failure> {
    let was = existing::end(&args.fleet.servers()?, &args.job, true)?;
    out!("{} is deleted; it was {was}. Its files and its checkpoints stay where they are", args.job);
    Ok(exit::OK)
}

/// Whether the run in this folder has come to its end.
fn is_over(run: &Path) -> bool {
    let events = read_events(run.join(METRICS_FILE));
    events.is_ok_and(|events| matches!(events.last(), Some(Event::Summary(_))))
}

/// The latest job of this name.
fn find(servers: &[String], name: &str) -> Result<Option<JobInfo>, Failure> {
    let jobs = ask::jobs(servers)?;
    Ok(jobs.into_iter().filter(|j| j.name == name).max_by_key(|j| j.job))
}

/// `paraft logs`: what the launcher and the workers of a job have said, where their folder is in reach.
pub fn logs(args: &LogsArgs) -> Result<i32, Failure> {
    let servers = args.fleet.servers()?;
    let look = || -> Result<JobInfo, Failure> {
        find(&servers, &args.job)?.ok_or_else(|| {
            Failure::new(exit::CONFIG, format!("this fleet has no job `{}`", args.job))
                .help("`paraft jobs` shows those that it has")
        })
    };
    let job = look()?;
    let (host, folder) = job.run.split_once(':').unwrap_or(("", &job.run));
    // The job that a fleet was founded for writes beside it.
    let own = args.fleet.of.as_deref().filter(|of| job.run.is_empty() && of.join(METRICS_FILE).is_file());
    let folder = own.map_or_else(|| PathBuf::from(folder), Path::to_path_buf);
    if folder.as_os_str().is_empty() || !folder.is_dir() {
        let why = match job.run.is_empty() {
            true => format!("nobody has said where the workers of {} write", args.job),
            false => format!(
                "the logs of {} are in {} on {host}, which is no folder here",
                args.job,
                folder.display()
            ),
        };
        return Err(Failure::new(exit::DATA, why).help("ask there, or look at that host's files"));
    }
    let mut shown = BTreeMap::new();
    for log in logs_in(&folder) {
        let text = fs::read(&log).map_err(|e| Failure::new(exit::DATA, format!("{}: {e}", log.display())))?;
        shown.insert(log.clone(), text.len() as u64);
        say(&log, last_lines(&text, args.lines));
    }
    if !args.follow {
        return Ok(exit::OK);
    }
    let mut ended = job.ended_ms > 0;
    loop {
        for log in logs_in(&folder) {
            let from = shown.entry(log.clone()).or_default();
            let more = read_from(&log, *from).unwrap_or_default();
            *from += more.len() as u64;
            say(&log, &more);
        }
        if ended {
            return Ok(exit::OK);
        }
        std::thread::sleep(Duration::from_millis(200));
        ended = look()?.ended_ms > 0;
    }
}

/// The launcher's, then the workers'.
fn logs_in(folder: &Path) -> Vec<PathBuf> {
    let names =
        fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|f| f.file_name().into_string().ok());
    let is_log = |n: &String| {
        n == LAUNCHER_LOG || n.starts_with("worker-") && (n.ends_with(".log") || n.ends_with(".out"))
    };
    let mut names: Vec<String> = names.filter(is_log).collect();
    names.sort();
    names.into_iter().map(|n| folder.join(n)).collect()
}

fn read_from(file: &Path, at: u64) -> std::io::Result<Vec<u8>> {
    let mut file = fs::File::open(file)?;
    file.seek(SeekFrom::Start(at))?;
    let mut more = Vec::new();
    file.read_to_end(&mut more)?;
    Ok(more)
}

/// With the file's name before it, as `tail` writes it.
fn say(file: &Path, text: &[u8]) {
    if !text.is_empty() {
        out!("==> {} <==", file.file_name().unwrap_or_default().to_string_lossy());
        let _ = std::io::stdout().write_all(text);
    }
}

/// The last so many lines; all for 0.
fn last_lines(text: &[u8], lines: usize) -> &[u8] {
    let ends = text.iter().enumerate().rev().filter(|(i, b)| **b == b'\n' && i + 1 < text.len());
    let before = ends.map(|(i, _)| i + 1).nth(lines.wrapping_sub(1));
    &text[before.filter(|_| lines > 0).unwrap_or(0)..]
}

impl FleetOf {
    /// Its servers.
    pub fn servers(&self) -> Result<Vec<String>, Failure> {
        addresses(self.of.as_deref(), &self.servers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_as_many_as_was_asked() {
        let text = b"a\nb\nc\n";
        for (lines, last) in [(0, "a\nb\nc\n"), (1, "c\n"), (2, "b\nc\n"), (9, "a\nb\nc\n")] {
            assert_eq!(last_lines(text, lines), last.as_bytes(), "{lines}");
        }
        assert_eq!(last_lines(b"a\nb", 1), b"b");
        assert_eq!(last_lines(b"", 3), b"");
    }
}
