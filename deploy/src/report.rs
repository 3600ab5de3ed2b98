//! `paraft report`: the report of what is recorded of a run, also of one that has no end.

use crate::train::tell;
use clap::Args;
use paraft_fleet::{ended::RecordedEnd, failure::Failure};
use paraft_record::{METRICS_FILE, RecordError, RunRecord, read_events};
use paraft_worker::exit;
use std::{
    fs,
    path::{Path, PathBuf},
};

#[derive(Args)]
pub struct ReportArgs {
    /// The run's folder.
    pub run_dir: PathBuf,
    /// Print the summary as one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &ReportArgs) -> Result<i32, Failure> {
    let dir = &args.run_dir;
    let file = dir.join(METRICS_FILE);
    let events = read_events(&file).map_err(|e| unreadable(e, dir))?;
    let recorded = RecordedEnd::of(&events);
    let mut record = RunRecord::from_events(events)
        .ok_or_else(|| unreadable(RecordError::NoRun { path: file.clone() }, dir))?;
    recorded.note(dir, &mut record);
    tell(&record, dir, args.json)?;
    if let Some(sentence) = record.end.as_ref().and_then(|end| end.sentence.as_ref()) {
        eprintln!("note: {sentence}");
    }
    if recorded.summary.is_none() && record.shards.is_empty() {
        eprintln!("note: what the servers count (delays, bytes, processor time) is missing");
    }
    Ok(exit::OK)
}

/// A record that gives no report, with what to do.
fn unreadable(e: RecordError, dir: &Path) -> Failure {
    let help = match &e {
        RecordError::DamagedLine { path, line, .. } => {
            format!(
                "make a copy of the file, then remove the line with sed -i {line}d {}; the others may be whole",
                path.display()
            )
        }
        RecordError::NoRun { .. } => {
            "the run ended before it began, or the file is cut: its launcher.log and *.stderr say more".into()
        }
        _ if has_runs(dir) => {
            format!("{} holds several runs: name the folder of one of them", dir.display())
        }
        _ => "name the folder of a run, such as runs/NAME-1: the one that `paraft train` prints".into(),
    };
    let code = match &e {
        RecordError::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => exit::IO,
        _ => exit::DATA,
    };
    Failure::new(code, e).help(help)
}

/// Whether the folders in this one are those of runs, as in a comparison.
fn has_runs(dir: &Path) -> bool {
    let mut all = fs::read_dir(dir).into_iter().flatten().flatten();
    all.any(|entry| entry.path().join(METRICS_FILE).is_file())
}
