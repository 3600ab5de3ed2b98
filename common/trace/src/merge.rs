//! Reads and merges the trace files of several processes.

use crate::{
    Span, TRACE_FILE, TRACE_FOLDER, chrome,
    file::{Incarnation, Line},
};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

/// Why the merge failed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file cannot be read or written.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    /// A file is not a trace file.
    #[error(
        "{path}:{line}: this is no trace of Paraft ({why}); leave only what `--trace` wrote in the folder"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line in the file, from 1.
        line: usize,
        /// The error.
        why: String,
    },
    /// No files to merge.
    #[error("{0} holds no trace: start the processes with --trace")]
    Empty(PathBuf),
}

/// The result of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// The merged file.
    pub path: PathBuf,
    /// Processes in the trace; a restarted process counts twice.
    pub processes: usize,
    /// Their spans.
    pub spans: usize,
    /// Spans that were dropped.
    pub missing: u64,
}

/// Merges the files of `folder` into one that chrome://tracing and ui.perfetto.dev open. `folder` may
/// also be a run's folder, which contains the folder of the traces.
///
/// Processes of one host share a clock. Other hosts are aligned by their wall clocks, so their
/// alignment is as good as the wall clocks agree.
///
/// Without `to`, the result is beside the folder of the traces, as [`TRACE_FILE`].
pub fn merge(folder: &Path, to: Option<&Path>) -> Result<Merged, TraceError> {
    let (folder, incarnations) = gather(folder)?;
    let to = to.map_or_else(|| folder.with_file_name(TRACE_FILE), Path::to_path_buf);
    let mut out = BufWriter::new(File::create(&to).map_err(io(&to))?);
    chrome::write(&mut out, &incarnations).and_then(|()| out.flush()).map_err(io(&to))?;
    Ok(Merged {
        path: to,
        processes: incarnations.len(),
        spans: incarnations.iter().map(|l| l.spans.len()).sum(),
        missing: incarnations.iter().map(|l| l.missing).sum(),
    })
}

fn io(path: &Path) -> impl FnOnce(io::Error) -> TraceError {
    let path = path.to_path_buf();
    move |e| TraceError::Io(path, e)
}

/// The spans of the processes with files in `folder`, or in its folder of traces, on one clock; with
/// that folder.
pub(crate) fn gather(folder: &Path) -> Result<(PathBuf, Vec<Incarnation>), TraceError> {
    let inner = folder.join(TRACE_FOLDER);
    let folder = if inner.is_dir() { inner } else { folder.to_path_buf() };
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).map_err(io(&folder))? {
        let path = entry.map_err(io(&folder))?.path();
        if path.extension().is_some_and(|e| e == "jsonl") {
            files.push(path);
        }
    }
    files.sort();
    let mut incarnations = Vec::new();
    for path in &files {
        incarnations.extend(read(path)?);
    }
    incarnations.retain(|l| !l.spans.is_empty() || l.missing > 0);
    // Worker steps come first, where a reader starts.
    incarnations.sort_by_key(|l| !l.process.name.starts_with("worker"));
    if incarnations.is_empty() {
        return Err(TraceError::Empty(folder));
    }
    align(&mut incarnations);
    Ok((folder, incarnations))
}

/// The spans of one process, over all its restarts, on its own clock.
///
/// # Errors
///
/// The file is unreadable, or not a trace file.
pub fn spans(path: &Path) -> Result<Vec<Span>, TraceError> {
    Ok(read(path)?.into_iter().flat_map(|life| life.spans).collect())
}

fn read(path: &Path) -> Result<Vec<Incarnation>, TraceError> {
    let io = |e| TraceError::Io(path.to_path_buf(), e);
    let mut lines = BufReader::new(File::open(path).map_err(io)?).split(b'\n').enumerate().peekable();
    let mut incarnations: Vec<Incarnation> = Vec::new();
    let mut torn = None;
    while let Some((i, text)) = lines.next() {
        let text = text.map_err(io)?;
        if text.is_empty() {
            continue;
        }
        let malformed = |why: String| TraceError::Malformed { path: path.to_path_buf(), line: i + 1, why };
        match (serde_json::from_slice(&text), incarnations.last_mut()) {
            (Ok(Line::Process(process)), _) => {
                torn = None;
                incarnations.push(Incarnation { process, spans: Vec::new(), missing: 0 });
            }
            (Ok(_), _) if torn.is_some() => break,
            (Ok(Line::Span(span)), Some(incarnation)) => {
                incarnation.spans.push(Span { end: span.end.max(span.begin), ..span });
            }
            (Ok(Line::Missing(n)), Some(incarnation)) => incarnation.missing = n,
            (Ok(_), None) => return Err(malformed("it does not begin with its process".into())),
            // A kill may truncate the last line of an incarnation.
            (Err(e), Some(_)) if torn.is_none() => torn = Some(malformed(e.to_string())),
            (Err(e), _) => return Err(malformed(e.to_string())),
        }
        if torn.is_some() && lines.peek().is_none() {
            return Ok(incarnations);
        }
    }
    torn.map_or(Ok(incarnations), Err)
}

/// Converts all times to the clock of the first host.
fn align(incarnations: &mut [Incarnation]) {
    let Some(reference) = incarnations.first().map(|l| l.process.epoch) else { return };
    // One epoch per host: the processes' own measurements differ when the wall clock is adjusted.
    let mut epochs = BTreeMap::new();
    for incarnation in incarnations {
        let own = incarnation.process.epoch;
        let epoch = match incarnation.process.boot.as_str() {
            "" => own,
            boot => *epochs.entry(boot.to_string()).or_insert(own),
        };
        let shift = epoch.saturating_sub(reference);
        for span in &mut incarnation.spans {
            span.begin.0 = span.begin.0.saturating_add_signed(shift);
            span.end.0 = span.end.0.saturating_add_signed(shift);
        }
    }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
