//! `paraft logs`: what the launcher, the servers and the workers of a job have said, where their folder is in reach.

use crate::end::find;
use clap::Args;
use paraft_fleet::{
    ask,
    ended::has_end,
    failure::Failure,
    fleet::JOB_FILE,
    launcher_log::LAUNCHER_LOG,
    out,
    run_dir::held,
    targets::{FleetArg, Target, job_name},
};
use paraft_proto::JobInfo;
use paraft_record::METRICS_FILE;
use paraft_worker::{Job, exit};
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    time::Duration,
};

mod line;

#[derive(Args)]
pub struct LogsArgs {
    /// The job's name, as `paraft jobs` shows it. Default: the job of the run, or the only one of the fleet.
    #[arg(value_parser = job_name)]
    pub job: Option<String>,
    #[command(flatten)]
    pub fleet: FleetArg,
    /// The last lines of each log; 0: all of it.
    #[arg(long, short = 'n', default_value_t = 10)]
    pub lines: usize,
    /// Go on until the job has ended.
    #[arg(long, short = 'f')]
    pub follow: bool,
    /// The lines as they are in the files, mostly JSON.
    #[arg(long)]
    pub json: bool,
}

/// `paraft logs`.
pub fn run(args: &LogsArgs) -> Result<i32, Failure> {
    let fleet = args.fleet.to_ask()?;
    let name = args.job.as_deref();
    let mut shown = Shown { lines: args.lines, raw: args.json, follows: args.follow, read: BTreeMap::new() };
    let servers = match fleet.target()? {
        Target::Servers(servers) => servers,
        Target::Ended(run) => {
            name.map_or(Ok(()), |name| run.is_of(name))?;
            if logs_in(&run.dir).is_empty() {
                let why = format!("{}: that run has ended and has no logs", run.dir.display());
                return Err(Failure::new(exit::DATA, why).help("a simulation writes none"));
            }
            shown.follows = false;
            shown.last(&run.dir)?;
            return Ok(exit::OK);
        }
    };
    let own = fleet.folder();
    let name = match name {
        Some(name) => name.to_string(),
        None => only_job(own, &servers)?,
    };
    let look = || -> Result<JobInfo, Failure> {
        find(&servers, &name)?.ok_or_else(|| {
            Failure::new(exit::CONFIG, format!("this fleet has no job `{name}`"))
                .help("`paraft jobs` shows those that it has")
        })
    };
    let job = look()?;
    let folder = folder_of(&job, own)?;
    shown.last(&folder)?;
    let mut ended = !args.follow || job.ended_ms > 0;
    while !ended {
        std::thread::sleep(Duration::from_millis(200));
        ended = match look() {
            Ok(job) => job.ended_ms > 0,
            // The servers that a launcher has started end with its run.
            Err(_) if own.is_some_and(has_end) => true,
            // Its launcher has ended them and is about to write the end.
            Err(_) if own.is_some_and(|run| held(run).is_some()) => false,
            Err(e) => return Err(e),
        };
        shown.more(&folder);
    }
    shown.rest();
    Ok(exit::OK)
}

/// The job that a run's folder is of; else the only one of the fleet.
fn only_job(own: Option<&Path>, servers: &[String]) -> Result<String, Failure> {
    if let Some(job) = own.and_then(|run| Job::load(&run.join(JOB_FILE), &[]).ok()) {
        return Ok(job.name);
    }
    let jobs = ask::jobs(servers)?;
    let mut names: Vec<&str> = jobs.iter().map(|j| j.name.as_str()).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    names.dedup();
    match names[..] {
        [name] => Ok(name.to_string()),
        [] => Err(Failure::new(exit::CONFIG, "this fleet has no jobs")
            .help("`paraft submit JOB --fleet FLEET` gives it one")),
        _ => Err(Failure::new(exit::USAGE, format!("which job? This fleet has {}", names.join(", ")))
            .help("give one of these names: paraft logs JOB")),
    }
}

