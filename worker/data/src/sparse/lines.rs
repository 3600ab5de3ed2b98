//! A text file line by line, plain or gzip, and the fields of its lines. Faults know their column.

use super::SparseBatch;
use crate::input::{self, Input, MAX_BYTES};
use crate::{DataError, Place};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// No real line is longer, and a file of a single line is none of these formats.
const MAX_LINE: u64 = 16 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What is wrong with a line.
pub(super) struct Fault {
    /// The byte of the line, from 0.
    pub at: usize,
    pub what: String,
    pub remedy: &'static str,
}

pub(super) fn fault<T>(at: usize, what: impl Into<String>, remedy: &'static str) -> Result<T, Fault> {
    Err(Fault { at, what: what.into(), remedy })
}

/// Reads the samples of all lines that are not blank. `parse` adds one line's ids to the batch and returns the sample's
/// label and importance, or nothing for a line without a sample.
pub(super) fn read_samples(
    path: &Path,
    fields: usize,
    mut parse: impl FnMut(&[u8], &mut SparseBatch) -> Result<Option<(f32, f32)>, Fault>,
) -> Result<SparseBatch, DataError> {
    let mut input = BufReader::with_capacity(1 << 18, input::open(path)?);
    let (mut line, mut number) = (Vec::new(), 0);
    let mut samples = SparseBatch::new(fields);
    while next(&mut input, &mut line)? {
        number += 1;
        let text = line.strip_prefix(BYTE_ORDER_MARK).filter(|_| number == 1).unwrap_or(&line);
        if text.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let sample = parse(text, &mut samples).map_err(|Fault { at, what, remedy }| {
            let place = Place::Column { line: number, column: at as u64 + 1 };
            input.get_ref().malformed(place, what, remedy)
        })?;
        if let Some((label, importance)) = sample
            && !samples.end(label, importance)
        {
            let what = "this is one sample, or id, more than a 32-bit offset can name";
            return Err(input.get_ref().malformed(Place::Line(number), what, "use a smaller part of it"));
        }
    }
    let end = input.get_ref();
    if end.at() >= MAX_BYTES {
        return Err(end.too_large(end.at(), MAX_BYTES));
    }
    if samples.is_empty() {
        return Err(end.malformed(Place::File, "no sample", "check that it is the right file"));
    }
    Ok(samples)
}

/// Reads the next line into `line`, without its end; false at the end of the file.
fn next(input: &mut BufReader<Input<'static>>, line: &mut Vec<u8>) -> Result<bool, DataError> {
    line.clear();
    if input.get_ref().at() >= MAX_BYTES {
        return Ok(false);
    }
    match input.by_ref().take(MAX_LINE).read_until(b'\n', line) {
        Ok(0) => return Ok(false),
        Ok(_) => {}
        Err(e) => return Err(input.get_ref().failed(e)),
    }
    if line.last() == Some(&b'\n') {
        line.pop();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
    } else if line.len() as u64 == MAX_LINE {
        let input = input.get_ref();
        let what = format!("a line of more than {MAX_LINE} bytes ends near here");
        return Err(input.malformed(
            Place::Byte(input.at()),
            what,
            "check that it is a text file of this format",
        ));
    }
    Ok(true)
}

/// The words of a line between blanks and tabs, each with its place.
pub(super) fn words(line: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = 0;
    std::iter::from_fn(move || {
        at += line[at..].iter().position(|b| !is_blank(*b))?;
        let from = at;
        at += line[at..].iter().position(|b| is_blank(*b)).unwrap_or(line.len() - at);
        Some((from, &line[from..at]))
    })
}

fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// A word cut at its first `:`.
pub(super) fn cut_at_colon(word: &[u8]) -> (&[u8], Option<&[u8]>) {
    match word.iter().position(|b| *b == b':') {
        Some(at) => (&word[..at], Some(&word[at + 1..])),
        None => (word, None),
    }
}

/// A finite number.
pub(super) fn number(word: &[u8]) -> Option<f32> {
    if let [digit @ b'0'..=b'9'] = word {
        return Some(f32::from(digit - b'0'));
    }
    let number: f32 = std::str::from_utf8(word).ok()?.parse().ok()?;
    number.is_finite().then_some(number)
}

/// A whole number of digits alone.
pub(super) fn whole(word: &[u8]) -> Option<u64> {
    if word.is_empty() {
        return None;
    }
    word.iter().try_fold(0u64, |n, byte| {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 { None } else { n.checked_mul(10)?.checked_add(u64::from(digit)) }
    })
}

/// The start of a word, for messages.
pub(super) fn shown(word: &[u8]) -> String {
    format!("`{}`", String::from_utf8_lossy(&word[..word.len().min(40)]))
}
