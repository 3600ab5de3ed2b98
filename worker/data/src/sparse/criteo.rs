//! Criteo's click logs: a label, 13 counts and 26 categories a line, separated by tabs (Display Advertising
//! Challenge, Terabyte), or by commas below a header with the names `Label`, `I1` to `I13`, `C1` to `C26`.
//!
//! As in DLRM's preparation of these files, a count x becomes ln(1 + x), one that is missing or negative 0, and a
//! missing category is the category 0. The logarithm is our own, so that all hosts have the same bits.

use super::SparseBatch;
use super::lines::{Fault, fault, read_samples, shown};
use super::targets::Targets;
use crate::{DataError, Task};
use paraft_common::optim::exact;
use std::path::Path;

/// Number of counts.
const COUNTS: usize = 13;
/// Number of categories.
const CATEGORIES: usize = 26;
const ALL: usize = 1 + COUNTS + CATEGORIES;

/// Reads all samples from a file, plain or gzip: 13 dense values, and 26 fields of one id a sample, the number that
/// the file has in hexadecimal.
///
/// # Errors
/// [`DataError::Malformed`] with line and column; [`DataError::Read`], [`DataError::TooLarge`].
pub fn read_criteo(path: &Path) -> Result<SparseBatch, DataError> {
    let mut targets = Targets::new(Task::Classification);
    let mut columns: Option<Columns> = None;
    read_samples(path, CATEGORIES, |line, samples| {
        let Some(columns) = &columns else {
            let first = Columns::of(line)?;
            let sample = if first.names { None } else { Some(first.sample(line, &mut targets, samples)?) };
            columns = Some(first);
            return Ok(sample);
        };
        columns.sample(line, &mut targets, samples).map(Some)
    })
}

/// The use of each column.
struct Columns {
    separator: u8,
    names: bool,
    /// For each field of a line its place among label, counts and categories; none if it is another column.
    uses: Vec<Option<usize>>,
}

impl Columns {
    /// As the first line says.
    fn of(line: &[u8]) -> Result<Self, Fault> {
        let separator = if line.contains(&b'\t') { b'\t' } else { b',' };
        let fields: Vec<&[u8]> = line.split(|b| *b == separator).map(<[u8]>::trim_ascii).collect();
        let named = |name: String| {
            let mut found =
                fields.iter().enumerate().filter(|(_, f)| f.eq_ignore_ascii_case(name.as_bytes()));
            match (found.next(), found.next()) {
                (Some((at, _)), None) => Ok(at),
                (Some(_), Some(_)) => fault(0, format!("two columns are named {name}"), "rename one of them"),
                (None, _) => fault(
                    0,
                    format!("no column is named {name}"),
                    "name the columns Label, I1 to I13 and C1 to C26; a file without labels cannot be evaluated",
                ),
            }
        };
        let names = fields.iter().any(|f| f.eq_ignore_ascii_case(b"C1") || f.eq_ignore_ascii_case(b"label"));
        if !names {
            let uses = (0..ALL).map(Some).collect();
            return Ok(Self { separator, names, uses });
        }
        let mut uses = vec![None; fields.len()];
        let counts = (1..=COUNTS).map(|i| format!("I{i}"));
        let categories = (1..=CATEGORIES).map(|i| format!("C{i}"));
        let all = ["Label".to_owned()].into_iter().chain(counts).chain(categories);
        for (place, name) in all.enumerate() {
            uses[named(name)?] = Some(place);
        }
        Ok(Self { separator, names, uses })
    }

    /// A line's label and importance; the rest goes into `samples`.
    fn sample(
        &self,
        line: &[u8],
        targets: &mut Targets,
        samples: &mut SparseBatch,
    ) -> Result<(f32, f32), Fault> {
        let found = line.iter().filter(|b| **b == self.separator).count() + 1;
        if found != self.uses.len() {
            let remedy = if found + 1 == self.uses.len() && !self.names {
                "give the file with the labels: the challenge's test.txt has none"
            } else {
                "give every row as many fields, and leave none out"
            };
            return fault(0, format!("{found} fields where {} belong", self.uses.len()), remedy);
        }
        let (mut at, mut label) = (0, 0.0);
        let from = samples.dense.len();
        samples.dense.resize(from + COUNTS, 0.0);
        for (field, place) in line.split(|b| *b == self.separator).zip(&self.uses) {
            match place {
                None => {}
                Some(0) => label = targets.label(field, at)?,
                Some(place) if *place <= COUNTS => samples.dense[from + place - 1] = count(field, at)?,
                Some(place) => samples.fields[place - 1 - COUNTS].push(category(field, at)?, 1.0),
            }
            at += field.len() + 1;
        }
        Ok((label, 1.0))
    }
}

fn count(field: &[u8], at: usize) -> Result<f32, Fault> {
    if field.is_empty() {
        return Ok(0.0);
    }
    match std::str::from_utf8(field).ok().and_then(|f| f.parse::<i64>().ok()) {
        Some(count) => Ok(exact::ln(1.0 + count.max(0) as f64) as f32),
        None => fault(
            at,
            format!("count {} is no whole number", shown(field)),
            "write a whole number, or nothing if it is missing",
        ),
    }
}

fn category(field: &[u8], at: usize) -> Result<u64, Fault> {
    let digit = |b: &u8| char::from(*b).to_digit(16).map(u64::from);
    match field.iter().try_fold(0u64, |id, b| Some(id << 4 | digit(b)?)) {
        Some(id) if field.len() <= 16 => Ok(id),
        _ => fault(
            at,
            format!("category {} is no hexadecimal number of up to 16 digits", shown(field)),
            "write the category's hash, or nothing if it is missing",
        ),
    }
}

#[cfg(test)]
#[path = "criteo_tests.rs"]
mod tests;
