//! The labels of a table: classes by number, classes by name, or numbers to predict.
//!
//! The first label decides between numbers and names, and the others must be alike: a typing error among numbers is
//! not a class of its own.

use super::{Fault, Task, listed, number};
use crate::{DataError, Place};
use std::collections::BTreeMap;
use std::path::Path;

/// With more classes, the column is not a label; a model would have an output for each.
const MAX_CLASSES: u32 = 1 << 16;
const ALIKE: &str = "write numbers only, or texts only";

/// The labels of all rows.
#[derive(Debug)]
pub(crate) enum Labels {
    /// No labels.
    None,
    /// Classes by number.
    Classes(Vec<u32>),
    /// Classes by name.
    Names(Names),
    /// Numbers to predict.
    Targets(Vec<f32>),
}

/// Classes by name.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// Each row's name, counted in the order in which they were first seen.
    rows: Vec<u32>,
    /// The count of each name, and its first line.
    seen: BTreeMap<Vec<u8>, (u32, u64)>,
}

impl Labels {
    /// Adds a row's label.
    pub fn push(&mut self, field: &[u8], line: u64, task: Task) -> Result<(), Fault> {
        if field.is_empty() {
            return Err(("the label is missing".into(), "fill the gap, or remove the row"));
        }
        if matches!(self, Self::None) {
            *self = match task {
                Task::Regression => Self::Targets(Vec::new()),
                Task::Classification if is_number(field) => Self::Classes(Vec::new()),
                Task::Classification => Self::Names(Names::default()),
            };
        }
        match self {
            Self::None => {}
            Self::Classes(all) => all.push(class(field)?),
            Self::Names(names) => names.push(field, line)?,
            Self::Targets(all) => {
                let target = number(field).filter(|v| v.is_finite()).ok_or_else(|| {
                    let what = format!("label {} is no finite number", listed(&[field]));
                    (what, "write a number, or set task = \"classification\" to predict classes")
                })?;
                all.push(target);
            }
        }
        Ok(())
    }

    /// The names of the classes, sorted; empty if they have none.
    pub fn names(&self) -> Vec<Vec<u8>> {
        match self {
            Self::Names(names) => names.seen.keys().cloned().collect(),
            _ => Vec::new(),
        }
    }

    /// Numbers classes by their places in `known`, the names of the training file; `path` is for messages.
    pub fn numbered(self, known: &[Vec<u8>], path: &Path) -> Result<Self, DataError> {
        let bad = |at, what, remedy| Err(DataError::Malformed { path: path.to_owned(), at, what, remedy });
        let classes = || listed(&known.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let names = match self {
            Self::Names(names) => names,
            Self::Classes(_) if !known.is_empty() => {
                let what =
                    format!("the labels are numbers, and the training file has the classes {}", classes());
                return bad(Place::File, what, "use the same labels in both files");
            }
            other => return Ok(other),
        };
        let mut numbers = vec![0; names.seen.len()];
        let mut unknown: Option<(u64, &Vec<u8>)> = None;
        for (name, (count, line)) in &names.seen {
            match known.binary_search(name) {
                Ok(at) => numbers[*count as usize] = at as u32,
                Err(_) if unknown.is_none_or(|(first, _)| *line < first) => unknown = Some((*line, name)),
                Err(_) => {}
            }
        }
        if let Some((line, name)) = unknown {
            let classes = if known.is_empty() { "numbers".to_owned() } else { classes() };
            let what = format!("label {} is no class of the training file: {classes}", listed(&[name]));
            return bad(
                Place::Line(line),
                what,
                "correct it, remove the row, or add such rows to the training file",
            );
        }
        Ok(Self::Classes(names.rows.iter().map(|count| numbers[*count as usize]).collect()))
    }
}

impl Names {
    fn push(&mut self, field: &[u8], line: u64) -> Result<(), Fault> {
        if is_number(field) {
            let what = format!("label {} is a number, and those before it are texts", listed(&[field]));
            return Err((what, ALIKE));
        }
        let next = self.seen.len() as u32;
        let count = match self.seen.get(field) {
            Some((count, _)) => *count,
            None if next == MAX_CLASSES => {
                let what = format!("label {} is the {}th different one", listed(&[field]), next + 1);
                return Err((what, "set `label` to the right column"));
            }
            None => {
                self.seen.insert(field.to_vec(), (next, line));
                next
            }
        };
        self.rows.push(count);
        Ok(())
    }
}

fn is_number(field: &[u8]) -> bool {
    number(field).is_some_and(f32::is_finite)
}

/// A class, even if written as `3.0`.
fn class(field: &[u8]) -> Result<u32, Fault> {
    let value: Option<f64> = std::str::from_utf8(field).ok().and_then(|f| f.parse().ok());
    if let Some(v) = value.filter(|v| v.fract() == 0.0 && (0.0..f64::from(MAX_CLASSES)).contains(v)) {
        return Ok(v as u32);
    }
    let what = format!("label {} is no whole number from 0 to {}", listed(&[field]), MAX_CLASSES - 1);
    Err(match value {
        Some(v) if v.is_finite() => (
            what,
            "number the classes from 0, set `label` to the right column, or predict it with task = \"regression\"",
        ),
        _ => (what + ", as those before it are", ALIKE),
    })
}