/// Where a job's processes write.
fn folder_of(job: &JobInfo, own: Option<&Path>) -> Result<PathBuf, Failure> {
    let (host, folder) = job.run.split_once(':').unwrap_or(("", &job.run));
    // The job that a fleet was founded for writes beside it.
    let own = own.filter(|of| job.run.is_empty() && of.join(METRICS_FILE).is_file());
    let folder = own.map_or_else(|| PathBuf::from(folder), Path::to_path_buf);
    if !folder.as_os_str().is_empty() && folder.is_dir() {
        return Ok(folder);
    }
    let why = match job.run.is_empty() {
        true => format!("the folder of the logs of {} is not known", job.name),
        false => {
            format!("the logs of {} are in {} on {host}, which is no folder here", job.name, folder.display())
        }
    };
    Err(Failure::new(exit::DATA, why).help("ask there, or look at that host's files"))
}

/// How far each log is shown.
struct Shown {
    /// The last lines of each at the beginning; 0: all.
    lines: usize,
    /// Lines stay as they are in the file.
    raw: bool,
    /// Lines without an end wait for it.
    follows: bool,
    /// Bytes read, and the last line if it has no end yet.
    read: BTreeMap<PathBuf, (u64, Vec<u8>)>,
}

impl Shown {
    /// Shows the last lines of the logs in a folder.
    fn last(&mut self, folder: &Path) -> Result<(), Failure> {
        for log in logs_in(folder) {
            let text =
                fs::read(&log).map_err(|e| Failure::new(exit::DATA, format!("{}: {e}", log.display())))?;
            let complete = if self.follows { complete(&text) } else { text.len() };
            self.say(&log, last_lines(&text[..complete], self.lines));
            self.read.insert(log, (text.len() as u64, text[complete..].to_vec()));
        }
        Ok(())
    }

    /// Shows the lines that were completed since.
    fn more(&mut self, folder: &Path) {
        for log in logs_in(folder) {
            let (at, mut text) = self.read.remove(&log).unwrap_or_default();
            let more = read_from(&log, at).unwrap_or_default();
            text.extend_from_slice(&more);
            let rest = text.split_off(complete(&text));
            self.say(&log, &text);
            self.read.insert(log, (at + more.len() as u64, rest));
        }
    }

    /// Shows last lines without an end: their writers are gone.
    fn rest(&self) {
        self.read.iter().for_each(|(log, (_, rest))| self.say(log, rest));
    }

    /// With the file's name before it, as `tail` writes it.
    fn say(&self, file: &Path, text: &[u8]) {
        if text.is_empty() {
            return;
        }
        out!("==> {} <==", file.file_name().unwrap_or_default().to_string_lossy());
        if self.raw {
            let _ = std::io::stdout().write_all(text);
            return;
        }
        for line in String::from_utf8_lossy(text).lines() {
            out!("{}", line::readable(line));
        }
    }
}

/// The launcher's, then the servers' and the workers'.
fn logs_in(folder: &Path) -> Vec<PathBuf> {
    let names =
        fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|f| f.file_name().into_string().ok());
    let is_log = |n: &String| {
        let is_process = n.starts_with("server-") || n.starts_with("worker-");
        n == LAUNCHER_LOG || is_process && (n.ends_with(".log") || n.ends_with(".out"))
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

/// The length of the lines that have an end.
fn complete(text: &[u8]) -> usize {
    text.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1)
}

/// The last so many lines; all for 0.
fn last_lines(text: &[u8], lines: usize) -> &[u8] {
    let ends = text.iter().enumerate().rev().filter(|(i, b)| **b == b'\n' && i + 1 < text.len());
    let before = ends.map(|(i, _)| i + 1).nth(lines.wrapping_sub(1));
    &text[before.filter(|_| lines > 0).unwrap_or(0)..]
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
