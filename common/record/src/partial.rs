//! Parts of a record, for readers that must not wait for all of a long one.

use crate::{Event, RecordError};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes of a piece of a sampled record: some hundred lines, so that each worker has a line in most pieces.
const PIECE: u64 = 1 << 16;
/// Maximal bytes of the first line.
const MAX_FIRST_LINE: u64 = 1 << 20;

/// How the frequent lines begin: the writers put the kind first.
const TRAIN: &[u8] = br#"{"event":"train""#;
const CHUNK: &[u8] = br#"{"event":"chunk""#;
const EVALUATING: &[u8] = br#"{"event":"evaluating""#;

/// As [`read_events`](crate::read_events), with at most about `most` bytes of training lines, from pieces that are spread
/// evenly over the file. Finished chunks, evaluations in progress and damaged lines are left out. A long record is read as
/// a whole but decoded in part. The same file gives the same events.
pub fn read_sampled_events(path: impl AsRef<Path>, most: u64) -> Result<Vec<Event>, RecordError> {
    let path = path.as_ref();
    let file = File::open(path).map_err(RecordError::io(path))?;
    let length = file.metadata().map_err(RecordError::io(path))?.len();
    // One of so many pieces is decoded.
    let every = length.div_ceil(most.max(1)).max(1);
    let mut lines = BufReader::with_capacity(1 << 18, file);
    let (mut at, mut line, mut events) = (0, Vec::new(), Vec::new());
    loop {
        line.clear();
        let read = lines.read_until(b'\n', &mut line).map_err(RecordError::io(path))? as u64;
        // The writer of a line without its line end may still be at it.
        if line.last() != Some(&b'\n') {
            return Ok(events);
        }
        // The last piece shows where the run is now.
        let is_in_sample = (at / PIECE).is_multiple_of(every) || at + PIECE >= length;
        at += read;
        let is_left_out = line.starts_with(CHUNK) || line.starts_with(EVALUATING);
        if !is_left_out && (is_in_sample || !line.starts_with(TRAIN)) {
            events.extend(decoded(&line));
        }
    }
}

/// The events of the first line and of the last `bytes` bytes of the file at `path`. Damaged lines are left out.
pub fn read_ends(path: impl AsRef<Path>, bytes: u64) -> Result<Vec<Event>, RecordError> {
    let path = path.as_ref();
    let mut file = File::open(path).map_err(RecordError::io(path))?;
    let length = file.metadata().map_err(RecordError::io(path))?.len();
    let mut first = Vec::new();
    let mut start = BufReader::new(&file).take(MAX_FIRST_LINE);
    start.read_until(b'\n', &mut first).map_err(RecordError::io(path))?;
    let first_length = first.len() as u64;
    let from = length.saturating_sub(bytes).max(first_length);
    file.seek(SeekFrom::Start(from)).map_err(RecordError::io(path))?;
    let mut last = Vec::new();
    file.read_to_end(&mut last).map_err(RecordError::io(path))?;
    // It may begin within a line.
    let begin = match from > first_length {
        true => last.iter().position(|byte| *byte == b'\n').map_or(last.len(), |at| at + 1),
        false => 0,
    };
    let whole = |line: &&[u8]| line.last() == Some(&b'\n');
    let lines = last[begin..].split_inclusive(|byte| *byte == b'\n').filter(whole);
    Ok(decoded(&first).into_iter().chain(lines.filter_map(decoded)).collect())
}

fn decoded(line: &[u8]) -> Option<Event> {
    serde_json::from_slice(line).ok().filter(|event| *event != Event::Unknown)
}

#[cfg(test)]
#[path = "partial_tests.rs"]
mod tests;
