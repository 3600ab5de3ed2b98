//! A table, separated by commas: one sample per row; all columns except the label are features. Plain or gzip.
//!
//! Every feature must be a finite number, and every row as long as the first. Others are refused with their line,
//! because a silent NaN would end as a silent NaN in the weights.

mod columns;
mod labels;

pub use columns::{Column, LabelColumn};
pub(crate) use labels::Labels;

use crate::input::{self, Input, MAX_BYTES};
use crate::{DataError, Dataset, Place, Samples, Split};
use columns::{Columns, Use};
use csv::ByteRecord;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

/// The default part that is held out.
const TEST_FRACTION: f64 = 0.2;

/// What is wrong, and what to do.
type Fault = (String, &'static str);

/// How to read a table.
#[derive(Clone, Debug, PartialEq)]
pub struct CsvOptions {
    /// The label's column. Default last.
    pub label: LabelColumn,
    /// Whether the label is a class or a number to predict. Default a class.
    pub task: Task,
    /// Columns that are neither label nor feature. Default none.
    pub ignore: Vec<Column>,
    /// Part of the rows held out, above 0 and below 1, spread evenly (0.2: rows 5, 10, 15, ...). Default 0.2.
    /// Not with a test file.
    pub test_fraction: Option<f64>,
    /// Multiplies every feature. Default 1.
    pub scale: f64,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self {
            label: LabelColumn::default(),
            task: Task::default(),
            ignore: Vec::new(),
            test_fraction: None,
            scale: 1.0,
        }
    }
}

/// What the label is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// A class.
    #[default]
    Classification,
    /// A number to predict.
    Regression,
}

impl CsvOptions {
    /// Checks the ranges; the error names the key.
    pub fn validate(&self) -> Result<(), DataError> {
        let option = |key, why: String| Err(DataError::Option { key, why });
        if self.test_fraction.is_some_and(|f| !(f > 0.0 && f < 1.0)) {
            return option("test_fraction", format!("{:?} is not above 0 and below 1", self.test_fraction));
        }
        if self.scale == 0.0 || !(self.scale as f32).is_finite() {
            return option("scale", format!("{} is not a finite number other than 0", self.scale));
        }
        if self.task == Task::Regression && self.label == LabelColumn::None {
            let why =
                "regression predicts the label, and label = \"none\"; set `label` to the column to predict";
            return option("task", why.into());
        }
        Ok(())
    }

    /// Whether a column is given by its name.
    fn names_a_column(&self) -> bool {
        matches!(self.label, LabelColumn::Name(_)) || self.ignore.iter().any(|c| matches!(c, Column::Name(_)))
    }
}

/// Reads a table. A part of it is held out, or a second file is.
pub fn read_csv(path: &Path, test_path: Option<&Path>, options: &CsvOptions) -> Result<Split, DataError> {
    options.validate()?;
    let table = read_table(path, input::open(path)?, options)?;
    let names = table.labels.names();
    let Some(test_path) = test_path else {
        let n = table.rows;
        let held_out = (n as f64 * options.test_fraction.unwrap_or(TEST_FRACTION)).round() as usize;
        if held_out == 0 || held_out >= n {
            let why =
                format!("of {n} rows {held_out} would be held out; training and test need one each at least");
            return Err(DataError::Option { key: "test_fraction", why });
        }
        let table = table.numbered(&names, path)?;
        let classes = classes(path, &names, &[&table])?;
        // Row i is held out when the running share passes an integer: evenly spread, in integer arithmetic.
        let share = |i: usize| (i as u128 * held_out as u128) / n as u128;
        return Ok(table.dataset(classes)?.split(|i| share(i + 1) > share(i)));
    };
    if options.test_fraction.is_some() {
        let why = "it has no meaning beside `test_path`; leave one of them out".into();
        return Err(DataError::Option { key: "test_fraction", why });
    }
    let test = read_table(test_path, input::open(test_path)?, options)?;
    let (features, test_features) = (table.columns.features(), test.columns.features());
    if features != test_features {
        return Err(DataError::Mismatch(format!(
            "{} has {features} feature columns but {} has {test_features}",
            path.display(),
            test_path.display(),
        )));
    }
    if let Some((at, ours, theirs)) = table.columns.differ(&test.columns) {
        return Err(DataError::Mismatch(format!(
            "field {} is {} in {} but {} in {}; give both files the same columns in the same order",
            at + 1,
            listed(&[ours]),
            path.display(),
            listed(&[theirs]),
            test_path.display(),
        )));
    }
    let (table, test) = (table.numbered(&names, path)?, test.numbered(&names, test_path)?);
    let classes = classes(path, &names, &[&table, &test])?;
    Ok(Split { train: table.dataset(classes)?, test: test.dataset(classes)? })
}

/// The number of classes of these tables, whose names are `names` if they have any; 0 without classes. The model
/// has an output for each.
fn classes(path: &Path, names: &[Vec<u8>], tables: &[&Table]) -> Result<usize, DataError> {
    let numbers = tables.iter().filter_map(|t| match &t.labels {
        Labels::Classes(numbers) => Some(numbers),
        _ => None,
    });
    let labels: BTreeSet<u32> = numbers.flatten().copied().collect();
    let Some(&last) = labels.last() else { return Ok(0) };
    let bad =
        |what, remedy| Err(DataError::Malformed { path: path.to_owned(), at: Place::File, what, remedy });
    if labels.len() == 1 {
        let only = names.first().cloned().unwrap_or_else(|| last.to_string().into_bytes());
        let what = format!("every row has the label {}, and a model needs two classes", listed(&[&only]));
        return bad(what, "set `label` to the right column, or to \"none\" if there is none");
    }
    let classes = last as usize + 1;
    if labels.len() < classes / 2 {
        let what = format!(
            "labels up to {last} are {classes} classes, and only {} of these have a sample",
            labels.len()
        );
        return bad(what, "number the classes from 0 without gaps, or set `label` to the right column");
    }
    Ok(classes)
}

/// A file's rows; `values` has only the features.
pub(crate) struct Table {
    pub(crate) values: Vec<f32>,
    pub(crate) labels: Labels,
    columns: Columns,
    rows: usize,
}

impl Table {
    /// Adds a row.
    fn push(&mut self, row: &ByteRecord, options: &CsvOptions) -> Result<(), Fault> {
        let columns = &self.columns;
        if row.len() != columns.uses.len() {
            let what = format!("{} fields where the first row has {}", row.len(), columns.uses.len());
            return Err((what, "give every row as many fields"));
        }
        let may_be_names = self.rows == 0 && !columns.have_names();
        for (at, (field, used)) in row.iter().zip(&columns.uses).enumerate() {
            match used {
                Use::Ignored => continue,
                Use::Label => {
                    self.labels.push(field, line(row), options.task)?;
                    continue;
                }
                Use::Feature => {}
            }
            let shown = || format!("{} is `{}`", columns.shown(at), start(field));
            let value = number(field).ok_or_else(|| {
                let remedy = match field {
                    [] => "fill the gap, or remove the row; `ignore` leaves a column out",
                    _ if may_be_names => {
                        "write a number; if this row holds names, give `label` by its name; `ignore` leaves a column out"
                    }
                    _ => "write a number, or remove the row; `ignore` leaves a column out",
                };
                (shown() + ", not a number", remedy)
            })?;
            let value = value * options.scale as f32;
            if !value.is_finite() {
                return Err((shown() + ": not finite after scaling", "remove the row or fill the gap"));
            }
            self.values.push(value);
        }
        self.rows += 1;
        Ok(())
    }

    /// The same table with classes by number.
    fn numbered(self, names: &[Vec<u8>], path: &Path) -> Result<Self, DataError> {
        Ok(Self { labels: self.labels.numbered(names, path)?, ..self })
    }

    fn dataset(self, classes: usize) -> Result<Dataset, DataError> {
        let (samples, shape) = (Samples::Floats(self.values), vec![self.columns.features()]);
        match self.labels {
            Labels::Classes(labels) => Dataset::new(samples, shape, Some((labels, classes))),
            Labels::Targets(targets) => Dataset::with_targets(samples, shape, &targets),
            Labels::None | Labels::Names(_) => Dataset::new(samples, shape, None),
        }
    }
}

/// Reads all rows of an opened file; `path` is for messages.
pub(crate) fn read_table(path: &Path, file: Input<'_>, options: &CsvOptions) -> Result<Table, DataError> {
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true) // our own message for ragged rows
        .trim(csv::Trim::All)
        .from_reader(file.take(MAX_BYTES));
    let mut row = ByteRecord::new();
    let mut table: Option<Table> = None;
    while read_row(&mut reader, &mut row)? {
        let at = Place::Line(line(&row));
        let bad = |(what, remedy): Fault| DataError::Malformed { path: path.to_owned(), at, what, remedy };
        if let Some(table) = &mut table {
            table.push(&row, options).map_err(bad)?;
            continue;
        }
        if let Some(other) = other_separator(&row) {
            let what = format!("the first row is one field, with {other} in it");
            return Err(bad((what, "separate the fields by commas, and write decimal points")));
        }
        let columns = Columns::of(&row, options).map_err(bad)?;
        let mut first = Table { values: Vec::new(), labels: Labels::None, columns, rows: 0 };
        if !first.columns.have_names() {
            first.push(&row, options).map_err(bad)?;
        }
        table = Some(first);
    }
    let input = reader.get_ref().get_ref();
    if input.at() >= MAX_BYTES {
        return Err(input.too_large(input.at(), MAX_BYTES));
    }
    table
        .filter(|t| t.rows > 0)
        .ok_or_else(|| input.malformed(Place::File, "no row of numbers", "check that it is the right file"))
}

type Reader<'a> = csv::Reader<std::io::Take<Input<'a>>>;

fn read_row(reader: &mut Reader<'_>, row: &mut ByteRecord) -> Result<bool, DataError> {
    reader.read_byte_record(row).map_err(|e| match e.into_kind() {
        csv::ErrorKind::Io(e) => reader.get_ref().get_ref().failed(e),
        other => reader.get_ref().get_ref().failed(std::io::Error::other(format!("{other:?}"))),
    })
}

/// The probable separator of a row without commas.
fn other_separator(row: &ByteRecord) -> Option<&'static str> {
    let only = row.get(0).filter(|_| row.len() == 1)?;
    [(b';', "semicolons"), (b'\t', "tabs")].into_iter().find(|(s, _)| only.contains(s)).map(|(_, name)| name)
}

fn number(field: &[u8]) -> Option<f32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// The line on which a row starts.
fn line(row: &ByteRecord) -> u64 {
    row.position().map_or(0, csv::Position::line)
}

/// The start of a field, for messages.
fn start(field: &[u8]) -> String {
    String::from_utf8_lossy(&field[..field.len().min(40)]).into_owned()
}

/// Fields in messages, the first twenty of them.
fn listed(fields: &[&[u8]]) -> String {
    const MAX_SHOWN: usize = 20;
    let shown: Vec<String> = fields.iter().take(MAX_SHOWN).map(|f| format!("`{}`", start(f))).collect();
    match fields.len().saturating_sub(MAX_SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
#[path = "csv_file_tests.rs"]
mod tests;
